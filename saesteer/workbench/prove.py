"""`saesteer prove`: whether a clamp of a feature makes the model say what the feature is about, against controls.

One engine answers all requests (trials.py), those of a feature in one batch; evidence.py has the formulas. Then a
Transformers model gives what the engine does not: the logit lens, and the logits of the output score.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from saesteer.commands.embedded import DEMO_DICTIONARY
from saesteer.commands.serve import check, resolve
from saesteer.commands.waiting import steps
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.errors import ConfigError
from saesteer.labels import places
from saesteer.labels.store import Labels
from saesteer.loaders import load
from saesteer.plugin.job import Batch, Completion
from saesteer.workbench import trials
from saesteer.workbench.chart import Panel, chart
from saesteer.workbench.find import plain
from saesteer.workbench.label import INSIDE
from saesteer.workbench.proofs import Numbers, Proof
from saesteer.workbench.reading import ask, questions, tokenizer_of, tokens_of
from saesteer.workbench.trials import ARMS, CLAMP, DOSES, PROMPTS, SCORE, Key, Subject
from saesteer.workbench.written import check_folder, rounded, say, write

TOKENS = 16  # of an answer
RANDOM, FIRST = 20, 100  # features that are clamped for comparison; features that are proved if none is named
_RUNNING = 64  # requests at once

Request = tuple[Key, Mapping[str, Any]]


def run(
    console: Console,
    model: str,
    config: SaesteerConfig,
    features: Sequence[int] = (),
    *,
    random: int = RANDOM,
    seed: int = 0,
    json_file: Path | None = None,
    plot: Path | None = None,
    verbose: bool = False,
) -> list[Proof]:
    """Prove features of one dictionary, and print a table.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`. When the engine has ended, Transformers load it as well.
        config: its dictionary, which has labels with examples; `demo` uses its own SAE if none is named.
        features: which ones; none: the first hundred that have examples.
        random: how many other features are clamped for comparison.
        seed: of their choice, of the noise and of the bootstrap.
        json_file: where all that was found is written.
        plot: where a picture of the doses is written, as SVG.
        verbose: show vLLM's output.

    Raises:
        SaesteerError: the model, the dictionary or a feature is invalid, something is unknown that a proof needs, the
            engine failed, or a file cannot be written.
    """
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    if plot is not None:
        chart([])  # what draws it may be missing
    place, config, options = resolved(model, config)
    known = Known.open(place, config)
    with known.labels:
        proved = [known.subject(one) for one in dict.fromkeys(features)] or [*islice(known.subjects(), FIRST)]
        others = [*islice(known.subjects(seed, {one.feature for one in proved}), random)]
        if len(others) < random or not proved:
            few = f"labels of {known.info.source} have examples of too few features for {random} others"
            raise ConfigError(f"{few}; `saesteer label --text-file` finds examples in a text")
        tokenizer = tokenizer_of(place)
        with steps(console, hidden=verbose) as show:
            batches = [*_batches(proved, others, seed)]
            show(f"Asking the engine {sum(map(len, batches)):,} times")
            answers = _answers(place, config, options, tokenizer, batches, verbose=verbose)
            show("Reading the logit lens")
            dtype = options.get("dtype", "auto")
            found = [*Numbers(place, dtype, known.labels, tokenizer, proved, others, answers).proofs(seed)]
    _show(console, found)
    if json_file is not None:
        whole = {"model": model, "prompts": PROMPTS, "doses": DOSES, "features": [asdict(one) for one in found]}
        write("--json", json_file, json.dumps(whole, indent=1, ensure_ascii=False))
    if plot is not None:
        write("--plot", plot, chart([_panel(one) for one in found]))
    return found


class Known(NamedTuple):
    """A dictionary with its weights and labels."""

    name: str
    info: CoderInfo
    coder: SparseCoder
    labels: Labels

    @classmethod
    def open(cls, place: str, config: SaesteerConfig) -> "Known":
        """The one dictionary of a configuration that fits the model.

        Raises:
            ConfigError: it lacks what a proof needs.
        """
        infos = check(place, config).infos
        if len(infos) > 1:
            raise ConfigError("one dictionary is measured, this is a set; expected one layer: NAME=PLACE@LAYER")
        [(name, info)] = infos.items()
        if info.targets or str(info.site_out).partition(".")[0] in INSIDE:
            what = f"dictionary {name!r} writes to {' and '.join(info.writes)}"
            raise ConfigError(f"{what}; expected one that writes to one site of the stream")
        if not info.has_max_act:
            raise ConfigError(f"dictionary {name!r}: doses are in max_act, which is unknown; run `saesteer calibrate`")
        if (labels := places.opened(info)) is None:
            raise ConfigError(f"dictionary {name!r} at {info.source} has no labels; `saesteer label` makes them")
        return cls(name, info, load(info.source, site=info.site_in), labels)

    def subject(self, feature: int) -> Subject:
        """A feature that somebody names.

        Raises:
            ConfigError: it is not there, or has no examples.
        """
        if (row := self.info.row_of(feature)) is None:
            raise ConfigError(f"--feature {feature}: dictionary {self.name!r} has no such feature")
        if (found := self._subject(row)) is None:
            unknown = "no text activated it, so its labels have no example to compare with"
            raise ConfigError(f"--feature {feature}: {unknown}")
        return found

    def subjects(self, seed: int | None = None, without: Collection[int] = ()) -> Iterator[Subject]:
        """All features that have examples, in order, or drawn with a seed."""
        count = self.info.features
        for row in range(count) if seed is None else np.random.default_rng(seed).permutation(count).tolist():
            if self.info.ids[row] not in without and (found := self._subject(row)) is not None:
                yield found

    def _subject(self, row: int) -> Subject | None:
        feature = self.info.ids[row]
        about, largest = self.labels.feature(feature), self.coder.max_act
        assert largest is not None
        if about is None or not about.examples or float(largest[row]) <= 0:
            return None
        e, d = (weights[row].float() for weights in (self.coder.w_enc, self.coder.w_dec))
        back = self.info.site_in == self.info.site_out and self.info.in_norm == "none"
        site = self.info.written
        factor = float(e @ d) if back else None
        return Subject(self.name, feature, float(largest[row]), d.numpy(), site, factor, self.info.in_norm)


def resolved(model: str, config: SaesteerConfig) -> tuple[str, SaesteerConfig, dict[str, Any]]:
    """The model's place, one dictionary that is loaded whole, and vLLM's options.

    Raises:
        ConfigError: none is named or several are, or the embedded model cannot be obtained.
    """
    names = list(config.dictionaries) or [DEMO_DICTIONARY] * (model == DEMO_DICTIONARY)
    if len(names) != 1:
        raise ConfigError(f"one dictionary is measured, {len(names)} are named; expected one --dictionary NAME=PLACE")
    place, config, options = resolve(model, config)
    source = replace(config.dictionaries[names[0]], rows=False)
    return place, replace(config, dictionaries={names[0]: source}), options


def _batches(proved: Sequence[Subject], others: Sequence[Subject], seed: int) -> Iterator[list[Request]]:
    """What is asked: first what all proofs share, then a batch for each feature."""
    prompts = len(PROMPTS)
    yield [*trials.plain(prompts), *(one for other in others for one in trials.clamps(other, prompts, read_back=False))]
    for one in proved:
        yield [*trials.clamps(one, prompts), *trials.controls(one, prompts, seed), trials.score(one)]


def _answers(
    place: str,
    config: SaesteerConfig,
    options: Mapping[str, Any],
    tokenizer: Any,
    batches: Sequence[Sequence[Request]],
    *,
    verbose: bool,
) -> dict[Key, Completion]:
    prompts = questions(tokenizer, PROMPTS)
    last = tokens_of(tokenizer, trials.SCORE_PROMPT)
    asked = []
    for batch in batches:
        texts = [last if key.arm == SCORE else prompts[key.prompt] for key, _ in batch]
        asked.append(Batch(texts, [spec for _, spec in batch], max_tokens=TOKENS))
    found = ask(place, config, {**options, "max_num_seqs": _RUNNING}, asked, verbose=verbose)
    pairs = zip(batches, found, strict=True)
    return {key: one for batch, made in pairs for (key, _), one in zip(batch, made, strict=True)}


def _show(console: Console, found: Sequence[Proof]) -> None:
    heads = ["feature", "label", "as it is", *(f"{dose:g}" for dose in DOSES), "flipped", "noise", "others"]
    heads += ["more than others, 95 %", "collapses", "output score", "e · d"]
    table = rounded(*heads)
    for one in found:
        clamp, flipped, noise = ([at.context for at in one.arms[arm]] for arm in ARMS)
        numbers = [one.plain.context, *clamp, *(float(np.mean(each)) for each in (flipped, noise, one.random))]
        gap = f"{one.difference.mean:.2%} ({one.difference.low:.2%} to {one.difference.high:.2%})"
        collapse = "-" if one.collapses_at is None else f"{one.collapses_at:g}"
        rest = [gap, collapse, f"{one.output_score:.3f}", "-" if one.factor is None else f"{one.factor:.2f}"]
        table.add_row(str(one.feature), plain(one.label or ""), *(f"{number:.2%}" for number in numbers), *rest)
    console.print(table)
    say(
        console,
        "Probability of the tokens on which a feature is strongest: as it is; under clamps to 0.5 to 4 max_act; in "
        "the mean over these doses, under as large changes along −d and along noise, and under clamps of others.",
    )


def _panel(one: Proof) -> Panel:
    """A feature's lines: what each arm makes of its tokens, at each dose."""
    lines = {arm: [at.context for at in one.arms[arm]] for arm in ARMS} | {"other features": list(one.random)}
    lines["logit lens"] = [at.lens for at in one.arms[CLAMP]]
    start = {name: one.plain.lens if name == "logit lens" else one.plain.context for name in lines}
    points = {name: [(0.0, start[name]), *zip(DOSES, line, strict=True)] for name, line in lines.items()}
    return Panel(f"{one.feature} {plain(one.label or '').plain}".strip(), points, one.collapses_at)
