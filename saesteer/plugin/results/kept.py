"""What answers name by a handle and clients fetch later: files of tensors. Knows neither HTTP nor an engine.

All API servers of a server keep them in one folder (names/board.py), so each can answer for all. The folder is all that
they know of each other:

    <handle>          a result, as safetensors: ``activations`` [rows, width] and ``positions``; the rest is metadata
    <handle>.<pid>    room for one that process <pid> has promised to a request: as long, but empty on the disk

A request gets its rooms when it is admitted, or is refused, so nothing that was promised is dropped for want of room.
A room that nobody holds is given up: whatever ends a request, an abort or an error, needs no word about it.
"""

import atexit
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.language.fields import fail, show
from saesteer.plugin.names.board import meeting_place
from saesteer.plugin.results.failures import unwritten

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors calls them
_HANDLE = re.compile("[0-9a-f]{32}")
_AT = f"{KEY}.return.activations"


class Limits(NamedTuple):
    """What the results of a server may take."""

    number: int
    size: int  # bytes of all together
    seconds: int  # that each is kept

    @classmethod
    def of(cls, config: SaesteerConfig) -> "Limits":
        """Those that the operator has set."""
        return cls(config.max_results, config.max_results_mib << 20, config.result_seconds)


class Handle(str):
    """What a result is fetched by. In the process that keeps the result, the handle itself fetches it."""

    _results: "Results"

    def numbers(self) -> NDArray[np.float32]:
        """The result's numbers, float32 [rows, width]; those of a smaller dtype are widened, which is exact.

        Raises:
            SpecError: it was deleted, or has expired.
        """
        from safetensors.torch import load

        with self._results.open(self) as file:
            found: NDArray[np.float32] = load(file.read())["activations"].float().numpy()
        return found

    def delete(self) -> None:
        """Deletes the result.

        Raises:
            SpecError: it was deleted, or has expired.
        """
        self._results.delete(self)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # another process has the text


class Room:
    """Room for one result; given up when nobody holds it."""

    def __init__(self, results: "Results", handle: str) -> None:
        self._results = results
        self._handle = Handle(handle)
        self._handle._results = results
        self._path = results.folder / f"{handle}.{os.getpid()}"
        self._give_up = weakref.finalize(self, _remove, self._path)

    def take(self, size: int) -> None:
        """Makes the file; it takes no space on the disk, but others count its size.

        Raises:
            OSError: it cannot be made.
        """
        self._path.touch(0o600)
        os.truncate(self._path, size)

    def keep(self, entry: Mapping[str, Any], data: bytes) -> Handle:
        """Writes the result.

        Args:
            entry: what the answer says of it: dtype, shape, positions, and where it was read.
            data: its numbers.

        Raises:
            OSError: it could not be written, for instance as the disk is full; the room is given up.
        """
        try:
            with self._path.open("r+b") as file:  # what was promised stays taken until all is written
                file.writelines([_head(entry, len(data)), np.array(entry["positions"], "<i8").data, data])
                file.truncate()
            self._path.rename(self._results.folder / self._handle)
        finally:
            self._give_up()  # a result has another name
        return self._handle


