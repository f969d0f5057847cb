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
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from saesteer.config.config import KEY
from saesteer.engine.readouts import Span

logger = logging.getLogger("vllm.saesteer")

SPOOLS = f"{KEY}_spools"  # next to a plan in extra_args, as ``address`` makes it
THREADS = 4  # one copies 11 MB into the system's memory in 5 ms, which is a step of a 4B
MOST = 256 << 20  # bytes that wait to be written; behind them, a step waits
PAUSE = 0.25  # seconds that rows wait for those of later steps: each call takes the interpreter from the steps
LACKING = 0o400  # mode of a file that lacks rows
_PIECES = 512  # that are written by one call; a system takes 1,024


def address(spools: Iterable[Sequence[Any]]) -> list[Any]:
    """How a worker finds files: it must run on this machine.

    Args:
        spools: number of a readout, path of its file, byte of its first row, and rows that it has room for.
    """
    return [platform.node(), [*spools]]


_Piece = tuple[int, Any]  # byte of the file, and what is written there


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
        self.pieces: list[_Piece] = []  # that wait; the Writer's, as are the next two
        self.spans: list[Span] = []  # positions of rows that are here, and of which nobody has been told
        self.busy = False  # somebody writes some now
        weakref.finalize(self, os.close, self.file).atexit = False  # where a thread may still write to it

    def write(self, pieces: Iterable[_Piece]) -> None:
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


def _runs(pieces: Iterable[_Piece]) -> Iterator[tuple[int, list[Any]]]:
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
        # By path. A request that was preempted has those again whose rows still wait, so they are written in order.
        self._alive: WeakValueDictionary[str, Sink] = WeakValueDictionary()

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
                    sink = self._alive.get(path)
                    if sink is None:
                        sink = self._alive[path] = Sink(path, start, rows)
                    found[number] = sink
                except OSError:  # the request may have ended
                    continue
        return self._open.get(request)

    def forget(self, request: str) -> None:
        """The request has ended; what waits is still written."""
        self._known.pop(request, None)
        self._open.pop(request, None)


class Filing(NamedTuple):
    """Where the rows of a step go, which lie file by file; a row has all sites of a position."""

    sinks: Sequence[Sink]
    first: NDArray[np.int64]  # by sink, which row of its file the first of them is
    positions: NDArray[np.int64]  # by sink, of its first one
    lengths: NDArray[np.int64]  # by sink, how many positions follow one another

    def follows(self, other: "Filing") -> bool:
        """Whether each file's rows are those behind another step's, and as many.

        Both steps say so by the same objects, which have each file once: where a step has several runs of rows for a
        file, its lists are its own.
        """
        return (
            self.sinks is other.sinks
            and self.lengths is other.lengths
            and bool((self.first == other.first + other.lengths).all())
            and bool((self.positions == other.positions + other.lengths).all())
        )


