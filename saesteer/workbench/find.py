"""`saesteer find`: features by words, by number, or by what tells two texts apart. Reads label files; searches offline.

A search imports no torch, so that its answer comes at once.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from saesteer.commands.embedded import dictionaries
from saesteer.config.config import SaesteerConfig
from saesteer.config.sources import DictionarySource
from saesteer.errors import ConfigError, printable
from saesteer.labels.store import MOST, Example, Feature, Labels, words_of
from saesteer.workbench.written import rounded

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo
    from saesteer.workbench.features import Backend

_EXAMPLES = 2  # shown of each feature


class _Found(NamedTuple):
    feature: Feature
    score: str = ""  # as the table shows it
    facts: Mapping[str, Any] = {}  # the same in the JSON object, and what was asked


def run(console: Console, config: SaesteerConfig, words: str, *, feature: int | None, most: int, as_json: bool) -> None:
    """Print the features that words describe, or one feature. A dictionary where nothing is found is named on stderr.

    Args:
        console: where to print.
        config: the dictionaries to search; without any, the embedded ones.
        words: what to look for in labels and examples; unused with `feature`.
        feature: the number of the feature to describe.
        most: how many features of each dictionary.
        as_json: print one JSON object for each feature, in one line.

    Raises:
        SaesteerError: there is nothing to look for, no dictionary has the feature, or a dictionary has no labels.
    """
    if feature is None and not words_of(words):
        raise ConfigError(f"got {words!r}, expected words to look for, --feature NUMBER, or --positive and --negative")
    tables: dict[str, list[_Found]] = {}
    without: list[str] = []
    with ExitStack() as stack:
        for name, source, labels in _opened(config):
            stack.enter_context(labels)
            if feature is None:
                found = labels.find(words, min(most, MOST))
                rows = [_Found(one, f"{score:.1f}", {"query": words, "score": round(score, 2)}) for score, one in found]
                without += [] if rows else [f"no feature of {name!r} matches {words!r}"]
                if found and (near := found[0][1].instead):
                    without.append(f"no feature of {name!r} matches {words!r}; did you mean {near!r}?")
            else:
                rows = [] if (one := labels.feature(feature)) is None else [_Found(one)]
                without += [] if rows else [f"--feature {feature}: {_numbers(name, labels, feature)}"]
            if as_json or feature is not None:
                rows = [_with_max_act(one, _described(source)) for one in rows]
            tables[name] = rows
    if feature is not None and not any(tables.values()):
        raise ConfigError("; ".join(without))
    for name, rows in tables.items():
        if rows:
            _print(console, name, "score", rows, as_json=as_json, whole=feature is not None)
    for note in without:
        print(note, file=sys.stderr)  # noqa: T201  # only the command calls it


def run_contrast(
    console: Console,
    model: str,
    config: SaesteerConfig,
    positive: Path,
    negative: Path,
    *,
    most: int,
    max_tokens: int,
    as_json: bool = False,
    backend: "Backend" = "hf",
) -> None:
    """Print the features whose mean activation is larger in one text than in another, the largest difference first.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        config: its dictionaries; `demo` uses its own if none is named.
        positive: a text in UTF-8.
        negative: a text in UTF-8.
        most: how many features of each dictionary.
        max_tokens: how many tokens of each text to read.
        as_json: as for `run`.
        backend: what reads the texts, as in `saesteer.workbench.reads`.

    Raises:
        SaesteerError: the model, a dictionary or a text is invalid, or no token of a text counts.
    """
    from saesteer.labels.gather import Gathered, strongest
    from saesteer.labels.places import opened
    from saesteer.workbench.features import open_model
    from saesteer.workbench.reads import asked_of, reads, texts_of

    oracle, names = open_model(model, config)
    asked = asked_of(oracle, names)
    sides = [{key: Gathered(one.info.features, 0) for key, one in asked.items()} for _ in range(2)]
    files = {"--positive": positive, "--negative": negative}
    texts, others = (texts_of(oracle, asked, file, max_tokens, flag) for flag, file in files.items())
    with reads(backend, model, oracle, asked, [*texts, *others]) as told:
        for number, found in enumerate(told):
            for key, active in found.items():
                sides[number >= len(texts)][key].add(number, active)
    for key, one in asked.items():
        rows = []
        with opened(one.info) or nullcontext() as labels:
            for row, here, there in strongest(sides[0][key], sides[1][key], most):
                number = one.info.ids[row]
                known = None if labels is None else labels.feature(number)
                about = known or Feature(number, None, None, None, None, (), (), ())
                means = {"positive": here, "negative": there}
                rows.append(_with_max_act(_Found(about, f"{here:.3g} - {there:.3g}", means), one.info))
        _print(console, key, "mean activations", rows, as_json=as_json, whole=False)


def _with_max_act(found: _Found, info: "CoderInfo") -> _Found:
    """What was found, with what `unit: max_act` multiplies by. It imports torch, which no search for words needs."""
    from saesteer.loaders import largest

    known = {"max_act": largest(info, found.feature.feature), "max_act_by": info.max_act_from}
    return found._replace(facts={**found.facts, **known})


def _described(source: DictionarySource) -> "CoderInfo":
    from saesteer.loaders import describe

    return describe(source.path, site=source.reads, hashed=False)


def _opened(config: SaesteerConfig) -> Iterator[tuple[str, DictionarySource, Labels]]:
    """The place and the labels of each dictionary, by its key."""
    if not config.dictionaries:
        for name, file in dictionaries().items():  # they and their labels come in one package
            yield name, DictionarySource(str(file)), Labels.open(file.with_name(f"{file.name}.labels"))
        return
    from saesteer.config.assets import sited
    from saesteer.config.sets import opened as sources_of
    from saesteer.labels import places

    for key, source in sources_of(config.dictionaries)[0].items():
        found = places.opened(sited(key, source, _described(source)))
        if found is None:
            raise ConfigError(f"dictionary {key!r} at {source.path} has no labels; `saesteer label` makes them")
        yield key, source, found


def _numbers(name: str, labels: Labels, feature: int) -> str:
    """What to ask for instead of a feature that the labels lack."""
    count = labels.about.features
    if feature >= count and labels.feature(count - 1) is not None:
        return f"dictionary {name!r} has features 0 to {count - 1}"
    return f"dictionary {name!r} has {count} features; this is none of those with labels"


def _print(console: Console, name: str, head: str, rows: list[_Found], *, as_json: bool, whole: bool) -> None:
    if as_json:
        for found in rows:
            told = {"dictionary": name, **found.facts, **found.feature.to_json()}
            console.out(json.dumps(told), highlight=False)
        return
    table = rounded("feature", head, "label", "clamp", escape(f"examples from {name}"), show_lines=True)
    for one, score, facts in rows:
        shown = one.examples if whole else one.examples[:_EXAMPLES]
        lines = [Text(f"{example.value:.1f} ").append(_context(example)) for example in shown]
        if whole:
            lines += [plain(f"promotes   {_tokens(one.promotes)}"), plain(f"suppresses {_tokens(one.suppresses)}")]
            known = [("max_act", facts["max_act"]), ("density", one.density)]
            lines += [Text(f"{what} {value:.4g}") for what, value in known if value is not None]
        by = f" ({one.label_by})" if one.label_by and whole else ""
        label = plain(f"{one.label or ''}{by}")
        table.add_row(str(one.feature), score, label, _effect(one, whole=whole), Text("\n").join(lines))
    console.print(table)


def _effect(one: Feature, *, whole: bool) -> Text:
    if one.only_reads is None:
        return Text("not measured")
    lines = [] if one.best is None else [f"{one.best.value:g} max_act writes"]
    lines += [", ".join(one.writes if whole else one.writes[:3]) or "only reads"]
    lines += [] if one.breaks is None else [f"{one.breaks.value:g} breaks text"]
    return Text("\n").join(map(plain, lines))


def _context(example: Example) -> Text:
    parts = example.before[-40:], example.token, example.after[:24]
    before, token, after = (plain(part.replace("\n", "⏎")) for part in parts)
    token.stylize("bold yellow")
    return before + token + after


def plain(text: str) -> Text:
    """Text from a label file, in which nothing speaks to the terminal."""
    return Text(printable(text))


def _tokens(tokens: tuple[str, ...]) -> str:
    return " ".join(repr(token)[1:-1].strip() for token in tokens)
