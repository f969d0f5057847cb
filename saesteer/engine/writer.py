"""Hands rows that have come to the host to the process that writes them into files (filer.py).

A worker on the front end's machine has rows written where an answer's handle will find them. A row's place follows
from its position: what is computed again, behind a preemption or a wrong guess, replaces what is there. When a request
ends, the scheduler waits until all its rows are written, and sends their positions on.
"""

import logging
import os
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from select import POLLIN, poll
from socket import SHUT_WR, socket, socketpair
from threading import RLock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.filer import HELD, Span, Step, join, mark
from saesteer.engine.sinks import Sink

logger = logging.getLogger("vllm.saesteer")

MOST = 256 << 20  # bytes that wait to be written; behind them, a step waits
_ALIGNED = 512  # bytes that a part is a multiple of, as any dtype needs
_LAST_S = 10.0  # that rows may take to be written when the worker ends
_AGAIN_S = 1.0  # from one start of the process to the next
_LOOK_S = 0.005  # between two looks at what another thread may have received


class Filing(NamedTuple):
    """Where the rows of a step go, which lie file by file; a row has all sites of a position."""

    sinks: Sequence[Sink]
    positions: NDArray[np.int64]  # by sink, of its first row
    lengths: NDArray[np.int64]  # by sink, how many positions follow one another

    def cut(self, most: int) -> Iterator[tuple[int, int, "Filing"]]:
        """In pieces of at most so many rows: the first row of each, the one behind its last, and where these go."""
        end = self.lengths.cumsum()
        begin, total = end - self.lengths, int(end[-1])
        for lo in range(0, total, most):
            hi = min(lo + most, total)
            low, high = np.maximum(begin, lo), np.minimum(end, hi)
            here, ahead = np.flatnonzero(low < high), low - begin
            numbers = (self.positions + ahead, high - low)
            yield lo, hi, Filing([self.sinks[one] for one in here.tolist()], *(one[here] for one in numbers))


Part = tuple[Filing, int, int]  # of a step: the first byte of its rows, and the one behind them


class Ring:
    """Memory that two processes share, parts of which are taken and given back in one order.

    It is made once, and its pages are locked then: to lock new ones takes a step milliseconds.

    Args:
        nbytes: that parts may have together.
        locked: whether a device copies there by itself; False where there is no GPU.

    Raises:
        RuntimeError: the pages cannot be locked.
    """

    def __init__(self, nbytes: int, *, locked: bool) -> None:
        self.file = os.memfd_create("saesteer")
        weakref.finalize(self, os.close, self.file).atexit = False
        self._end = _ALIGNED + nbytes
        os.ftruncate(self.file, self._end)
        self._bytes = torch.frombuffer(mmap(self.file, 0), dtype=torch.uint8)
        self.landed = self._bytes[:HELD].view(torch.int64)  # how many copies have
        self._taken: deque[tuple[int, int]] = deque()
        if locked:
            failed = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._end, 0)  # type: ignore[no-untyped-call]
            if int(failed):
                raise RuntimeError(f"CUDA cannot lock {self._end} bytes of memory for what requests read: {failed}")
            weakref.finalize(self, _unlock, self._bytes).atexit = False

    def take(self, nbytes: int) -> int | None:
        """Return the first byte of a part; None where there is no room."""
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        lo, hi = _ALIGNED, self._end
        if self._taken:
            oldest, newest = self._taken[0][0], self._taken[-1][1]
            if newest <= oldest:
                lo, hi = newest, oldest
            elif newest + size <= hi:
                lo = newest
            else:
                hi = oldest
        if lo + size > hi:
            return None
        self._taken.append((lo, lo + size))
        return lo

    def give(self) -> None:
        """Give the part back that was taken first."""
        self._taken.popleft()

    def at(self, lo: int, nbytes: int) -> Tensor:
        """Bytes of it, uint8."""
        return self._bytes[lo : lo + nbytes]


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


