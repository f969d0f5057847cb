"""Rows of requests in shards on disk, each published whole or not at all. Knows no consumer and no queue.

A shard is a folder with two files:

    rows.safetensors  a tensor [rows, numbers] for each array of each read, in its own dtype
    rows.json         what the tensors are, and which rows belong to which request, positions and tokens

Both are written in a hidden folder, which gets its name when they are on the disk. Whoever opens the place of the
shards removes what processes that have died left behind; a lock of each process shows that it lives.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import numpy as np

from saesteer.consumers.consumer import SIZES, Array, Rows
from saesteer.errors import ConfigError
from saesteer.language.fields import Fields, Json

TENSORS, ABOUT = "rows.safetensors", "rows.json"
VERSION = 1
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}  # as safetensors has them
_LOCK, _WRITING = ".lock-", ".writing-"


class Shard:
    """Rows that will be one shard."""

    def __init__(self) -> None:
        self.nbytes = 0  # of memory
        self.rows = 0
        self._arrays: dict[str, list[Array]] = {}  # by the tensor's name
        self._ends: dict[str, int] = {}  # rows of each
        self._about: dict[str, Fields] = {}
        self._pieces: list[Json] = []

    def add(self, request: str, choice: int, rows: Rows) -> None:
        """Append the rows of a request."""
        names = {key: self._name(rows, key, array) for key, array in rows.arrays.items() if array.shape[1]}
        first = {name: self._ends.get(name, 0) for name in names.values()}
        for key, name in names.items():
            self._arrays.setdefault(name, []).append(rows.arrays[key])
            self._ends[name] = first[name] + rows.arrays[key].shape[0]
            self._about[name] = {"kind": rows.kind, **rows.about, "array": key}
        piece = {"request": request, "choice": choice, "rows": len(rows), "first": first}
        piece |= {"positions": rows.positions, "tokens": rows.tokens}  # lists would take four times the memory
        self._pieces.append(piece)
        self.nbytes += rows.nbytes
        self.rows += len(rows)

    def _name(self, rows: Rows, key: str, array: Array) -> str:
        """The tensor of an array: what answers say of the read, and the width where another one has the name."""
        name = ".".join([*rows.words, *([] if key == "data" else [key])])
        there = self._arrays.get(name)
        alike = there is None or (there[0].shape[1], there[0].dtype) == (array.shape[1], array.dtype)
        return name if alike else f"{name}.{array.shape[1]}"

    def write(self, folder: Path) -> None:
        """Write the two files, down to the disk."""
        tensors, at = {}, 0
        for name, arrays in sorted(self._arrays.items(), key=lambda one: -SIZES[one[1][0].dtype]):  # aligned so
            end = at + sum(len(one.data) for one in arrays)
            shape = [self._ends[name], arrays[0].shape[1]]
            tensors[name] = {"dtype": _DTYPES[arrays[0].dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        head = json.dumps(tensors, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        with (folder / TENSORS).open("wb") as stream:
            _put(stream, [len(head).to_bytes(8, "little"), head])
            _put(stream, (one.data for name in tensors for one in self._arrays[name]))
            _settle(stream)
        about = {"version": VERSION, "tensors": self._about, "pieces": self._pieces}
        with (folder / ABOUT).open("wb") as stream:
            _put(stream, [json.dumps(about, separators=(",", ":"), default=np.ndarray.tolist).encode()])
            _settle(stream)


class Place:
    """The folder of a server's shards; several processes may share it.

    Args:
        folder: made if it does not exist.

    Raises:
        ConfigError: it cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self._number = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / f"{_LOCK}{self._own}").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as exc:
            raise ConfigError(f"folder {folder}: cannot be written to ({exc.strerror})") from exc
        self._clean()

    def publish(self, shard: Shard, below: str) -> str:
        """Write a shard, and let it be seen once it is whole.

        Args:
            shard: the rows.
            below: a folder below the place, or FOLDER/FOLDER.

        Returns:
            The shard's path below the place.

        Raises:
            OSError: it could not be written; nothing of it stays.
        """
        self._number += 1
        name = f"{self._own}-{self._number:06d}"
        made, home = self.folder / f"{_WRITING}{name}", self.folder / below
        try:
            made.mkdir()
            shard.write(made)
            _settle_folder(made)
            for folder in (home.parent, home):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)  # another process may be as fast
                    _settle_folder(folder.parent)
            while os.path.lexists(home / name):  # whatever has taken it
                self._number += 1
                name = f"{self._own}-{self._number:06d}"
            made.rename(home / name)
            _settle_folder(home)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return f"{below}/{name}"

    def close(self) -> None:
        """Give the lock up; safe to call again."""
        if not self._lock.closed:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()

    def _clean(self) -> None:
        """Remove what processes that no longer live were writing."""
        for lock in self.folder.glob(f"{_LOCK}*"):
            own = lock.name.removeprefix(_LOCK)
            if own == self._own:
                continue
            with suppress(OSError), lock.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                for left in self.folder.glob(f"{_WRITING}{own}-*"):
                    shutil.rmtree(left, ignore_errors=True)
                lock.unlink(missing_ok=True)


def shards(folder: Path) -> Iterator[tuple[Path, Json]]:
    """The shards below a folder in the order of their names, each with the content of its rows.json."""
    for about in sorted(folder.rglob(ABOUT)):
        if not any(part.startswith(".") for part in about.relative_to(folder).parts):
            yield about.parent / TENSORS, json.loads(about.read_bytes())


def _put(stream: IO[bytes], parts: Iterable[bytes]) -> None:
    for part in parts:
        stream.write(part)


def _settle(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _settle_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
