"""The process that writes rows into files, so that its interpreter is not the steps'. Imports no torch and no numpy.

A worker (spool.py) shares memory with it, and tells it over a connection

    ("put", copies, lo, hi, steps, new, gone)  bytes [lo, hi) of the memory have the rows of these steps, once as many
                                               copies have landed; files that come up, and those that nobody has now
    ("ask", number, files)                     what have these got? All of it is to be written soon
    ("hurry",)                                 the memory is full

and hears

    ("told", number, positions)                of each file's new rows, all of which are written
    ("free", lo, hi)                           all rows of these bytes are
    ("failed", path, why)                      rows could not be written there

A file that lacks rows is marked by its mode, which needs no room on a disk that is full. If this process dies, the
worker marks the files of each request that ends, and says beside them that it has.
"""

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from mmap import mmap
from multiprocessing.connection import Connection
from queue import SimpleQueue
from stat import S_IMODE
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from saesteer.engine.private import open_in, private

LACKING = 0o400  # mode of a file that lacks rows
ENDED = "ended"  # a file beside them: there will be no more rows
THREADS = 4  # one copies 11 MB into the system's memory in 5 ms, which is a step of a 4B
PAUSE = 0.25  # seconds that rows wait for those of later steps, so that one call writes several
HELD = 8  # bytes at the memory's beginning: how many copies have landed
_LOOK = 0.0005  # seconds between two looks at them
_PIECES = 512  # that are written by one call; a system takes 1,024

Span = tuple[int, int]  # absolute positions [lo, hi)


# Of rows of a step that lie side by side, file by file: the first byte, and bytes of a row; then by file its number,
# which row of it is the first of these, their first position, and how many they are.
Step = tuple[int, int, list[int], list[int], list[int], list[int]]


def join(spans: list[Span], span: Span) -> None:
    """Append positions; those behind the last ones become one span with these."""
    if spans and spans[-1][1] == span[0]:
        spans[-1] = spans[-1][0], span[1]
    else:
        spans.append(span)


class _Part:
    """Of the memory, until all of its rows are written."""

    def __init__(self, lo: int, hi: int) -> None:
        self.lo, self.hi, self.left = lo, hi, 0


class _Piece(NamedTuple):
    part: _Part
    lo: int
    hi: int


class _Run:
    """Bytes that belong side by side into a file."""

    def __init__(self, at: int) -> None:
        self.at = self.end = at
        self.pieces: list[_Piece] = []


class _File:
    """Rows that wait for their file."""

    def __init__(self, path: str, start: int) -> None:
        self.path, self.start = path, start
        self.runs: list[_Run] = []
        self.dealt = self.written = 0  # how many pieces came here, and how many of them wait no longer
        self.asks: deque[tuple[int, _Ask]] = deque()  # who waits until so many are written
        self.spans: list[Span] = []  # positions of rows that are here, and of which nobody has been told
        self.busy = False  # a thread writes some now
        self._failed = False  # some could not be written

    def add(self, at: int, piece: _Piece, span: Span) -> None:
        """Take rows that belong to this byte of the file."""
        if not self.runs or self.runs[-1].end != at:
            self.runs.append(_Run(at))
        run = self.runs[-1]
        run.pieces.append(piece)
        run.end += piece.hi - piece.lo
        self.dealt += 1
        join(self.spans, span)

    def write(self, memory: memoryview, runs: Iterable[_Run]) -> None:
        """Write them, neighbours by one call. A file that is not there any more has nobody who wants it.

        Raises:
            OSError: they could not be written; the file is marked.
        """
        if self._failed:
            return
        folder, name = os.path.split(self.path)
        try:
            with private(folder) as inside:
                file = os.open(name, os.O_WRONLY, dir_fd=inside)
            try:
                for run in runs:
                    at = run.at
                    for first in range(0, len(run.pieces), _PIECES):
                        some = run.pieces[first : first + _PIECES]
                        put(file, at, [memory[one.lo : one.hi] for one in some])
                        at += sum(one.hi - one.lo for one in some)
            finally:
                os.close(file)
        except FileNotFoundError:
            return
        except OSError:
            self._failed = True
            mark(self.path)
            raise


