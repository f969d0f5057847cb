"""From a place (a path or a hub id) to files on disk, and readers of small JSON files. Knows no weight format.

A place that ends in ``#name`` is the file ``name.safetensors`` of the folder.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from saesteer.errors import LoadError
from saesteer.loaders.cache import digest_of
from saesteer.loaders.hub import download, is_id, unpinned
from saesteer.loaders.neuronpedia import Place, resolved

LARGEST_YAML = 1 << 20
_POINTER = b"version https://git-lfs.github.com/spec/"
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's name of a large file; a small file's is git's digest, 40 characters

Document = dict[str, Any]  # a small JSON or YAML file
State = tuple[int, int, int, int]  # what is the same as long as a file is: device, inode, size, time in ns


def wrong(file: Path | str, key: str, found: object, expected: str) -> LoadError:
    """The form of every loader's error: file, key, what is there, what was expected."""
    return LoadError(f"{file}: {key}: {found}; expected {expected}")


@contextmanager
def readable(what: str, expected: str) -> Iterator[None]:
    """Turns whatever the libraries raise for broken bytes into a LoadError, without their words for their own users."""
    try:
        yield
    except LoadError:
        raise
    except Exception as exc:
        why = exc.strerror if isinstance(exc, OSError) else str(exc) if isinstance(exc, EOFError) else None
        raise LoadError(f"{what}: not readable{f' ({why})' if why else ''}; expected {expected}") from exc


def check_fetched(file: Path) -> None:
    """Refuses a Git LFS pointer, which a clone has in place of a large file; raises LoadError."""
    with readable(str(file), "a file that this user may read"), file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise LoadError(
                f"{file}: a Git LFS pointer; expected the file itself: `git lfs pull` in its folder gets it"
            )


def fetch(place: Place, *, again: bool = False) -> Path:
    """The local file or folder that a place names; a hub id is downloaded into the hub's own cache.

    Args:
        place: a path, or ``org/repo[/sub/folder]`` on the Hugging Face hub, either with an optional ``#name``; or
            ``np:MODEL/SOURCE`` for a place on the hub. A place on the hub may end in ``@@REVISION``.
        again: it was fetched before, so the hub's cache has it, and the hub is not asked.

    Raises:
        LoadError: it is neither, this user may not read it, or the hub does not deliver it.
    """
    place = resolved(place)
    path = Path(place).expanduser()
    if there(path):
        return path
    plain, pin = unpinned(str(place))
    base, mark, name = plain.rpartition("#")
    if mark and "/" not in name and is_id(base) and not Path(base).exists():
        return download(f"{base}/{name}.safetensors{pin}", again=again)  # alone: a set may hold 100 GB
    if mark and base and not pin:
        folder = fetch(base, again=again)
        chosen = folder / f"{name}.safetensors"
        if "/" in name or not chosen.is_file():
            have = ", ".join(sorted(file.stem for file in folder.glob("*.safetensors"))) or "none"
            raise LoadError(f"{place}: no file {name}.safetensors in {folder}; known names: {have}")
        return chosen
    if isinstance(place, Path) or "*" in plain or not is_id(place):
        hint = f"; expected a hub id in front of {pin}" if pin else ""
        raise LoadError(f"{place}: no such file or folder, and not a hub id such as org/repo/sub/folder{hint}")
    return download(place, again=again)


