"""The Hugging Face hub: which of a repository's files are dictionaries, those files, or their headers alone.

Only this file imports huggingface_hub. It knows the names of files of each format, and nothing else of it.
"""

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from saesteer.errors import LoadError, reason

WEIGHT_SUFFIXES = (".safetensors", ".npz", ".npy", ".gguf", ".pt", ".pth")  # files that a place may name directly
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9*][\w.=*+-]*)+(@@\w[\w.-]*(/\w[\w.-]*)*)?")
# A dictionary of a set, with no folder of its own; W_dec_3.safetensors belongs to W_enc_3.safetensors.
_LAYER_FILE = re.compile(r"(layer_?\d+(\.sae)?|W_enc_\d+)\.(safetensors|pt)")
_ENCODER = re.compile(r"W_enc_(\d+\.safetensors)\Z")
PIN = "@@"  # before the revision, at the end of a place: a commit, a tag or a branch such as refs/pr/1
# Joined to a folder, it might lead out of it.
_UNSAFE = re.compile(r"/|[A-Za-z]:|.*[\\\0]|(.*/)?\.\.(/|\Z)", re.DOTALL)
LARGEST_HEADER = 100 << 20  # bytes, of a safetensors file
_SMALL = 1 << 20  # bytes of a file, or of a part of one, that is read whole
_BLOCK = 1 << 16  # bytes that one request asks for at least
_MEMBER = 1 << 14  # bytes at the beginning of an array in an archive: more than its header has


NAMES: list[str] = []  # of all files that a format consists of


class UnsafeName(LoadError):
    """The hub lists a file outside its repository."""


def is_id(place: str) -> bool:
    """Whether a place may be ``org/repo[/sub/folder][@@revision]``, with * in a folder's name or not."""
    return bool(_ID.fullmatch(place))


def unpinned(place: str) -> tuple[str, str]:
    """A place without its revision, and ``@@revision`` or an empty text."""
    plain, mark, revision = place.partition(PIN)
    return plain, mark + revision


def download(place: str, *, again: bool = False) -> Path:
    """The local copy of ``org/repo[/sub/folder]`` or of a file there, in the hub's own cache.

    Args:
        place: the place.
        again: it was downloaded before, and the hub is not asked.

    Raises:
        LoadError: the hub does not deliver it, or the place looks like a local one.
    """
    _refuse_local(place)
    repo, inside, given = _split(place)
    is_file = inside.endswith(WEIGHT_SUFFIXES)
    folder = inside.rpartition("/")[0] if is_file else inside
    prefix = f"{folder}/" if folder else ""
    # The hub is asked for nothing else, whatever a repository holds. A single file needs its JSON as well.
    names = [name for name in NAMES if name.endswith((".json", ".yaml")) or not is_file]
    patterns = [*dict.fromkeys(_together(inside) * is_file + [prefix + name for name in names] + _above(folder))]
    with _answering(place):
        from huggingface_hub import snapshot_download

        # The hub's * also matches "/": without this list, "layer_*.safetensors" would fetch whole sub-folders.
        crossing = [prefix + name.replace("*", "*/*") for name in names if "*" in name]
        given |= {"local_files_only": True} if again else {}
        root = Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=crossing, **given))
    found = root / inside
    if found.is_file() or (found.is_dir() and any(child.is_file() for child in found.iterdir())):
        return found
    raise LoadError(f"{place}: {repo} has nothing there that saesteer reads; expected one of {', '.join(patterns)}")


def dictionaries(place: str) -> list[str]:
    """The places of the dictionaries below a place, or that a pattern means; the place itself, if it is one.

    Raises:
        LoadError: the hub does not say what the repository holds, or the place looks like a local one.
    """
    _refuse_local(place)
    return [one for one, _ in _found(place, _listed(place))]


def cached(place: str) -> Path:
    """The folder of a place's repository in the hub's own cache, without a network.

    Raises:
        LoadError: it is not there.
    """
    with _answering(place):
        from huggingface_hub import snapshot_download

        repo, _, given = _split(place)
        return Path(snapshot_download(repo, local_files_only=True, **given))


class Headers:
    """Copies of dictionaries in which the headers of files are there, and zeros for values.

    Attributes:
        whole: whether all values are there, too: no file was too large.

    Args:
        folder: an empty folder, where the copies are made.
    """

    def __init__(self, folder: str) -> None:
        self.whole = True
        self._folder = folder
        self._listed: dict[str, list[str]] = {}  # by repository

    def get(self, place: str) -> Path:
        """The copy of one dictionary.

        Raises:
            LoadError: the hub does not deliver it.
        """
        repo, inside, _ = _split(place)
        root = Path(self._folder, f"models--{repo.replace('/', '--')}")  # formats look for the repository's name
        if repo not in self._listed:
            self._listed[repo] = _listed(place)
        files = next((files for one, files in _found(place, self._listed[repo]) if one == place), None)
        if files is None:
            raise LoadError(f"{place}: {repo} has no dictionary there; expected a file or folder of this repository")
        for name in files:
            if not (root / name).exists():
                self.whole &= _copy(place, repo, name, root / name)
        return root / inside

    def said(self, text: str) -> str:
        """A text about copies, as one about the hub's files."""
        return re.sub(rf"{re.escape(self._folder)}/models--(\S+?)--([^/\s]+)", r"\1/\2", text)