def mark(path: str, *, ended: bool = False) -> None:
    """As a file that lacks rows. On some file systems a mode does not last, and the file is deleted.

    Args:
        path: of the file.
        ended: whether nobody writes files any more.
    """
    folder, name = os.path.split(path)
    try:
        with private(folder) as inside:
            if ended:
                open_in(inside, ENDED, "w").close()
            os.chmod(name, LACKING, dir_fd=inside)
            if S_IMODE(os.stat(name, dir_fd=inside).st_mode) == LACKING:
                return
    except OSError:
        pass
    with suppress(OSError):  # the front end cannot write it, either
        os.unlink(path)


def put(file: int, at: int, pieces: Sequence[Any]) -> None:
    """Write all of these bytes behind one another.

    Raises:
        OSError: they could not be written.
    """
    size = sum(map(len, pieces))
    done = os.pwritev(file, pieces, at)
    if done < size:  # the disk is nearly full, or it was more than a call takes
        rest = memoryview(b"".join(pieces))[done:]
        while rest:
            rest = rest[os.pwrite(file, rest, at + size - len(rest)) :]


class _Ask:
    """A question of the worker's, about some files."""

    def __init__(self, number: int, told: Sequence[Sequence[Span]]) -> None:
        self.number, self.told = number, told
        self.left = 0  # files that lack rows


