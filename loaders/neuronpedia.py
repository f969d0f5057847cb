"""A source of Neuronpedia, such as ``np:gemma-2-2b/20-gemmascope-res-16k``, as a place on the hub. Knows no network.

The table is a snapshot of SAELens' own; saesteer/data/neuronpedia.tsv says of which version and day. A name only names:
what it leads to is read as any other place, and its features keep the dictionary's own unit.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

from saesteer.errors import LoadError

PREFIX = "np:"
TABLE = Path(__file__).parents[1] / "data" / "neuronpedia.tsv"  # beside saesteer/loaders, in a wheel as well


class Source(NamedTuple):
    """One row of the table."""

    place: str  # org/repo/folder
    model: str  # as SAELens calls it
    site: str | None  # where SAELens' name of the dictionary says it


def source_of(place: str | Path) -> Source | None:
    """What a place that begins with ``np:`` names; None for any other place.

    Raises:
        LoadError: the table has no such source.
    """
    text = str(place)
    if not text.startswith(PREFIX):
        return None
    name = text.removeprefix(PREFIX)
    if found := _table().get(name):
        return found
    near = get_close_matches(name, _table(), n=3, cutoff=0.5)
    hint = f", such as {', '.join(PREFIX + one for one in near)}" if near else ""
    raise LoadError(f"{text}: no source of Neuronpedia that SAELens lists; expected np:MODEL/SOURCE{hint}")


def resolved(place: str | Path) -> str | Path:
    """The place on the hub that ``np:`` names, or the place itself.

    Raises:
        LoadError: the table has no such source.
    """
    found = source_of(place)
    return place if found is None else found.place


@cache
def _table() -> dict[str, Source]:
    lines = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: Source(place, model, site or None) for name, place, model, site in lines}
