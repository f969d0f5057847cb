"""Rows on their way from a worker's memory into files that the front end has made. Knows bytes and no tensor's meaning.

A worker on the front end's machine writes rows where an answer's handle will find them, in threads beside the steps.
Only positions travel on. A row's place follows from its position: what is computed again, behind a preemption or a
wrong guess, replaces what is there. When a request ends, the scheduler asks for what its files still lack, and sends
the positions of their rows once all is written.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.readouts import Span
from saesteer.engine.sinks import Run, Sink

THREADS = 4  # one copies 11 MB into the system's memory in 5 ms, which is a step of a 4B
MOST = 256 << 20  # bytes that wait to be written; behind them, a step waits
PAUSE = 0.25  # seconds that rows wait for those of later steps: each call takes the interpreter from the steps


class Filing(NamedTuple):
    """Where the rows of a step go, which lie file by file; a row has all sites of a position."""

    sinks: Sequence[Sink]
    first: NDArray[np.int64]  # by sink, which row of its file the first of them is
    positions: NDArray[np.int64]  # by sink, of its first one
    lengths: NDArray[np.int64]  # by sink, how many positions follow one another

    def follows(self, other: "Filing") -> bool:
        """Whether this goes on with another step: its rows are as many in each file, right behind the other's.

        A file that is there twice, for two windows, never is: no step goes on in both.
        """
        return (
            self.sinks == other.sinks
            and np.array_equal(self.lengths, other.lengths)
            and bool((self.first == other.first + other.lengths).all())
            and bool((self.positions == other.positions + other.lengths).all())
        )


class Asked:
    """A wish that all rows which some files got up to a step be written.

    Args:
        ticket: of the step.
        sinks: the files.
    """

    def __init__(self, ticket: int, sinks: Collection[Sink]) -> None:
        self.ticket, self.sinks = ticket, sinks
        self.told: list[list[Span]] | None = None  # by file, the positions of its new rows; None: not looked yet
        self.ends: list[int] = []  # by file, how many pieces it then had got

    @property
    def done(self) -> bool:
        """Whether all of these rows are."""
        if self.told is None:
            return False
        return all(sink.written >= end for sink, end in zip(self.sinks, self.ends, strict=True))


class Writer:
    """Threads that write the rows of each file in their order. Who waits for a file takes part.

    A step only leaves its rows here. Later, those whose copies the device has finished are dealt to their files, and
    wait there for those of later steps, so one call writes several.

    Args:
        begin: what each thread does first.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self.ticket = 0  # of the last step that was put
        # Ticket, event of the device, where rows go that are not dealt, and the rows.
        self._put: deque[tuple[int, Any, Filing, memoryview]] = deque()
        self._asked: deque[Asked] = deque()  # that nobody has looked at
        self._waiting: dict[Sink, None] = {}  # files with rows, the longest waiting first
        self._ready: dict[Sink, None] = {}  # of them, those to write as soon as nobody writes some of their rows
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

        Raises:
            RuntimeError: a thread has ended.
        """
        with self._lock:
            self._start()
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

    def ask(self, ticket: int, sinks: Collection[Sink]) -> Asked:
        """Let threads write all that some files got up to a step.

        Raises:
            RuntimeError: a thread has ended.
        """
        asked = Asked(ticket, sinks)
        with self._lock:
            self._start()
            self._check()
            self._asked.append(asked)
            self._work.notify()
        return asked

    def done(self, asked: Asked) -> bool:
        """Whether ``wait`` would not wait: all is written, or a thread has ended."""
        return asked.done or self._broken is not None

    def wait(self, asked: Asked) -> list[list[Span]]:
        """Write what has been asked for, as far as no thread has, and wait for what a thread has.

        Returns:
            For each file the positions of rows that have come since this was last asked.

        Raises:
            RuntimeError: a thread has ended.
        """
        with self._lock:
            own = asked in self._asked
            if own:
                self._asked.remove(asked)
        if own:
            self._look(asked)
        while True:
            with self._lock:
                self._done.wait_for(lambda: asked.done or self._next(asked.sinks) or self._broken)
                self._check()
                sink = self._next(asked.sinks)
                if asked.done or sink is None:
                    return asked.told or []
                runs = self._take(sink)
            self._write(sink, runs)

    def fail(self, exc: BaseException) -> None:
        """A thread that has a part in writing has ended for this; who puts or waits from now on is told."""
        with self._lock:
            self._broken = exc
            self._done.notify_all()

    def _look(self, asked: Asked) -> None:
        """Find what these files have got, once the step's copies are done."""
        with self._lock:
            event = next((event for step, event, *_ in self._put if step == asked.ticket), None)
        if event is not None:
            event.synchronize()
        with self._lock:
            self._deal()
            ready = {sink: None for sink in asked.sinks if sink.runs}
            self._ready = ready | self._ready
            asked.ends = [sink.dealt for sink in asked.sinks]
            asked.told = [sink.spans for sink in asked.sinks]
            for sink in asked.sinks:
                sink.spans = []
            self._work.notify(len(ready))
            self._done.notify_all()

    def _start(self) -> None:
        if not self._threads:
            self._threads = [Thread(target=self._run, daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()

    def _make_room(self) -> None:
        """A slow disk slows steps down."""
        while self._held >= MOST and self._broken is None:
            if not self._ready and not self._busy:  # or nobody would write
                if not self._waiting and (event := self._put[0][1]) is not None:
                    event.synchronize()
                self._hand_over_all()
            self._done.wait()

    def _next(self, sinks: Iterable[Sink]) -> Sink | None:
        """The first of these that should be written, and that nobody has."""
        return next((sink for sink in sinks if sink in self._ready and not sink.busy), None)

    def _hand_over_all(self) -> None:
        self._deal()
        self._ready |= self._waiting
        self._fresh, self._due = 0, monotonic() + PAUSE
        self._work.notify_all()

    def _deal(self) -> None:
        """Give rows that have landed to their files; steps of the same files follow one another in them."""
        while (steps := self._landed()) is not None:
            sinks, *numbers = steps[0][0]
            firsts, positions, lengths = (each.tolist() for each in numbers)
            rows = [data for _, data in steps]
            stride, at, many = len(rows[0]) // sum(lengths), 0, len(rows)
            for sink, first, position, length in zip(sinks, firsts, positions, lengths, strict=True):
                end, begin = at + stride * length, sink.start + stride * first
                span = position, position + length * many
                sink.add(begin, begin + (end - at) * many, [data[at:end] for data in rows], span)
                at = end
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

    def _take(self, sink: Sink) -> Sequence[Run]:
        """A file's rows; nobody else takes the file until they are written."""
        self._ready.pop(sink, None)
        self._waiting.pop(sink, None)
        taken, sink.runs = sink.runs, []
        sink.busy = bool(taken)
        self._busy += sink.busy
        return taken

    def _write(self, sink: Sink, runs: Sequence[Run]) -> None:
        if not runs:
            return
        sink.write(runs)
        with self._lock:
            sink.busy = False
            sink.written += sum(len(pieces) for _, pieces in runs)
            self._busy -= 1
            self._held -= sum(sum(map(len, pieces)) for _, pieces in runs)
            if sink in self._ready:
                self._work.notify()
            self._done.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("a thread that writes what requests read has ended") from self._broken

    def _run(self) -> None:
        try:
            self._begin()
            while True:
                self._serve()
        except BaseException as exc:  # noqa: BLE001  # whoever waits for this thread learns it
            self.fail(exc)

    def _serve(self) -> None:
        with self._lock:
            self._work.wait_for(lambda: self._put or self._waiting or self._asked)
            self._work.wait_for(lambda: self._asked or self._next(self._ready), self._due - monotonic())
            asked = self._asked.popleft() if self._asked else None
            if asked is None:
                if self._next(self._ready) is None and monotonic() >= self._due:
                    self._hand_over_all()
                sink = self._next(self._ready)
                runs = () if sink is None else self._take(sink)
        if asked is not None:
            self._look(asked)
        elif sink is not None:
            self._write(sink, runs)


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
        """Whether ``told`` would not wait: all is written, or a thread has ended."""
        return self._writer.done(self._asked)

    def told(self) -> list[list[Any]]:
        """Wait until all is written.

        Returns:
            The numbers of readouts, each with the positions of rows that have come since this was last asked. They may
            be of later steps, too, and come once more.

        Raises:
            RuntimeError: a thread that writes has ended.
        """
        told = self._writer.wait(self._asked)
        return [[number, spans] for number, spans in zip(self._numbers, told, strict=True) if spans]