class Filer:
    """Takes what a worker says, and writes the rows of each file in their order.

    Rows wait a while for those of later steps, so one call writes several.

    Args:
        connection: to the worker.
        memory: which both have.
        begin: starts a thread with this to do.
    """

    def __init__(self, connection: Connection, memory: memoryview, begin: Callable[[Callable[[], None]], None]) -> None:
        self._connection, self._memory = connection, memory
        self._landed = memory[:HELD].cast("q")
        self._heard: deque[tuple[Any, ...]] = deque()  # what waits for a copy, or behind what does
        self._files: dict[int, _File] = {}
        # A request that was preempted comes again with its file under another number; rows still keep their order.
        self._paths: WeakValueDictionary[str, _File] = WeakValueDictionary()
        self._waiting: dict[_File, None] = {}  # files with rows, the longest waiting first
        # Of them, those to write as soon as no thread writes some of their rows: first those that are asked about.
        self._wanted: dict[_File, None] = {}
        self._ready: dict[_File, None] = {}
        self._busy = 0  # files that threads write now
        self._fresh = 0  # bytes that came since all files were handed over
        self._due = 0.0  # when they are handed over next, of time.monotonic
        self._ended = False
        self._said: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # what the worker is yet to hear; None: no more
        self._lock = Lock()
        self._work, self._rest = Condition(self._lock), Condition(self._lock)  # there is some, and there is none
        for work in (self._tell, *[self._serve] * THREADS):
            begin(work)

    def run(self) -> None:
        """Until the worker has ended; rows that have landed are written."""
        while True:
            while self._heard and self._take(self._heard[0]):
                self._heard.popleft()
            with self._lock:
                if self._waiting and monotonic() >= self._due:
                    self._hand_over()
                pause = max(0.0, self._due - monotonic()) if self._waiting else None
            try:
                if self._connection.poll(_LOOK if self._heard else pause):
                    self._heard.append(self._connection.recv())
            except (EOFError, OSError):
                break
        with self._lock:
            self._hand_over()
            self._ended = True
            self._rest.wait_for(lambda: not (self._wanted or self._ready or self._busy))
        self._said.put(None)

    def _take(self, message: tuple[Any, ...]) -> bool:
        """Do what the worker says; False if it must wait."""
        kind, *given = message
        if kind == "put":
            copies, *rows = given
            if self._landed[0] < copies:
                return False
            with self._lock:
                self._put(*rows)
        elif kind == "ask":
            with self._lock:
                self._ask(*given)
        else:
            with self._lock:
                self._hand_over()
        return True

    def _put(self, lo: int, hi: int, steps: Sequence[Step], new: dict[int, tuple[str, int]], gone: list[int]) -> None:
        for number, (path, start) in new.items():
            self._files[number] = self._paths.setdefault(path, _File(path, start))
        if not self._waiting:
            self._due = monotonic() + PAUSE
        part = _Part(lo, hi)
        for at, stride, *rows in steps:
            for number, first, position, length in zip(*rows, strict=True):
                file, end = self._files[number], at + stride * length
                file.add(file.start + stride * first, _Piece(part, at, end), (position, position + length))
                self._waiting[file] = None
                part.left += end - at
                at = end
        for number in gone:
            self._files.pop(number, None)
        self._fresh += part.left
        if self._fresh >= len(self._memory) // 2:
            self._hand_over()

    def _ask(self, number: int, numbers: Sequence[int]) -> None:
        files = [self._files.get(one) for one in numbers]  # None has never got anything
        asked = _Ask(number, [[] if one is None else one.spans for one in files])
        for file in filter(None, files):
            file.spans = []
            if file.written < file.dealt:
                file.asks.append((file.dealt, asked))
                asked.left += 1
            if file.runs:
                self._wanted[file] = None
                self._work.notify()
        self._answer(asked)

    def _answer(self, asked: _Ask) -> None:
        if not asked.left:
            self._said.put(("told", asked.number, asked.told))

    def _hand_over(self) -> None:
        self._ready |= self._waiting
        self._fresh, self._due = 0, monotonic() + PAUSE
        self._work.notify_all()

    def _next(self) -> _File | None:
        return next((file for file in chain(self._wanted, self._ready) if not file.busy), None)

    def _serve(self) -> None:
        """What each thread does."""
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._ended or self._next() is not None)
                file = self._next()
                if file is None:
                    return
                for files in (self._wanted, self._ready, self._waiting):
                    files.pop(file, None)
                runs, file.runs = file.runs, []
                file.busy = True
                self._busy += 1
            try:
                file.write(self._memory, runs)
            except OSError as exc:
                self._said.put(("failed", file.path, str(exc)))
            with self._lock:
                for lo, hi in _give_back(runs):
                    self._said.put(("free", lo, hi))
                file.busy = False
                file.written += sum(len(run.pieces) for run in runs)
                self._busy -= 1
                while file.asks and file.asks[0][0] <= file.written:
                    _, asked = file.asks.popleft()
                    asked.left -= 1
                    self._answer(asked)
                if file in self._wanted or file in self._ready:
                    self._work.notify()
                self._rest.notify_all()
            del file, runs

    def _tell(self) -> None:
        """In a thread of its own: a worker that is sending hears nothing until this process has listened."""
        with suppress(OSError):  # the worker may have ended
            while (message := self._said.get()) is not None:
                self._connection.send(message)


def _give_back(runs: Iterable[_Run]) -> list[Span]:
    """Parts of the memory that these were the last rows of."""
    found = []
    for run in runs:
        for part, lo, hi in run.pieces:
            part.left -= hi - lo
            if not part.left:
                found.append((part.lo, part.hi))
    return found


def _begin(work: Callable[[], None]) -> None:
    """A thread of a process that ends with it: else the worker would wait for what nobody does."""

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)

    Thread(target=run, daemon=True).start()


def main(connection: int, memory: int) -> None:
    """What the process does.

    Args:
        connection: to the worker, a socket.
        memory: a file of the memory that both have.
    """
    # The worker ends for these, perhaps once its requests have; then this ends.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    Filer(Connection(connection), memoryview(mmap(memory, 0)), _begin).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
