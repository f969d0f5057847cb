"""Rows on their way from a worker's memory into files that the front end has made. Knows bytes and no tensor's meaning.

A worker on the front end's machine has rows written where an answer's handle will find them, by a process beside it
(filer.py). Only positions travel on. A row's place follows from its position: what is computed again, behind a
preemption or a wrong guess, replaces what is there. When a request ends, the scheduler asks for what its files still
lack, and sends the positions of their rows once all is written.
"""

import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from select import POLLIN, poll
from socket import SHUT_WR, socket, socketpair
from threading import RLock
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.filer import Span, Step, mark
from saesteer.engine.shared import Shared
from saesteer.engine.sinks import Sink

logger = logging.getLogger("vllm.saesteer")

MOST = 256 << 20  # bytes that wait to be written; behind them, a step waits
_LAST_S = 10.0  # that rows may take to be written when the worker ends
_LOOK_S = 0.005  # between two looks at what another thread may have heard


class Filing(NamedTuple):
    """Where the rows of a step go, which lie file by file; a row has all sites of a position."""

    sinks: Sequence[Sink]
    first: NDArray[np.int64]  # by sink, which row of its file the first of them is
    positions: NDArray[np.int64]  # by sink, of its first one
    lengths: NDArray[np.int64]  # by sink, how many positions follow one another

    def cut(self, most: int) -> Iterator[tuple[int, int, "Filing"]]:
        """In pieces of at most so many rows: the first row of each, the one behind its last, and where these go."""
        end = self.lengths.cumsum()
        begin, total = end - self.lengths, int(end[-1])
        for lo in range(0, total, most):
            hi = min(lo + most, total)
            low, high = np.maximum(begin, lo), np.minimum(end, hi)
            here, ahead = np.flatnonzero(low < high), low - begin
            numbers = (self.first + ahead, self.positions + ahead, high - low)
            yield lo, hi, Filing([self.sinks[one] for one in here.tolist()], *(one[here] for one in numbers))


class Ended(RuntimeError):
    """What writes the rows that requests read has ended."""


class Asked:
    """A wish that all rows be written which some files have got so far."""

    def __init__(self, sinks: Collection[Sink]) -> None:
        self.sinks = sinks
        self.told: list[list[Span]] | None = None  # by file, the positions of its new rows; None: not written yet