class Writer:
    """The process that writes rows: begun when it is first needed, and again where it has ended; it ends with this.

    Several threads may use it.

    Args:
        nbytes: of memory for rows that wait to be written.
        locked: as for ``Ring``.
    """

    def __init__(self, nbytes: int = MOST, *, locked: bool = False) -> None:
        self._nbytes, self._locked = nbytes, locked
        self._lock = RLock()  # of all below
        self._ring: Ring | None = None
        self._connection: Connection | None = None
        self._begun = -_AGAIN_S
        self._sent: deque[list[Sink]] = deque()  # the files of each message whose answer has not come
        self.put_so_far = self._written = 0  # messages

    @property
    def ring(self) -> Ring:
        """The memory that rows are written from; made with the first ones."""
        with self._lock:
            if self._ring is None:
                self._ring = Ring(self._nbytes, locked=self._locked)
            return self._ring

    def begin(self) -> None:
        """Begin the process.

        Raises:
            OSError, RuntimeError: it does not begin.
        """
        self.put(0, [])
        self.wait(self.put_so_far)
        if self._connection is None:
            raise RuntimeError("the process that writes the rows of handles does not begin")

    def take(self, nbytes: int) -> int:
        """Return the first byte of a part of the memory; wait until there is one. It is written, and given back, by the
        next ``put``.

        Args:
            nbytes: of the part, not more than the memory has.
        """
        while True:
            with self._lock:
                self._receive()
                found = self.ring.take(nbytes)
            if found is not None:
                return found
            self._pause()

    def put(self, copies: int, steps: Sequence[Part]) -> None:
        """Have rows written.

        Args:
            copies: that have landed, by ``Ring.landed``, once the rows are there.
            steps: where the rows of each go, their first byte in the memory, and the one behind them; all of them in
                the part that was taken last.
        """
        numbers: dict[Sink, int] = {}
        sent: list[Step] = []
        for filing, first, end in steps:
            files = [numbers.setdefault(sink, len(numbers)) for sink in filing.sinks]
            rows = (filing.positions.tolist(), filing.lengths.tolist())
            sent.append((first, (end - first) // sum(rows[-1]), files, *rows))
        with self._lock:
            self._receive()
            self.put_so_far += 1
            self._sent.append([*numbers])
            if self._connection is None and monotonic() < self._begun + _AGAIN_S:
                self._drop()
                return
            try:
                self._process().send((copies, [sink.name for sink in numbers], sent))
            except OSError as exc:
                self._lose(exc)

    def done(self, number: int) -> bool:
        """Whether all rows of the first so many messages are written, or their files are marked."""
        if number > self._written:
            self._receive()
        return number <= self._written

    def wait(self, number: int) -> None:
        """Wait until ``done``."""
        while not self.done(number):
            self._pause()

    def _pause(self) -> None:
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # another thread has found out that it has ended
                connection.poll(_LOOK_S)

    def _process(self) -> Connection:
        if self._connection is None:
            self._begun = monotonic()
            mine, other = socketpair()
            process = _begin(other.detach(), self.ring.file)
            self._connection = Connection(mine.detach())
            self._poll = poll()  # each call of a connection's own makes a selector
            self._poll.register(self._connection.fileno(), POLLIN)
            self._finalize = weakref.finalize(self, _end, self._connection, process)
        return self._connection

    def _receive(self) -> None:
        with self._lock:
            try:
                while self._connection is not None and self._poll.poll(0):
                    self._answered(*self._connection.recv())
            except (EOFError, OSError) as exc:
                self._lose(exc)

    def _answered(self, spans: Sequence[Sequence[Span]], failed: Mapping[int, str]) -> None:
        sinks = self._next()
        for sink, positions in zip(sinks, spans, strict=True):
            for one in positions:
                join(sink.spans, one)
        for number, why in failed.items():
            if not sinks[number].failed:
                logger.error("rows could not be written to %s (%s)", sinks[number].path, why)
            sinks[number].failed = True

    def _next(self) -> list[Sink]:
        """The files of the oldest message, whose memory is free now."""
        sinks = self._sent.popleft()
        self._written += 1
        if sinks:
            self.ring.give()
        return sinks

    def _lose(self, exc: BaseException) -> None:
        """Take note that the process has ended."""
        logger.error("the process that writes the rows of handles has ended, and is begun again when needed: %r", exc)
        self._drop()
        if self._connection is not None:
            self._connection = None
            self._finalize()

    def _drop(self) -> None:
        """Mark the files of all rows that are not written."""
        while self._sent:
            for sink in self._next():
                mark(sink.path)

    def take_spans(self, sinks: Mapping[int, Sink]) -> list[list[Any]]:
        """Return the numbers of sinks with rows that were written since they were last asked for, and the positions."""
        with self._lock:
            found: list[list[Any]] = [[number, sink.spans] for number, sink in sinks.items() if sink.spans]
            for sink in sinks.values():
                sink.spans = []
        return found


def _begin(connection: int, memory: int) -> Any:
    """Start the process.

    Args:
        connection: to here, a socket, which is its own from now on.
        memory: a file of the memory that both have.

    Returns:
        What can wait for its end.
    """
    # It imports what this process has imported, and nothing of the same name in the current directory.
    command = [sys.executable, "-P", "-m", "saesteer.engine.filer", *map(str, (connection, memory, os.getpid()))]
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
        sinks: its files, by number of the readout.
        writer: of the files.
    """

    def __init__(self, sinks: Mapping[int, Sink], writer: Writer) -> None:
        self._sinks, self._writer, self._number = sinks, writer, writer.put_so_far

    @property
    def done(self) -> bool:
        """Whether ``told`` would not wait."""
        return self._writer.done(self._number)

    def told(self) -> list[list[Any]]:
        """Wait until all rows are written, or their files are marked.

        Returns:
            The numbers of readouts, each with the positions of rows that have come since this was last asked. They may
            be of later steps, too, and come once more.
        """
        self._writer.wait(self._number)
        return self._writer.take_spans(self._sinks)
