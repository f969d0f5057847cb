"""What answers name by a handle and clients fetch later: files of tensors. Knows neither HTTP nor an engine.

All API servers of a server keep them in one folder (names/board.py), so each can answer for all. The folder is all that
they know of each other:

    <handle>          a result: one of the names of a file of several (spools.py)
    <handle>.<pid>.<n>
                      room for n of them that process <pid> has promised to a request: as long, but without space on
                      the disk; it gets rows as they come, and names in the end
    <handle>.gone     a result that was deleted, or has expired, while it was being fetched: it counts until then
    lock              who promises holds it. It has the bytes of each client, at most: rooms are given up without a
                      word, so what is there is counted only when less might not fit. If then it does not, nobody
                      counts again for ten times as long as that took, unless somebody deletes a result

A request gets its rooms when it is admitted, or is refused, so nothing that was promised is dropped for want of room.
A room that nobody holds is given up: whatever ends a request, an abort or an error, needs no word about it.

A client of HTTP may hold half of what others leave, so there is room for a next one. Its handles begin alike, with a
digest of its key or its address. Each result counts as LEAST bytes, or as many as it has.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.config.config import KEY
from saesteer.engine.private import open_in, private
from saesteer.language.fields import fail, show
from saesteer.plugin.names.board import lives, meeting_place
from saesteer.plugin.results import metrics
from saesteer.plugin.results.errors import unwritten
from saesteer.plugin.results.spools import Layout, Spool, View, view

logger = logging.getLogger("vllm.saesteer")

_HANDLE = re.compile("[0-9a-f]{32}")
# Of this context: who has sent its HTTP request, by key or address; empty where there is none.
client: ContextVar[str] = ContextVar("saesteer_client", default="")
_AT = f"{KEY}.return.activations"


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


class Results:
    """The results of a server, in one of its API server processes; safe to use in threads.

    Args:
        size: bytes of all together.
        seconds: that each is kept.
        folder: where they are; default: where the server's processes meet.
    """

    def __init__(self, size: int, seconds: int, folder: Path | None = None) -> None:
        self.size, self.seconds = size, seconds
        self.fetches = Counter[str]()  # that this process serves now, by client
        self._given = folder

    @cached_property
    def folder(self) -> Path:
        """Made when it is first needed, with a thread that removes what has expired."""
        found = (self._given or meeting_place()) / "results"
        found.mkdir(mode=0o700, exist_ok=True)
        threading.Thread(target=_sweep, args=[weakref.ref(self)], daemon=True).start()
        return found

    def promise(self, wanted: Sequence[Layout]) -> list[Spool]:
        """A file for the results of each layout, with room for all of them.

        Raises:
            SpecError: there is too little room, now or ever, or the disk has none.
        """
        sizes = [_counted(one.size + one.start, len(one.abouts)) for one in wanted]
        asked, size = sum(map(len, sizes)), sum(map(sum, sizes))
        most = self._share(0)
        if size > most:
            message = f"asks for {asked} results that count as {size} bytes, expected at most {most}, the share of one"
            fail(_AT, "too_large", f"{message} client; the server keeps more when started with {_FLAGS}")
        try:
            with self._alone() as (folder, lock):
                self._count(lock, asked, size)
                return [Spool(self.folder, self.handles(len(one.abouts)), one).taken(folder) for one in wanted]
        except OSError as error:
            raise unwritten(error) from error

    def _share(self, others: int) -> int:
        """Bytes that the client of this context may hold while others hold so many."""
        return (self.size - others) // (2 if client.get() else 1)

    def _count(self, lock: int, asked: int, size: int) -> None:
        """Refuses what does not fit; only then, and at first, it looks at what is there."""
        own, (taken, rest) = self._begin(), _noted(lock, self.size)

        def is_full() -> bool:
            return taken[own] + size > self._share(taken.total() - taken[own])

        if is_full() and time.monotonic() >= rest:
            begin, taken = time.thread_time(), Counter()
            for one, number in self.sweep():
                taken[one] += number
            rest = time.monotonic() + _REST * (time.thread_time() - begin)
        full = is_full()
        if not full:
            taken[own], rest = taken[own] + size, 0.0
        _note(lock, taken, rest)
        if full:
            kept, share = taken[own], self._share(taken.total() - taken[own])
            message = f"asks for {asked} results that count as {size} bytes, while {kept} of {share} are kept that "
            message += "one client may hold beside others; delete some, or wait: a result is kept for "
            fail(_AT, "results_full", f"{message}{self.seconds} seconds ({_FLAGS})")

    def _begin(self) -> str:
        """How the handles of this context's client begin; who knows one learns nothing of a key."""
        return sha256(f"{self.folder} {client.get()}".encode()).hexdigest()[:_BEGIN]

    def handles(self, number: int) -> list[Handle]:
        """New ones."""
        begin = self._begin()
        made = [Handle(begin + secrets.token_hex(16 - _BEGIN // 2)) for _ in range(number)]
        for one in made:
            one._results = self
        return made

    def open(self, handle: str) -> View:
        """The file of a result, as safetensors, which can be read to its end even if the result is deleted meanwhile.

        Raises:
            SpecError: there is no such result.
        """
        try:
            if not _HANDLE.fullmatch(handle):
                raise FileNotFoundError
            with private(self.folder) as folder:
                file: Any = open_in(folder, handle, "rb")
        except (FileNotFoundError, PermissionError):
            self._refuse(handle)
        fcntl.flock(file, fcntl.LOCK_SH)  # until it is closed
        about = os.fstat(file.fileno())
        if not about.st_nlink or self._expired(about):
            file.close()
            self._refuse(handle)
        return view(file, handle)

    def delete(self, handle: str) -> None:
        """Deletes a result.

        Raises:
            SpecError: there is no such result.
        """
        self.open(handle).close()
        with suppress(FileNotFoundError), self._alone() as (folder, lock):
            _drop(folder, handle)
            _note(lock, _noted(lock, self.size)[0], 0.0)  # whoever needs room may look at once

    def sweep(self) -> list[tuple[str, int]]:
        """Removes what has expired, and the rooms of processes that have died.

        Returns:
            Of each other result, how its client's handles begin, and the bytes that it counts as.

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
                    ends = process == _GONE or (not lives(int(process)) if process else self._expired(about))
                    if not ends or not _drop(folder, entry.name):
                        number = int(several or 1)  # a file of several has names
                        sizes = _counted(about.st_size // max(number, about.st_nlink) * number, number)
                        found += [(handle[:_BEGIN], one) for one in sizes]
        metrics.results(len(found), sum(one for _, one in found))
        return found

    def _expired(self, about: os.stat_result) -> bool:
        return about.st_mtime + self.seconds < time.time()

    def _refuse(self, handle: str) -> Any:
        why = f"was deleted, has expired {self.seconds} seconds after its answer, or is of another server"
        fail("handle", "unknown_name", f"got {show(handle)}, expected the handle of a result: this one {why}")

    @contextmanager
    def _alone(self) -> Iterator[tuple[int, int]]:
        """Keeps other processes and threads from promising meanwhile; a process that dies releases the lock.

        Gives descriptors of the folder and of the lock.

        Raises:
            OSError: the folder is not this user's alone, or cannot be made.
        """
        # What cleans up /tmp may have removed both.
        with private(self.folder.parent, make=True), private(self.folder, make=True) as folder:
            lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder, lock
            finally:
                os.close(lock)


_BEGIN = 8  # letters of a handle that all of a client's begin with
_GONE = "gone"
_REST = 10  # times as long as a count in vain nobody counts again: refusals take a tenth of the event loop at most
LEAST = 64 << 10
_FLAGS = "--max-results-mib, --result-seconds"


def _counted(size: int, number: int = 1) -> list[int]:
    """What each of so many results counts as that have these many bytes together."""
    return [max(LEAST, -(-size // number))] * number


def _noted(lock: int, most: int) -> tuple[Counter[str], float]:
    """Bytes of each client, at most, and when of time.monotonic they may be counted again; ``most``: of all."""
    try:
        taken, rest = json.loads(os.pread(lock, 1 << 24, 0))
    except ValueError:  # nobody has counted yet
        return Counter({"": most}), 0.0
    return Counter(taken), rest


def _note(lock: int, taken: Mapping[str, int], rest: float) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps([taken, rest]).encode(), 0)


def _drop(folder: int, name: str) -> bool:
    """Delete a result, or let it be deleted once nobody fetches it; False: somebody does."""
    with open_in(folder, name, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.rename(name, f"{name.partition('.')[0]}.{_GONE}", src_dir_fd=folder, dst_dir_fd=folder)
            return False
        os.unlink(name, dir_fd=folder)
        return True


def _sweep(results: "weakref.ref[Results]") -> None:
    while (one := results()) is not None:
        pause = max(1.0, min(60.0, one.seconds / 10))
        try:
            one.sweep()
        except PermissionError as error:
            logger.error("no result can be kept: %s; start the server again", error)
        except OSError:  # the folder is gone, or the process ends, or has too many files open now
            pass
        del one
        time.sleep(pause)