class Writer:
    """Threads that write the rows of each file in their order. Who waits for a file takes part.

    A step only leaves its rows here. Later, those whose copies the device has finished are dealt to their files, and
    wait there for those of later steps, so one call writes several.
    """

    def __init__(self) -> None:
        self.ticket = 0  # of the last step that was put
        # Ticket, event of the device, where rows go that are not dealt, and the rows.
        self._put: deque[tuple[int, Any, Filing, memoryview]] = deque()
        self._waiting: dict[Sink, None] = {}  # files with rows, the longest waiting first
        self._ready: dict[Sink, None] = {}  # of them, those that threads should take
        self._busy = 0  # files that somebody writes now
        self._held = self._fresh = 0  # bytes that wait, and those put since all files were handed over
        self._due = 0.0  # when all files are handed over next, of time.monotonic
        self._lock = Lock()
        self._work, self._done = Condition(self._lock), Condition(self._lock)  # what threads wait for, and others
        self._threads: list[Thread] = []
        self._broken: BaseException | None = None  # a thread has ended for it

    def put(self, several: Sequence[tuple[Filing, memoryview]], event: Any) -> None:
        """Take the rows of a step.

        Args:
            several: where they go, and their bytes.
            event: of the device, behind the copies that bring them to the host; None: they are there.
        """
        with self._lock:
            if not self._threads:
                self._threads = [Thread(target=self._run, daemon=True) for _ in range(THREADS)]
                for thread in self._threads:
                    thread.start()
            self._make_room()
            self._check()
            self.ticket += 1
            begins = not (self._put or self._waiting)
            self._put.extend((self.ticket, event, *one) for one in several)
            size = sum(len(data) for _, data in several)
            self._held, self._fresh = self._held + size, self._fresh + size
            if self._fresh >= MOST // 2:
                self._hand_over_all()
            elif begins:
                self._due = monotonic() + PAUSE
            if begins:
                self._work.notify_all()

    def settle(self, ticket: int, sinks: Collection[Sink]) -> list[list[Span]]:
        """Write all that some files got up to a step, as far as no thread has, and wait for those that a thread has.

        Returns:
            For each file the positions of rows that have come since this was last asked.

        Raises:
            RuntimeError: a thread has ended.
        """
        with self._lock:
            event = next((event for step, event, *_ in self._put if step == ticket), None)
        if event is not None:
            event.synchronize()
        with self._lock:
            self._deal()
            self._hand_over(sinks)
            if len(sinks) > 1:
                self._work.notify_all()
        told = []
        for sink in sinks:
            with self._lock:
                self._done.wait_for(lambda sink=sink: not sink.busy or self._broken)  # type: ignore[misc]
                self._check()
                pieces = self._take(sink)
                told.append(sink.spans)
                sink.spans = []
            self._write(sink, pieces)
        return told

    def _make_room(self) -> None:
        """A slow disk slows steps down."""
        while self._held >= MOST and self._broken is None:
            if not self._ready and not self._busy:  # or nobody would write
                if not self._waiting and (event := self._put[0][1]) is not None:
                    event.synchronize()
                self._hand_over_all()
            self._done.wait()

    def _hand_over(self, sinks: Iterable[Sink]) -> None:
        """Let threads take these files, as far as nobody has them."""
        for sink in sinks:
            if not sink.busy and sink.pieces:
                self._ready[sink] = None

    def _hand_over_all(self) -> None:
        self._deal()
        self._hand_over(self._waiting)
        self._fresh, self._due = 0, monotonic() + PAUSE
        self._work.notify_all()

    def _deal(self) -> None:
        """Give rows that have landed to their files; steps of the same files follow one another in them."""
        while (steps := self._landed()) is not None:
            sinks, *numbers = steps[0][0]
            firsts, positions, lengths = (each.tolist() for each in numbers)
            stride, at = len(steps[0][1]) // sum(lengths), 0
            for sink, first, position, length in zip(sinks, firsts, positions, lengths, strict=True):
                end = at + stride * length
                places = count(sink.start + stride * first, end - at)
                sink.pieces.extend(zip(places, [data[at:end] for _, data in steps]))  # noqa: B905  (places never end)
                at = end
                _join(sink.spans, position, position + length * len(steps))
            self._waiting.update(dict.fromkeys(sinks))

    def _landed(self) -> list[tuple[Filing, memoryview]] | None:
        """The next steps whose copies are done, as far as they follow one another; None if the next one's is not."""
        found: list[tuple[Filing, memoryview]] = []
        while self._put and ((event := self._put[0][1]) is None or event.query()):
            filing = self._put[0][2]
            if found and not filing.follows(found[-1][0]):
                break
            found.append(self._put.popleft()[2:])
        return found or None

    def _take(self, sink: Sink) -> Sequence[_Piece]:
        """A file's rows; nobody else takes the file until they are written."""
        self._ready.pop(sink, None)
        self._waiting.pop(sink, None)
        taken, sink.pieces = sink.pieces, []
        sink.busy = bool(taken)
        self._busy += sink.busy
        return taken

    def _write(self, sink: Sink, pieces: Sequence[_Piece]) -> None:
        if not pieces:
            return
        sink.write(pieces)
        with self._lock:
            sink.busy = False
            self._busy -= 1
            self._held -= sum(len(data) for _, data in pieces)
            self._done.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("a thread that writes what requests read has ended") from self._broken

    def _run(self) -> None:
        try:
            while True:
                self._serve()
        except BaseException as exc:  # noqa: BLE001  # whoever waits for this thread learns it
            with self._lock:
                self._broken = exc
                self._done.notify_all()

    def _serve(self) -> None:
        with self._lock:
            self._work.wait_for(lambda: self._put or self._waiting)
            self._work.wait_for(lambda: self._ready, self._due - monotonic())
            if not self._ready and monotonic() >= self._due:
                self._hand_over_all()
            if not self._ready:
                return
            sink = next(iter(self._ready))
            pieces = self._take(sink)
        self._write(sink, pieces)


def _join(spans: list[Span], lo: int, hi: int) -> None:
    """Add positions, which mostly follow those before."""
    if spans and spans[-1][1] == lo:
        lo = spans.pop()[0]
    spans.append((lo, hi))


class Filed:
    """The files of the requests of a step.

    Args:
        sinks: of each request by number of the readout.
        writer: that has all rows up to this step.
    """

    def __init__(self, sinks: Mapping[str, Mapping[int, Sink]], writer: Writer) -> None:
        self._sinks, self._writer, self._ticket = sinks, writer, writer.ticket

    def settle(self, ending: Collection[str] | None = None) -> dict[str, list[list[Any]]]:
        """Wait until all rows up to this step of these requests are written; None: of all requests.

        Returns:
            Of each request that has a file, the numbers of its readouts, each with the positions of rows that have
            come since this was last asked. They may be of later steps, too, and come once more.
        """
        names = [name for name in self._sinks if ending is None or name in ending]
        files = [(name, number, sink) for name in names for number, sink in self._sinks[name].items()]
        found: dict[str, list[list[Any]]] = {}
        if files:
            told = self._writer.settle(self._ticket, [sink for *_, sink in files])
            for (name, number, _), spans in zip(files, told, strict=True):
                if spans:
                    found.setdefault(name, []).append([number, spans])
        return found
