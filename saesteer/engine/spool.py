"""Rows on their way from a worker's memory into files that the front end has made. Knows bytes and no tensor's meaning.

A worker on the front end's machine writes rows where an answer's handle will find them, in threads beside the steps.
Only positions travel on. A row's place follows from its position: what is computed again, behind a preemption or a
wrong guess, replaces what is there. Who ends a request waits until all of it is written. A file that lacks rows is
marked by its mode, which needs no room on a disk that is full, and outlives the file's holders here.
"""

import logging
import os
import platform
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from saesteer.config.config import KEY

if TYPE_CHECKING:
    from saesteer.engine.brought import Made

logger = logging.getLogger("vllm.saesteer")

SPOOLS = f"{KEY}_spools"  # next to a plan in extra_args, as ``address`` makes it
LANES = 4  # threads; one copies 11 MB into the system's memory in 5 ms, which is a step of a 4B
MOST = 256 << 20  # bytes that wait to be written; behind them, a step waits
TOGETHER = 8  # steps that a thread writes by one call for each file: a call takes the interpreter from the steps
PAUSE = 0.05  # seconds at most that rows wait for those of later steps
LACKING = 0o400  # mode of a file that lacks rows
_PIECES = 512  # that are written by one call; a system takes 1,024


def address(spools: Iterable[Sequence[Any]]) -> list[Any]:
    """How a worker finds files: it must run on this machine.

    Args:
        spools: number of a readout, path of its file, byte of its first row, and rows that it has room for.
    """
    return [platform.node(), [*spools]]


class Sink:
    """A file that takes the rows of one readout of one request; closed when nobody holds it.

    Args:
        path: of the file.
        start: byte of its first row.
        rows: that it has room for: steps behind an answer's last token bring more.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, start: int, rows: int) -> None:
        self.start, self.rows = start, rows
        self._path, self._failed = path, False
        self.file = os.open(path, os.O_WRONLY)
        # The thread that writes it: the same for whoever opens the file again, behind a preemption.
        self.lane = os.fstat(self.file).st_ino % LANES
        weakref.finalize(self, os.close, self.file).atexit = False  # where a thread may still write to it

    def write(self, pieces: Iterable[tuple[int, Any]]) -> None:
        """Write bytes at places, neighbours by one call: between two calls a thread may wait for the interpreter."""
        if self._failed:
            return
        try:
            for at, run in _runs(pieces):
                put(self.file, at, run)
        except OSError as exc:
            self._failed = True
            logger.error("rows could not be written to %s (%s)", self._path, exc)
            with suppress(OSError):  # then the front end cannot write either
                os.fchmod(self.file, LACKING)


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


def _runs(pieces: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, list[Any]]]:
    run: list[Any] = []
    first = end = 0
    for at, data in pieces:
        if run and (at != end or len(run) == _PIECES):
            yield first, run
            run = []
        if not run:
            first = end = at
        run.append(data)
        end += len(data)
    if run:
        yield first, run


class Sinks:
    """The files of the requests that a worker has."""

    def __init__(self) -> None:
        self._known: dict[str, list[Sequence[Any]]] = {}  # by request, as in its address, until it first reads
        self._open: dict[str, dict[int, Sink]] = {}

    def add(self, request: str, found: Sequence[Any] | None) -> None:
        """Remember the address of a request's files, if this is their machine."""
        if found is not None and found[0] == platform.node():
            self._known[request] = found[1]

    def of(self, request: str) -> Mapping[int, Sink] | None:
        """By number of the readout; rows of one whose file cannot be opened travel to the front end. None: no files."""
        known = self._known.pop(request, ())
        if known:
            self._open[request] = found = {}
            for number, path, start, rows in known:
                try:
                    found[number] = Sink(path, start, rows)
                except OSError:  # the request may have ended
                    continue
        return self._open.get(request)

    def forget(self, request: str) -> None:
        """The request has ended; what waits is still written."""
        self._known.pop(request, None)
        self._open.pop(request, None)


class _Job(NamedTuple):
    """What a thread writes of a step."""

    ticket: int
    pieces: Sequence[tuple[Sink, int, Any]]  # where, at which byte, and what
    event: Any  # of the device, behind the copies into these pieces; None: they are there
    size: int  # bytes of the pieces


