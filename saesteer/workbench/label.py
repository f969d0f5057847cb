"""`saesteer label`: what each feature is about, from a text or from Neuronpedia's export, saved next to the dictionary.

No language model explains features here: what is found in a text gets its label by a rule (``saesteer.labels.rule``).
An engine reads the text, or Transformers; the model's last layers are read in Transformers.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from saesteer.config.config import SaesteerConfig
from saesteer.config.sets import opened
from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.errors import ConfigError
from saesteer.labels import writing
from saesteer.labels.gather import Gathered
from saesteer.labels.lens import lens
from saesteer.labels.neuronpedia import MOST_FEATURES, Export
from saesteer.labels.places import place_of
from saesteer.labels.store import About, Entry
from saesteer.loaders import alone, load, max_act
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import fetch
from saesteer.workbench.features import Backend, open_model
from saesteer.workbench.reads import Asked, Text, asked_of, reads, texts_of
from saesteer.workbench.written import say

EXAMPLES, TOKENS = 5, 6  # kept of each feature: places in texts, promoted and suppressed tokens
# Kinds of sites whose dictionaries do not write into the stream, so the logit lens cannot read their rows.
INSIDE = ("attn_in", "z", "mlp_in_pregain", "mlp_in", "mlp_hidden")


def run(
    console: Console,
    model: str,
    config: SaesteerConfig,
    file: Path,
    *,
    max_tokens: int,
    examples: int = EXAMPLES,
    backend: Backend = "hf",
) -> list[Path]:
    """Read a text, and write the labels of every dictionary next to it.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        config: its dictionaries get labels; without any it is refused, or the embedded labels would be replaced.
        file: plain text in UTF-8.
        max_tokens: how many tokens of the text to read.
        examples: strongest places that are kept of each feature.
        backend: what reads the text, as in `reads`.

    Raises:
        SaesteerError: there is no dictionary, the model, one of them or the text is invalid, no token of
            the text counts, or nothing can be saved.
    """
    if not config.dictionaries:
        raise ConfigError("label needs a dictionary: --dictionary NAME=PLACE[@SITE]")
    oracle, names = open_model(model, config)
    asked = asked_of(oracle, names)
    texts = texts_of(oracle, asked, file, max_tokens)
    drafts = {key: alone(fetch(one.info.source)) for key, one in asked.items()}
    gathered = {key: Gathered(one.info.features, examples) for key, one in asked.items()}
    with reads(backend, model, oracle, asked, texts) as told:
        for number, found in enumerate(track(told, "Reading", len(texts), console=console, transient=True)):
            for key, active in found.items():
                gathered[key].add(number, active)
    saved = []
    for key, one in asked.items():
        place, whose, site = place_of(one.info)
        tokens = gathered[key].tokens
        _keep_unit(one.coder.info, drafts[key], gathered[key].max_act, tokens, one.info.site_in)
        about = About(whose, one.info.features, f"{tokens:,} tokens of {file.name}", one.info.model, tokens, site)
        writing.write(place, about, [text.text for text in texts], _entries(oracle, one, gathered[key], texts))
        seen = int((gathered[key].counts > 0).sum())
        _report(console, f"{key}: {seen:,} of {one.info.features:,} features were active on {tokens:,} tokens", place)
        saved.append(place)
    return saved


def _entries(oracle: Any, one: Asked, found: Gathered, texts: Sequence[Text]) -> Iterator[Entry]:
    spans = [text.spans for text in texts]
    for row, (likely, unlikely) in enumerate(_lenses(oracle, one)):
        yield Entry(
            one.info.ids[row],
            max_act=_short(float(found.max_act[row])),
            density=_short(found.density(row)),
            promotes=likely,
            suppresses=unlikely,
            spots=found.spots(row, spans),
        )


def _lenses(oracle: Any, one: Asked) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Promoted and suppressed tokens of each row; none where the decoder does not write into the stream."""
    if str(one.info.site_out).partition(".")[0] in INSIDE:
        yield from [((), ())] * one.info.features
        return
    for pair in lens(one.coder.w_dec, oracle.model, TOKENS):
        likely, unlikely = (tuple(oracle.tokenizer.batch_decode([[token] for token in ids])) for ids in pair)
        yield likely, unlikely