def _listed(place: str) -> list[str]:
    """The names of all files of a place's repository; LoadError if one leads out of it."""
    repo, _, given = _split(place)
    with _answering(place):
        from huggingface_hub import list_repo_files

        names = list(list_repo_files(repo, **given))
    for name in names:
        if _UNSAFE.match(name):
            raise UnsafeName(f"{place}: the hub lists {name!r}; expected names of files inside the repository")
    return names


def _found(place: str, listed: list[str]) -> list[tuple[str, list[str]]]:
    """The place of each dictionary below a place, and the files that it consists of."""
    repo, inside, _ = _split(place)
    weights = [name for name in NAMES if name.endswith(WEIGHT_SUFFIXES)]
    folders: dict[str, list[str]] = {}
    for name in listed:
        file = name.rpartition("/")[2]
        if inside == name or _LAYER_FILE.fullmatch(file):
            folders[name] = _together(name)
        for pattern in weights:
            depth = pattern.count("/") + 1
            if fnmatchcase("/".join(name.split("/")[-depth:]), pattern):
                folders.setdefault("/".join(name.split("/")[:-depth]), []).append(name)
    chosen = {one: files for one, files in folders.items() if _is_below(one, inside)}
    if inside in chosen:
        chosen = {inside: chosen[inside]}
    config = {name for name in NAMES if name.endswith((".json", ".yaml"))}
    beside: dict[str, list[str]] = {}
    for name in listed:
        if name.rpartition("/")[2] in config or name.endswith("_cfg.json"):
            beside.setdefault(name.rpartition("/")[0], []).append(name)
    found, there = [], set(listed)
    for one, files in chosen.items():
        folder = one if files[0] != one else one.rpartition("/")[0]
        above = [name for name in _above(folder) if name in there]
        found.append((f"{repo}/{one}".rstrip("/") + unpinned(place)[1], [*above, *beside.get(folder, ()), *files]))
    return found


def _above(folder: str) -> list[str]:
    """The settings of a run, which name its model: one folder above a dictionary's, or two."""
    parts = folder.split("/") if folder else []
    return ["/".join([*parts[:depth], "config.json"]) for depth in range(max(0, len(parts) - 2), len(parts))]


def _together(name: str) -> list[str]:
    """A file, and the one with its decoders if they have their own."""
    return [name, _ENCODER.sub(r"W_dec_\1", name)] if _ENCODER.search(name) else [name]


def _is_below(name: str, inside: str) -> bool:
    parts, wanted = name.split("/"), inside.split("/") if inside else []
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))


def _copy(place: str, repo: str, name: str, target: Path) -> bool:
    """A file's headers, or the file itself if it is small or the hub's cache has it; says whether it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    given = _split(place)[2]
    with _answering(place):
        from huggingface_hub import HfFileSystem, try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(repo, name, **given), str):
            target.symlink_to(cached)
            return True
        stream: Any
        remote = HfFileSystem().open(f"{repo}/{name}", "rb", block_size=_BLOCK, **given)
        with remote as stream, target.open("wb") as out:
            size = stream.size
            out.truncate(size)
            for start, end in [(0, size)] if size <= _SMALL else _needed(stream, name, size):
                stream.seek(start)
                out.seek(start)
                out.write(stream.read(min(end, size) - start))
            return bool(size <= _SMALL)


def _needed(stream: IO[bytes], name: str, size: int) -> list[tuple[int, int]]:
    """Where the headers of a large file are."""
    if name.endswith(".safetensors"):
        length = int.from_bytes(stream.read(8), "little")
        return [(0, 8 + length * (length <= LARGEST_HEADER))]  # whoever reads a longer one refuses it
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        spans = [(one.header_offset, _MEMBER + one.compress_size * _is_small(one)) for one in members]
        return [*((start, start + length) for start, length in spans), (archive.start_dir, size)]


def _is_small(member: zipfile.ZipInfo) -> bool:
    return member.compress_size <= _SMALL and not member.filename.endswith(".npy")


def _refuse_local(place: str) -> None:
    """Refuse a typo at once: the place's folder is on this machine. A folder may also have an organisation's name."""
    plain, pin = unpinned(place)
    if pin and Path(plain).exists():
        raise LoadError(f"{place}: {plain} is on this machine; expected it without {pin}, which is for the hub")
    place, folder = plain, Path(plain).parent
    if os.access(folder, os.R_OK) and folder.is_dir() and (place.count("/") > 1 or place.endswith(WEIGHT_SUFFIXES)):
        have = sorted(child.name for child in folder.iterdir())
        shown = ", ".join(have[:8]) or "nothing"
        raise LoadError(f"{place}: no such file; {folder} has {shown}{', ...' if len(have) > 8 else ''}")


def _split(place: str) -> tuple[str, str, dict[str, Any]]:
    """The repository, what is inside, and the revision as the hub's functions take it, if there is one."""
    plain, pin = unpinned(place)
    parts = plain.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]), {"revision": pin.removeprefix(PIN)} if pin else {}


@contextmanager
def _answering(place: str) -> Iterator[None]:
    """Turns every failure of the hub, the network and the hub's cache into a LoadError."""
    try:
        yield
    except Exception as exc:
        raise LoadError(f"{place}: no such file or folder, and the hub did not give it ({reason(exc)})") from exc
