"""What answers name by a handle and clients fetch later: files of tensors. Knows neither HTTP nor an engine.

All API servers of a server keep them in one folder (names/board.py), so each can answer for all. The folder is all that
they know of each other:

    <handle>          a result, as safetensors: ``activations`` [rows, width] and ``positions``; the rest is metadata.
                      Or one of the names of a file of several results (spools.py), where all rows of a position are one
    <handle>.<pid>    room for one that process <pid> has promised to a request: as long, but without space on the disk;
                      <handle>.<pid>.<n> for n of them in one file, which gets rows as they come, and names in the end
    lock              who promises holds it. It has the number and bytes of all, at most: rooms are given up without a
                      word, so what is there is counted only when less might not fit. If then it does not, nobody
                      counts again for ten times as long as that took, unless somebody deletes a result

A request gets its rooms when it is admitted, or is refused, so nothing that was promised is dropped for want of room.
A room that nobody holds is given up: whatever ends a request, an abort or an error, needs no word about it.
"""

import atexit
import fcntl
import logging
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
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.engine.private import open_in, private
from saesteer.language.fields import fail, show
from saesteer.plugin.names.board import meeting_place
from saesteer.plugin.results.failures import unwritten
from saesteer.plugin.results.spools import Layout, Spool, View, head, remove, view

logger = logging.getLogger("vllm.saesteer")

_HANDLE = re.compile("[0-9a-f]{32}")
_body: ContextVar["list[Room | Spool] | None"] = ContextVar("saesteer_body", default=None)
_AT = f"{KEY}.return.activations"


def one_body() -> None:
    """The requests of this context are the prompts of one HTTP body: if one is aborted or fails, nobody gets any.

    A context of its own ends with its HTTP request.
    """
    _body.set([])