def both(place: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    """Two files that stand side by side; None if one is missing.

    Args:
        place: their folder, or one of the two.
        names: theirs.
    """
    if not place.is_dir() and place.name not in names:
        return None
    first, second = ((place if place.is_dir() else place.parent) / name for name in names)
    return (first, second) if first.is_file() and second.is_file() else None


def numbered(place: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """The files of a folder, or the one file, with names of a pattern, by name, each with the number in its name."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return [(int(found[1]), file) for file in files if (found := pattern.fullmatch(file.name))]


def there(path: Path) -> bool:
    """Whether there is such a file or folder.

    Raises:
        LoadError: this user may not read it, so no format would accept it.
    """
    why = "Permission denied"
    try:
        if not path.exists():
            return False
        may = os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
    except OSError as exc:
        may, why = False, exc.strerror or str(exc)
    if not may:
        raise LoadError(f"{path}: cannot be read ({why}); expected a file or folder that this user may read")
    return True


def read_json(file: Path) -> Document:
    """A small JSON file that must hold an object.

    Raises:
        LoadError: it cannot be read, is not JSON, or is not an object.
    """
    check_fetched(file)
    with readable(str(file), "a JSON object"):
        document = json.loads(file.read_bytes())
    if not isinstance(document, dict):
        raise LoadError(f"{file}: holds a JSON {type(document).__name__}; expected a JSON object")
    return document


class _Plain(yaml.SafeLoader):
    """Without aliases, by which a kilobyte may stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


def read_yaml(file: Path) -> Document:
    """As ``read_json``, of a YAML file of at most 1 MB; its tags make nothing but plain values."""
    check_fetched(file)
    if (size := file.stat().st_size) > LARGEST_YAML:
        raise LoadError(f"{file}: {size} bytes of YAML; expected keys and values")
    with readable(str(file), "keys and values in YAML, without aliases"):
        document = yaml.load(file.read_bytes(), _Plain)  # it makes what safe_load does
    if not isinstance(document, dict):
        raise LoadError(f"{file}: holds a YAML {type(document).__name__}; expected keys and values")
    return document


def whole_number(file: Path, document: Document, key: str, *, at_least: int = 1) -> int:
    """``document[key]`` as an int; JSON's true and 3.0 are refused."""
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise wrong(file, key, repr(value), f"a whole number, at least {at_least}")
    return value


def one_of(file: Path, document: Mapping[str, Any], key: str, known: Iterable[str], default: str | None = None) -> Any:
    """``document[key]``, one of the known strings; default where it is absent."""
    value = document.get(key, default)
    if value not in list(known):  # a value may be unhashable
        raise wrong(file, key, repr(value), f"one of {', '.join(known)}")
    return value


def whole_numbers(file: Path, about: Mapping[str, str], key: str, expected: str) -> tuple[int, ...]:
    """``about[key]``, a JSON list of ints from 0 on; none where it is absent."""
    try:
        found = json.loads(about.get(key, "[]"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        raise wrong(file, key, f"{about[key]:.100}", expected)
    return tuple(found)


def positive(file: Path, document: Document, key: str) -> float:
    """``document[key]`` as a finite number above 0."""
    value = document.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise wrong(file, key, repr(value), "a number above 0")
    return float(value)


def flag(file: Path, document: Document, key: str, *, default: bool) -> bool:
    """``document[key]`` as true or false, default where it is absent."""
    value = document.get(key, default)
    if not isinstance(value, bool):
        raise wrong(file, key, repr(value), "true or false")
    return value


def text(file: Path, document: Document, key: str) -> str | None:
    """``document[key]`` as a string, or None if it is absent or null."""
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(file, key, repr(value), "a string")
    return value


def section(file: Path, document: Document, key: str) -> Document:
    """``document[key]``, which must be an object."""
    value = document.get(key)
    if not isinstance(value, dict):
        raise wrong(file, key, repr(value), "a JSON object")
    return value


def only(file: Path, document: Document, known: Mapping[str, object]) -> None:
    """Refuses a value other than the one that is known, where the key is there."""
    for key, value in known.items():
        if document.get(key, value) != value:
            raise wrong(file, key, repr(document[key]), f"{value!r}: nothing else is served")


def fingerprint(files: Iterable[Path], more: str = "") -> str:
    """A hex digest of the files' content, which does not depend on their names, places and ages.

    For one file it is the sha256 that `sha256sum` prints, for several the sha256 of their digests. The hub's cache
    names large files by the sha256 of their content, so they are not read.

    Args:
        files: in an order that does not change.
        more: what else decides their meaning; it counts as one more digest.

    Raises:
        LoadError: a file cannot be read.
    """
    digests = [_digest(file) for file in files] + [more] * bool(more)
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _digest(file: Path) -> str:
    content = file.resolve()
    if content.parent.name == "blobs" and _SHA256.fullmatch(content.name):
        return content.name
    try:
        return digest_of(content)
    except OSError as exc:
        raise LoadError(f"{file}: cannot be read ({exc.strerror or exc}); expected a file with weights") from exc


def bytes_on_disk(files: Iterable[Path]) -> int:
    """The sum of the files' sizes."""
    return sum(file.stat().st_size for file in files)


def state_of(stat: os.stat_result) -> State:
    """The state of a file that was looked at."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