class Writer:
    """Threads that write rows; those of one file are written by one thread, in their order."""

    def __init__(self) -> None:
        self.ticket = 0  # of the last step that was put
        self._queues: list[deque[_Job]] = [deque() for _ in range(LANES)]
        self._done = [0] * LANES  # the last ticket of each thread
        self._wanted = [0] * LANES  # the last ticket that somebody waits for
        self._held = 0  # bytes that wait
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._broken: BaseException | None = None  # a thread has ended for it

    def spool(self, made: Iterable["Made"], stream: Any) -> list["Made"]:
        """Take the rows that have a file, and leave their positions.

        Args:
            made: of a step.
            stream: of the device, on which they are copied to the host; None: they are there.
        """
        pieces, left = [], []
        views: dict[int, Any] = {}  # of arrays by their id, as bytes
        for one in made:
            if one.parts[0].sink is None:  # readouts that have files are made apart from others
                left.append(one)
                continue
            (rows,) = one.arrays
            data = views.get(id(rows))
            if data is None:
                data = views[id(rows)] = rows.view(torch.uint8).view(-1).numpy().data
            size, ahead = len(data) // len(rows), one.ahead
            stride = size * max(1, len(one.parts[0].reading.ops))  # of a position
            for part in one.parts:
                sink, at = part.sink, size * (one.base + part.first)
                assert sink is not None
                for first, number in part.places:
                    fits = min(number, sink.rows - first - ahead)
                    if fits > 0:
                        pieces.append((sink, sink.start + stride * (first + ahead), data[at : at + stride * fits]))
                    at += stride * number
            left.append(one._replace(arrays=()))
        if pieces:
            self._put(pieces, stream)
        return left

    def _put(self, pieces: Sequence[tuple[Sink, int, Any]], stream: Any) -> None:
        event = None
        if stream is not None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its threads sleep meanwhile
            event.record(stream)
        shares: list[list[tuple[Sink, int, Any]]] = [[] for _ in range(LANES)]
        for piece in pieces:
            shares[piece[0].lane].append(piece)
        with self._changed:
            if not self._threads:
                self._threads = [Thread(target=self._run, args=[lane], daemon=True) for lane in range(LANES)]
                for thread in self._threads:
                    thread.start()
            self._changed.wait_for(lambda: self._held < MOST or self._broken)  # a slow disk slows steps down
            self._check()
            self.ticket += 1
            for queue, share in zip(self._queues, shares, strict=True):
                job = _Job(self.ticket, share, event, sum(len(data) for _, _, data in share))
                queue.append(job)
                self._held += job.size
            if any(len(queue) == 1 or self._due(lane) for lane, queue in enumerate(self._queues)):
                self._changed.notify_all()

    def wait(self, ticket: int, lanes: Collection[int]) -> None:
        """Wait until all that some threads got up to a step is written, or was tried."""
        with self._changed:
            for lane in lanes:
                self._wanted[lane] = max(self._wanted[lane], ticket)
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(self._done[lane] >= ticket for lane in lanes) or self._broken)
            self._check()

    def _due(self, lane: int) -> bool:
        """Whether a thread should not wait for more."""
        full = len(self._queues[lane]) >= TOGETHER or self._held >= MOST // 2
        return full or self._wanted[lane] > self._done[lane]

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("a thread that writes what requests read has ended") from self._broken

    def _run(self, lane: int) -> None:
        try:
            while True:
                self._serve(lane)
        except BaseException as exc:  # noqa: BLE001  # whoever waits for this thread learns it
            with self._changed:
                self._broken = exc
                self._changed.notify_all()

    def _serve(self, lane: int) -> None:
        queue = self._queues[lane]
        with self._changed:
            self._changed.wait_for(lambda: queue)
            self._changed.wait_for(lambda: self._due(lane), PAUSE)
            jobs = [*queue]
            queue.clear()
        if jobs[-1].event is not None:
            jobs[-1].event.synchronize()
        written: defaultdict[Sink, list[tuple[int, Any]]] = defaultdict(list)
        for job in jobs:
            for sink, at, data in job.pieces:
                written[sink].append((at, data))
        for sink, pieces in written.items():
            sink.write(pieces)
        with self._changed:
            self._held -= sum(job.size for job in jobs)
            self._done[lane] = jobs[-1].ticket
            self._changed.notify_all()


class Spooling:
    """The requests of a step that have files.

    Args:
        lanes: of each request, the threads that write its files.
        writer: that has all rows up to this step.
    """

    def __init__(self, lanes: Mapping[str, Collection[int]], writer: Writer) -> None:
        self._lanes, self._writer, self._ticket = lanes, writer, writer.ticket

    def settle(self, ending: Collection[str] | None = None) -> None:
        """Wait for all rows up to this step of those of these requests that have a file; None: of all requests."""
        found = self._lanes.keys() if ending is None else self._lanes.keys() & ending
        if lanes := {lane for name in found for lane in self._lanes[name]}:
            self._writer.wait(self._ticket, lanes)
