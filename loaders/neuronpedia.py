"""A source of Neuronpedia, such as ``np:gemma-2-2b/20-gemmascope-res-16k``, as a place on the hub. Knows no network.

The table is a snapshot of SAELens' own; saesteer/data/neuronpedia.tsv says of which version and day. Where it lacks a
source, the file source.jsonl of Neuronpedia's export names its place: ``np:FOLDER`` or ``np:FOLDER/source.jsonl``. A
name only names: what it leads to is read as any other place, and its features keep the dictionary's own unit.
"""

import json
import re
from collections import defaultdict
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

from saesteer.errors import LoadError
from saesteer.loaders.hub import is_id, unpinned

PREFIX = "np:"
TABLE = Path(__file__).parents[1] / "data" / "neuronpedia.tsv"  # beside saesteer/loaders, in a wheel as well
FILE = "source.jsonl"
_LARGEST = 1 << 20  # bytes of a source.jsonl, which has one line
_ADDRESS = re.compile(r"[\w.-]{1,60}/[\w.-]{1,60}")
_CACHED = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?(.*)")  # in the hub's cache

Place = str | Path  # of a dictionary: a path, an id of the hub, or np: and a source


class Source(NamedTuple):
    """One row of the table."""

    place: str  # org/repo/folder
    model: str  # as SAELens calls it
    site: str | None  # where SAELens' name of the dictionary says it
    address: str = ""  # MODEL/SOURCE; of a row of the table, its key


def source_of(place: Place) -> Source | None:
    """What a place that begins with ``np:`` names; None for any other place.

    Raises:
        LoadError: the table has no such source, or the file is no source.jsonl.
    """
    text = str(place)
    if not text.startswith(PREFIX):
        return None
    name, pin = unpinned(text.removeprefix(PREFIX))
    path, found = Path(name).expanduser(), _table().get(name)
    file = path / FILE if path.is_dir() else path
    if found is None and file.name == FILE and file.is_file():
        found = _exported(file)
    if found:
        return found._replace(place=found.place + pin, address=found.address or name)
    near = get_close_matches(name, _table(), n=3, cutoff=0.5)
    hint = f", such as {', '.join(PREFIX + one for one in near)}" if near else ""
    raise LoadError(f"{text}: no source of Neuronpedia that SAELens lists; expected np:MODEL/SOURCE{hint}")


def resolved(place: Place) -> Place:
    """The place on the hub that ``np:`` names, or the place itself.

    Raises:
        LoadError: the table has no such source, or the file is no source.jsonl.
    """
    found = source_of(place)
    return place if found is None else found.place


def sources_at(place: Place) -> list[Source]:
    """The sources whose dictionary a place is.

    Of ``np:`` it is one; of a place on the hub, or its copy in the hub's cache, those that the table has.

    Raises:
        LoadError: as ``source_of``.
    """
    if found := source_of(place):
        return [found]
    text = hub_id(place) or unpinned(str(place))[0]
    return _by_place().get(text) or _by_place().get(text.rpartition("/")[0], []) if is_id(text) else []


def addresses(said: object) -> tuple[str, ...]:
    """The addresses in a file's text, separated by blanks; none where it is anything else."""
    words = said.split() if isinstance(said, str) else []
    return tuple(words) if all(map(_ADDRESS.fullmatch, words)) else ()


def hub_id(path: Place) -> str | None:
    """``org/repo[/folder]`` of a path in the hub's cache; None for any other path."""
    found = _CACHED.fullmatch(str(path))
    return None if found is None else "/".join(filter(None, (found[1].replace("--", "/"), found[2])))


@cache
def models() -> frozenset[str]:
    """The names of all models in the table, as SAELens and as Neuronpedia write them."""
    return frozenset(name for key, one in _table().items() for name in (one.model, key.partition("/")[0]))


@cache
def _table() -> dict[str, Source]:
    lines = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: Source(place, model, site or None) for name, place, model, site in lines}


@cache
def _by_place() -> dict[str, list[Source]]:
    found = defaultdict(list)
    for name, one in _table().items():
        found[one.place].append(one._replace(address=name))
    return dict(found)


def _exported(file: Path) -> Source:
    """The one line of a source.jsonl."""
    try:
        with file.open("rb") as stream:
            text = stream.read(_LARGEST + 1)
        held = json.loads(text) if len(text) <= _LARGEST else None
    except (OSError, ValueError, RecursionError) as exc:
        raise LoadError(f"{file}: not readable as JSON ({str(exc)[:80]}); expected one line with an object") from exc
    if not isinstance(held, dict):
        raise LoadError(f"{file}: holds no JSON object of {_LARGEST} bytes at most; expected one line with an object")
    keys = "modelId", "id", "hfRepoId", "hfFolderId"
    model, name, repo, folder = (held.get(key) or "" for key in keys)
    for key, value in zip(keys, (model, name, repo, folder), strict=True):
        if not isinstance(value, str) or (not value and key != "hfFolderId"):
            raise LoadError(f"{file}: {key}: {str(held.get(key))[:60]!r}; expected a text")
    address, place = f"{model}/{name}", f"{repo}/{folder}".rstrip("/")
    if not _ADDRESS.fullmatch(address) or not is_id(place) or repo.count("/") != 1 or "*" in place:
        raise LoadError(
            f"{file}: hfRepoId and hfFolderId: {place[:80]!r} of {address[:80]!r}; expected org/repo and a folder"
        )
    return Source(place, model, None, address)