def kept_here() -> "list[Room | Spool]":
    """Where a request notes what its answers have kept: all prompts of a body have one list, any other has its own."""
    found = _body.get()
    return [] if found is None else found


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

    def __init__(self, results: "Results") -> None:
        self._results = results
        [self._handle] = results.handles(1)
        self._path = results.folder / f"{self._handle}.{os.getpid()}"
        self._give_up = weakref.finalize(self, remove, [self._path])

    def take(self, folder: int, size: int) -> None:
        """Makes the file; it takes no space on the disk, but others count its size.

        Args:
            folder: a descriptor of the folder of results.
            size: bytes of the result.

        Raises:
            OSError: it cannot be made.
        """
        with open_in(folder, self._path.name, "xb") as file:
            file.truncate(size)

    def keep(self, entry: Mapping[str, Any], data: bytes) -> Handle:
        """Writes the result.

        Args:
            entry: what the answer says of it: dtype, shape, positions, and where it was read.
            data: its numbers.

        Raises:
            OSError: it could not be written, for instance as the disk is full; the room is given up.
        """
        try:
            with private(self._path.parent) as folder:
                name = self._path.name
                with open_in(folder, name, "r+b") as file:  # what was promised stays taken until all is written
                    file.writelines([head(entry, len(data)), np.array(entry["positions"], "<i8").data, data])
                    file.truncate()
                os.rename(name, self._handle, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            self._give_up()  # a result has another name
        return self._handle

    def remove(self) -> None:
        """Deletes the result, or gives the room up: nobody will learn of it."""
        remove([self._results.folder / self._handle])
        self._give_up()


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
        if self._above is None:  # this server has one process
            found = Path(tempfile.mkdtemp(prefix="saesteer-results-"))
            atexit.register(shutil.rmtree, found, ignore_errors=True)
        else:
            found = self._above / "results"
            found.mkdir(mode=0o700, exist_ok=True)
        threading.Thread(target=_sweep, args=[weakref.ref(self)], daemon=True).start()
        return found

    @cached_property
    def _above(self) -> Path | None:
        return self._given or meeting_place()

    @overload
    def promise(self, wanted: Sequence[int]) -> list[Room]: ...

    @overload
    def promise(self, wanted: Sequence[int | Layout]) -> list[Room | Spool]: ...

    def promise(self, wanted: Sequence[Any]) -> list[Any]:
        """Room for results of these many bytes, or for several that lie in one file.

        Raises:
            SpecError: there is too little room, now or ever, or the disk has none.
        """
        asked = sum(len(one.abouts) if isinstance(one, Layout) else 1 for one in wanted)
        size = sum(one.size if isinstance(one, Layout) else one for one in wanted)
        most = self.limits
        if asked > most.number or size > most.size:
            message = f"asks for {asked} results of {size} bytes together, expected at most {most.number}"
            fail(_AT, "too_large", f"{message} of {most.size}; the server keeps more when started with {_FLAGS}")
        try:
            with self._alone() as (folder, lock):
                heads = sum(one.start if isinstance(one, Layout) else _HEAD for one in wanted)
                self._count(lock, asked, size, heads)
                return [self._room(folder, one) for one in wanted]
        except OSError as error:
            raise unwritten(error) from error

    def _count(self, lock: int, asked: int, size: int, heads: int) -> None:
        """Refuses what does not fit; only then, and at first, it looks at what is there."""
        most, known = self.limits, os.pread(lock, _TAKEN.size, 0)
        number, taken, rest = _TAKEN.unpack(known) if len(known) == _TAKEN.size else (most.number, most.size, 0.0)
        looks = (number + asked > most.number or taken + size > most.size) and time.monotonic() >= rest
        if looks:
            begin = time.thread_time()
            found = self.sweep()
            number, taken, rest = len(found), sum(found), time.monotonic() + _REST * (time.thread_time() - begin)
        if number + asked > most.number or taken + size > most.size:
            if looks:
                os.pwrite(lock, _TAKEN.pack(number, taken, rest), 0)
            message = f"asks for {asked} results of {size} bytes together, while {number} of {most.number} with "
            message += f"{taken} of {most.size} bytes are kept; delete some, or wait: a result is kept for "
            fail(_AT, "results_full", f"{message}{most.seconds} seconds ({_FLAGS})")
        os.pwrite(lock, _TAKEN.pack(number + asked, taken + size + heads, 0.0), 0)

    def _room(self, folder: int, wanted: int | Layout) -> Room | Spool:
        if isinstance(wanted, Layout):
            spool = Spool(self.folder, self.handles(len(wanted.abouts)), wanted)
            spool.take(folder)
            return spool
        room = Room(self)
        room.take(folder, wanted)
        return room

    def handles(self, number: int) -> list[Handle]:
        """New ones."""
        drawn = secrets.token_hex(16 * number)
        made = [Handle(drawn[at : at + 32]) for at in range(0, len(drawn), 32)]
        for one in made:
            one._results = self
        return made

    def open(self, handle: str) -> BinaryIO | View:
        """The file of a result, as safetensors, which can be read to its end even if the result is deleted meanwhile.

        Raises:
            SpecError: there is no such result.
        """
        self._check(handle)
        try:
            with private(self.folder) as folder:
                file: Any = open_in(folder, handle, "rb")
        except (FileNotFoundError, PermissionError):
            self._refuse(handle)
        if self._expired(os.fstat(file.fileno())):
            file.close()
            self._refuse(handle)
        return view(file, handle)

    def delete(self, handle: str) -> None:
        """Deletes a result.

        Raises:
            SpecError: there is no such result.
        """
        self._check(handle)
        try:
            with self._alone() as (folder, lock):
                expired = self._expired(os.stat(handle, dir_fd=folder))
                os.unlink(handle, dir_fd=folder)
                os.pwrite(lock, bytes(8), _TAKEN.size - 8)  # whoever needs room may look at once
        except (FileNotFoundError, PermissionError):
            expired = True
        if expired:
            self._refuse(handle)

    def sweep(self) -> list[int]:
        """Removes what has expired, and the rooms of processes that have died; returns the bytes of all others.

        Raises:
            OSError: the folder is gone, is not this user's alone, or cannot be read.
        """
        found = []
        with private(self.folder) as folder, os.scandir(folder) as entries:
            for entry in entries:
                handle, process, several = f"{entry.name}..".split(".")[:3]
                if not _HANDLE.fullmatch(handle):
                    continue
                with suppress(FileNotFoundError):  # it was deleted, or is a result since
                    about = entry.stat()
                    if not _lives(int(process)) if process else self._expired(about):
                        os.unlink(entry.name, dir_fd=folder)
                    else:
                        number = int(several or 1)
                        found += [about.st_size // max(number, about.st_nlink)] * number  # a file of several has names
        return found

    def _check(self, handle: str) -> None:
        if not _HANDLE.fullmatch(handle):
            self._refuse(handle)

    def _expired(self, about: os.stat_result) -> bool:
        return about.st_mtime + self.limits.seconds < time.time()

    def _refuse(self, handle: str) -> Any:
        why = f"was deleted, has expired {self.limits.seconds} seconds after its answer, or is of another server"
        fail("handle", "unknown_name", f"got {show(handle)}, expected the handle of a result: this one {why}")

    @contextmanager
    def _alone(self) -> Iterator[tuple[int, int]]:
        """Keeps other processes and threads from promising meanwhile; a process that dies releases the lock.

        Gives descriptors of the folder and of the lock.

        Raises:
            OSError: the folder is not this user's alone, or cannot be made.
        """
        if self._above is not None:
            with private(self._above, make=True):  # what cleans up /tmp may have removed both
                pass
        with private(self.folder, make=True) as folder:
            lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder, lock
            finally:
                os.close(lock)


_TAKEN = Struct("<qqd")  # number and bytes, at most, and when of time.monotonic they may be counted again
_REST = 10  # times as long as a count in vain nobody counts again: refusals take a tenth of the event loop at most
_HEAD = 4096  # bytes of a result beside its numbers
_FLAGS = "--max-results, --max-results-mib, --result-seconds"


def _sweep(results: "weakref.ref[Results]") -> None:
    while (one := results()) is not None:
        pause = max(1.0, min(60.0, one.limits.seconds / 10))
        try:
            one.sweep()
        except PermissionError as error:
            logger.error("no result can be kept: %s; start the server again", error)
        except OSError:  # the folder is gone, or the process ends, or has too many files open now
            pass
        del one
        time.sleep(pause)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