def run_import(console: Console, config: SaesteerConfig, folder: Path) -> Path:
    """Write labels from Neuronpedia's export of a dictionary next to it.

    Args:
        console: where to print.
        config: has one dictionary.
        folder: with ``features/batch-*.jsonl.gz`` and ``explanations/batch-*.jsonl.gz``.

    Raises:
        SaesteerError: there is not one dictionary, it or the export is invalid, or nothing can be saved.
    """
    sources = opened(config.dictionaries)[0]
    if len(sources) != 1:
        found = f"{len(sources)} dictionaries were named"
        raise ConfigError(f"--from-neuronpedia holds the labels of one dictionary, but {found}; expected one")
    [(name, source)] = sources.items()
    draft = alone(fetch(source.path))
    coder = load(source.path, site=source.reads)
    info, export = coder.info, Export(folder)
    lengths = _lengths(coder)

    def length(feature: int) -> float | None:
        row = info.row_of(feature)
        return None if row is None else lengths[row]

    limit = info.features if info.feature_ids is None else MOST_FEATURES
    entries = list(export.entries(limit, length))
    largest, known = torch.zeros(info.features), {one.feature for one in entries if one.max_act is not None}
    for one in entries:
        largest[info.row_of(one.feature)] = one.max_act or 0.0
    gaps = _gaps(info.ids, known)
    if bool(largest.any()):
        _keep_unit(info, draft, largest, None, None, gaps)
    place, whose, _ = place_of(info)  # Neuronpedia says no site
    about = About(whose, info.features, f"Neuronpedia, {export.address or folder.name}", info.model)
    writing.write(place, about, [], entries)
    labels = sum(one.label is not None for one in entries)
    _report(console, f"{name}: {len(entries):,} of {info.features:,} features, {labels:,} with a label", place)
    if bool(largest.any()) and gaps:
        unknown = info.features - len(known)
        note = f"{unknown:,} features have no maximum activation there: unit max_act is refused for them"
        say(console, f"{name}: {note}")
    if export.mismeasured:
        note = "its maximum activations are left out: Neuronpedia read them from another tensor"
        say(console, f"{export.address}: {note}")
    return place


def _gaps(features: Iterable[int], known: Collection[int]) -> tuple[int, ...]:
    """The features that are not known, as ``CoderInfo.max_act_gaps`` has them."""
    found: list[int] = []
    for one in sorted(features):
        if one not in known:
            found[-1:] = [one + 1] if found[-1:] == [one] else [*found[-1:], one, one + 1]
    return tuple(found)


def _keep_unit(
    info: CoderInfo, draft: Draft, largest: Tensor, tokens: int | None, site: str | None, gaps: Sequence[int] = ()
) -> None:
    """Let requests use the unit max_act: save it where neither the dictionary's file nor ``calibrate`` has it."""
    if info.max_act_from in (None, max_act.LABELS):
        max_act.write(fetch(info.source), draft, largest, tokens=tokens, by=max_act.LABELS, site=site, gaps=gaps)


def _lengths(coder: SparseCoder) -> list[float]:
    """How many times larger Neuronpedia's activations are: |d| of each decoder row.

    SAEDashboard and Neuronpedia leave the rows of ranked features as they are: scaling would change the ranks.
    """
    if coder.info.activation in RANKED:
        return [1.0] * coder.info.features
    lengths: list[float] = torch.linalg.vector_norm(coder.w_dec, dim=-1, dtype=torch.float32).tolist()
    return lengths


def _short(value: float) -> float:
    """Four digits, which is more than such a number means."""
    return float(f"{value:.4g}")


def _report(console: Console, text: str, place: Path) -> None:
    say(console, f"{text}; saved in {place}, {place.stat().st_size / 1e6:.1f} MB")