class Results:
    """The results of a server, in one of its API server processes; safe to use in threads.

    Args:
        limits: of all together.
        folder: where they are; default: where the server's processes meet.
    """

    def __init__(self, limits: Limits, folder: Path | None = None) -> None:
        self.limits = limits
        self._given = folder

    @cached_property
    def folder(self) -> Path:
        """Made when it is first needed, with a thread that removes what has expired."""
        place = self._given or meeting_place()
        if place is None:  # this server has one process
            found = Path(tempfile.mkdtemp(prefix="saesteer-results-"))
            atexit.register(shutil.rmtree, found, ignore_errors=True)
        else:
            found = place / "results"
            found.mkdir(mode=0o700, exist_ok=True)
        threading.Thread(target=_sweep, args=[weakref.ref(self)], daemon=True).start()
        return found

    def promise(self, sizes: Sequence[int]) -> list[Room]:
        """Room for results of these many bytes.

        Raises:
            SpecError: there is too little room, now or ever, or the disk has none.
        """
        number, size, wanted = self.limits.number, self.limits.size, sum(sizes)
        if len(sizes) > number or wanted > size:
            message = f"asks for {len(sizes)} results of {wanted} bytes together, expected at most {number} of {size}"
            fail(_AT, "too_large", f"{message}; the server keeps more when started with {_FLAGS}")
        try:
            with self._alone():
                return self._rooms(sizes)
        except OSError as error:
            raise unwritten(error) from error

    def _rooms(self, sizes: Sequence[int]) -> list[Room]:
        number, size, taken = self.limits.number, self.limits.size, self.sweep()
        if len(taken) + len(sizes) > number or sum(taken) + sum(sizes) > size:
            message = f"asks for {len(sizes)} results of {sum(sizes)} bytes together, while {len(taken)} of {number} "
            message += f"with {sum(taken)} of {size} bytes are kept; delete some, or wait: a result is kept for "
            fail(_AT, "results_full", f"{message}{self.limits.seconds} seconds ({_FLAGS})")
        rooms = []
        for one in sizes:
            room = Room(self, secrets.token_hex(16))
            room.take(one)
            rooms.append(room)
        return rooms

    def open(self, handle: str) -> BinaryIO:
        """The file of a result, which can be read to its end even if the result is deleted meanwhile.

        Raises:
            SpecError: there is no such result.
        """
        try:
            file = self._path(handle).open("rb")
        except FileNotFoundError:
            self._refuse(handle)
        if self._expired(os.fstat(file.fileno())):
            file.close()
            self._refuse(handle)
        return file

    def delete(self, handle: str) -> None:
        """Deletes a result.

        Raises:
            SpecError: there is no such result.
        """
        path = self._path(handle)
        try:
            expired = self._expired(path.stat())
            path.unlink()
        except FileNotFoundError:
            expired = True
        if expired:
            self._refuse(handle)

    def sweep(self) -> list[int]:
        """Removes what has expired, and the rooms of processes that have died; returns the bytes of all others."""
        found = []
        for entry in os.scandir(self.folder):
            handle, _, process = entry.name.partition(".")
            if not _HANDLE.fullmatch(handle):
                continue
            with suppress(FileNotFoundError):  # it was deleted, or is a result since
                about = entry.stat()
                if not _lives(int(process)) if process else self._expired(about):
                    os.unlink(entry)
                else:
                    found.append(about.st_size)
        return found

    def _path(self, handle: str) -> Path:
        if not _HANDLE.fullmatch(handle):
            self._refuse(handle)
        return self.folder / handle

    def _expired(self, about: os.stat_result) -> bool:
        return about.st_mtime + self.limits.seconds < time.time()

    def _refuse(self, handle: str) -> Any:
        why = f"was deleted, has expired {self.limits.seconds} seconds after its answer, or is of another server"
        fail("handle", "unknown_name", f"got {show(handle)}, expected the handle of a result: this one {why}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes and threads from promising meanwhile; a process that dies releases the lock."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what cleans up /tmp may have removed it
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


_FLAGS = "--max-results, --max-results-mib, --result-seconds"


def _head(entry: Mapping[str, Any], size: int) -> bytes:
    """What a safetensors file begins with, in front of the positions and ``size`` bytes of activations."""
    positions = np.array(entry["positions"]).shape
    border = 8 * math.prod(positions)
    others = {name: value for name, value in entry.items() if name not in ("dtype", "shape", "positions")}
    head = {
        "__metadata__": {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in others.items()
        },
        "positions": {"dtype": "I64", "shape": positions, "data_offsets": [0, border]},
        "activations": {
            "dtype": _DTYPES[entry["dtype"]],
            "shape": entry["shape"],
            "data_offsets": [border, border + size],
        },
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # the form wants numbers that are aligned
    return len(text).to_bytes(8, "little") + text


def _sweep(results: "weakref.ref[Results]") -> None:
    while (one := results()) is not None:
        pause = max(1.0, min(60.0, one.limits.seconds / 10))
        with suppress(FileNotFoundError):  # the process ends
            one.sweep()
        del one
        time.sleep(pause)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