class Writer:
    """The process that writes rows, as the worker has it: begun when it is first needed, ended with this object.

    It may be asked by several threads.

    Args:
        nbytes: of memory in which rows come home.
        locked: see ``Shared``.
    """

    def __init__(self, nbytes: int = MOST, *, locked: bool = False) -> None:
        self._nbytes, self._locked = nbytes, locked
        self._shared: Shared | None = None
        self._lock = RLock()  # of all below
        self._numbers = count()
        self._asked: dict[int, Asked] = {}
        self._known: set[int] = set()  # numbers of files that it has been told of
        self._gone: deque[int] = deque()  # of those, that nobody here has any more; any thread may add to it
        self._broken: BaseException | None = None

    @property
    def shared(self) -> Shared:
        """The memory that it writes from.

        Raises:
            OSError, RuntimeError: it cannot be begun.
        """
        with self._lock:
            if self._shared is None:
                shared = Shared(self._nbytes, locked=self._locked)
                mine, other = socketpair()
                process = begin(other.detach(), shared.file)
                self._connection = Connection(mine.detach())
                self._poll = poll()  # each call of a connection's own makes a selector; under the lock alone
                self._poll.register(self._connection.fileno(), POLLIN)
                finalize(self, _end, self._connection, process)
                self._shared = shared
            return self._shared

    def take(self, nbytes: int) -> int:
        """The first byte of a part of the memory; it waits until there is one.

        Args:
            nbytes: of the part, not more than the memory has.

        Raises:
            Ended: the process has ended.
        """
        shared, hurried = self.shared, False
        while True:
            self._hear()
            with self._lock:
                found = shared.take(nbytes)
            if found is not None:
                return found
            if not hurried:
                self._send("hurry")
                hurried = True
            self._connection.poll(_LOOK_S)

    def put(self, copies: int, lo: int, hi: int, steps: Sequence[tuple[Filing, int, int]]) -> None:
        """Have rows written.

        Args:
            copies: that have landed, by ``Shared.landed``, once the rows are there.
            lo: first byte of the part of the memory that has them.
            hi: the one behind it.
            steps: where the rows of each go, their first byte in the memory, and the one behind them.

        Raises:
            Ended: the process has ended.
        """
        sent: list[Step] = []
        new: dict[int, tuple[str, int]] = {}
        with self._lock:
            for filing, first, end in steps:
                files = [sink.number for sink in filing.sinks]
                if not self._known.issuperset(files):
                    new |= {sink.number: (sink.path, sink.start) for sink in filing.sinks if self._is_new(sink)}
                rows = (filing.first.tolist(), filing.positions.tolist(), filing.lengths.tolist())
                sent.append((first, (end - first) // sum(rows[-1]), files, *rows))
            self._send("put", copies, lo, hi, sent, new, self._left())

    def _is_new(self, sink: Sink) -> bool:
        if sink.number in self._known:
            return False
        self._known.add(sink.number)
        finalize(sink, self._gone.append, sink.number).atexit = False
        return True

    def _left(self) -> list[int]:
        found = [self._gone.popleft() for _ in range(len(self._gone))]
        self._known.difference_update(found)
        return found

    def ask(self, sinks: Collection[Sink]) -> Asked:
        """Have all written that some files have got. If the process has ended, ``wait`` marks them."""
        asked = Asked(sinks)
        with self._lock, suppress(Ended):
            number = next(self._numbers)
            self._asked[number] = asked
            self._send("ask", number, [sink.number for sink in sinks])
        return asked

    def done(self, asked: Asked) -> bool:
        """Whether ``wait`` would not wait: all is written, or the process has ended."""
        if asked.told is None and self._broken is None:
            self._listen()
        return asked.told is not None or self._broken is not None

    def wait(self, asked: Asked) -> list[list[Span]]:
        """Wait until what has been asked for is written, or mark the files if it never will be.

        Returns:
            For each file the positions of rows that have come since this was last asked.
        """
        while not self.done(asked):
            self._connection.poll(_LOOK_S)
        if asked.told is None:
            for sink in asked.sinks:
                mark(sink.path, ended=True)
            asked.told = [[] for _ in asked.sinks]
        return asked.told

    def fail(self, exc: BaseException) -> None:
        """A thread that has a part in writing has ended for this, or the process: no more rows are written."""
        logger.error("what writes the rows of handles has ended; start the server again to have them: %r", exc)
        self._broken = exc

    def _send(self, *message: Any) -> None:
        self._hear()
        with self._lock:
            try:
                self._connection.send(message)
            except OSError as exc:
                self.fail(exc)
                self.check()

    def _hear(self) -> None:
        self.shared  # noqa: B018  # begins the process
        self._listen()
        self.check()

    def _listen(self) -> None:
        """Take what the process has said meanwhile."""
        with self._lock:
            try:
                while self._broken is None and self._poll.poll(0):
                    self._heard(*self._connection.recv())
            except (EOFError, OSError) as exc:
                self.fail(exc)

    def _heard(self, kind: str, *given: Any) -> None:
        if kind == "told":
            number, told = given
            self._asked.pop(number).told = told
        elif kind == "free":
            self.shared.give(*given)
        else:
            logger.error("rows could not be written to %s (%s)", *given)

    def check(self) -> None:
        """Raises Ended if the process has ended."""
        if self._broken is not None:
            raise Ended("what writes the rows that requests read has ended") from self._broken


def begin(connection: int, memory: int) -> Any:
    """Start the process that writes.

    Args:
        connection: to here, a socket, which is its own from now on.
        memory: a file of the memory that both have.

    Returns:
        What can wait for its end.
    """
    # It imports what this process has imported, and nothing of the same name in the current directory.
    command = [sys.executable, "-P", "-m", "saesteer.engine.filer", str(connection), str(memory)]
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[2])])
    # It has no terminal and no group in common with the worker: it ends when the worker's end of the socket is closed.
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        pass_fds=(connection, memory),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(connection)
    return process


def _end(connection: Connection, process: Any) -> None:
    """Let it write what it has, and end."""
    # To close is not enough: processes that were forked here have the connection as well.
    with suppress(OSError), socket(fileno=os.dup(connection.fileno())) as one:
        one.shutdown(SHUT_WR)
    connection.close()
    with suppress(subprocess.TimeoutExpired):  # a disk that hangs
        process.wait(timeout=_LAST_S)


class Owed:
    """What the files of a request still lack.

    Args:
        numbers: of its readouts, in the order of its files.
        writer: of the files.
        asked: for all of them.
    """

    def __init__(self, numbers: Sequence[int], writer: Writer, asked: Asked) -> None:
        self._numbers, self._writer, self._asked = numbers, writer, asked

    @property
    def done(self) -> bool:
        """Whether ``told`` would not wait: all is written, or what writes has ended."""
        return self._writer.done(self._asked)

    def told(self) -> list[list[Any]]:
        """Wait until all is written.

        Returns:
            The numbers of readouts, each with the positions of rows that have come since this was last asked. They may
            be of later steps, too, and come once more. If what writes has ended, the files are marked.
        """
        told = self._writer.wait(self._asked)
        return [[number, spans] for number, spans in zip(self._numbers, told, strict=True) if spans]
