"""Rows for files on the device, where they wait for those of later steps: one copy brings several steps home.

Each way home costs the host several calls of the driver, as many for one row as for a thousand. When an answer ends,
what its files still lack comes home at once. Knows tensors and files, and nobody who reads.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from threading import Event, Lock, Thread
from time import sleep
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor

from saesteer.engine.filer import mark
from saesteer.engine.sinks import Sink
from saesteer.engine.writer import MOST, Filing, Owed, Part, Writer

logger = logging.getLogger("vllm.saesteer")

PAUSE = 0.25  # seconds that rows wait for those of later steps
ROOM = 48 << 20  # bytes of each of two buffers; four steps of 64 requests that read all layers of a 4B


class Staging:
    """Two buffers in turn: steps fill one while the rows of the other one come home.

    They come home when somebody waits for their files, when the buffer is full, or PAUSE seconds after the first.

    Args:
        device: where rows are.
        side: the stream that copies them; None on a CPU.
    """

    def __init__(self, device: torch.device, side: Any) -> None:
        self.writer = Writer(MOST, locked=side is not None)
        self._device, self._side, self._most = device, side, MOST // 4
        self._room = min(ROOM, self._most)
        self._on_side = nullcontext() if side is None else torch.cuda.stream(side)
        self._main: Any = None  # the stream that fills the buffers
        # Behind the last rows that were taken: steps launched since then are not waited for.
        self._taken = None if side is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copies = 0  # that have been started
        self._number: Tensor | None = None  # the same on the device
        self._turns = 0  # how many times something has come home
        self.at_once = False  # whether rows come home as they are taken: somebody waits for those of each step
        self._lock = Lock()  # the thread below brings rows home, too, and so may one that sends a step's output
        self._buffers: list[Tensor] | None = None
        self._shaped: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._copied: list[Any] = [None, None]  # of each, an event behind its last copy
        self._current = self._used = 0
        self._steps: list[Part] = []
        self._some = Event()

    def warm(self) -> None:
        """Make the memory in which rows come home, and begin the process that writes.

        Raises:
            RuntimeError: it does not begin.
        """
        self.writer.begin()

    @property
    def ticket(self) -> int:
        """For ``bring_home``: of all rows so far."""
        with self._lock:
            return self._turns + bool(self._steps)

    def add(self, filing: Filing, source: Tensor, index: Tensor) -> None:
        """Take rows of a tensor that the next step may overwrite.

        Args:
            filing: where they go.
            source: [n, d].
            index: of the rows, on the device.
        """
        width = source.shape[1]
        row = width * source.itemsize
        with self._lock:
            self._counter()  # if there is no room for it, only who brings these rows learns it
            if self._side is not None:
                self._main = torch.cuda.current_stream(self._device)
            size, first = index.shape[0] * row, -(-self._used // row) * row
            if first + size > self._room:
                self._bring_home()
                first = 0
            if size > self._room or not self._has_room():
                rows = source.index_select(0, index)
                self._note()
                self._copy(rows, [(filing, 0, size)])
                return
            self._used = first + size
            into = self._as_rows(source.dtype, width)[first // row : self._used // row]
            torch.index_select(source, 0, index, out=into)
            self._note()
            self._steps.append((filing, first, self._used))
            if not self._some.is_set():
                self._some.set()

    def _note(self) -> None:
        if self._taken is not None:
            self._taken.record(self._main)

    def bring_home(self, ticket: int) -> None:
        """Copy what waits here to the host, and hand it to the writer.

        Args:
            ticket: of the rows that are needed there.
        """
        with self._lock:
            if self._turns < ticket:
                self._bring_home()

    def _bring_home(self) -> None:
        if not self._steps or self._buffers is None:
            return
        steps, self._steps = self._steps, []
        try:
            self._copied[self._current] = self._copy(self._buffers[self._current][: self._used], steps)
        except BaseException:  # these rows are lost, and no answer may do without them in silence
            for path in {sink.path for filing, _, _ in steps for sink in filing.sinks}:
                mark(path)
            raise
        self._current, self._used = 1 - self._current, 0
        behind = self._copied[self._current]
        if behind is not None:
            self._main.wait_event(behind)

    @torch.inference_mode()  # in which this worker's step is, and the thread below is not
    def _copy(self, rows: Tensor, steps: Sequence[Part]) -> Any:
        """Start it, and hand what comes to the writer; the event behind it."""
        event = None
        with self._on_side:
            if self._side is not None:
                self._side.wait_event(self._taken)
                rows.record_stream(self._side)
            for data, own in self._pieces(rows.view(torch.uint8).view(-1), steps):
                at, ring = self.writer.take(data.nbytes), self.writer.ring
                ring.at(at, data.nbytes).copy_(data, non_blocking=True)
                self._copies += 1
                # Behind the rows, so whoever sees the number has them. Nobody here need wait for it.
                ring.landed.copy_(self._counter().fill_(self._copies), non_blocking=True)
                self.writer.put(self._copies, [(filing, at + lo, at + hi) for filing, lo, hi in own])
            if self._side is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._side)
        self._turns += 1
        return event

    def _pieces(self, data: Tensor, steps: Sequence[Part]) -> Iterator[tuple[Tensor, Sequence[Part]]]:
        """All of it, or pieces of what is too much to come home at once, which one step has."""
        if data.nbytes <= self._most:
            yield data, steps
            return
        [(filing, _, _)] = steps
        stride = data.nbytes // int(filing.lengths.sum())
        for lo, hi, piece in filing.cut(max(1, self._most // stride)):
            yield data[stride * lo : stride * hi], [(piece, 0, stride * (hi - lo))]

    def _counter(self) -> Tensor:
        """Made with the first rows: what a worker makes at its start, vLLM's sleep takes away."""
        if self._number is None:
            self._number = torch.zeros(1, dtype=torch.int64, device=self._device)
        return self._number

    def _has_room(self) -> bool:
        """Whether there are buffers: made when they are first needed, as most servers need none."""
        if self._buffers is None:
            try:
                self._buffers = [torch.empty(self._room, dtype=torch.uint8, device=self._device) for _ in range(2)]
            except torch.OutOfMemoryError:
                self._buffers = []
                logger.warning("the GPU has no room for rows to wait in, so each step brings what requests read home")
            else:
                Thread(target=_tend, args=[ref(self), self._some], daemon=True).start()
                finalize(self, self._some.set).atexit = False
        return bool(self._buffers)

    def _as_rows(self, dtype: torch.dtype, width: int) -> Tensor:
        """The buffer that is filled now, as rows: each view of a tensor takes as long as a launch."""
        key = self._current, dtype, width
        if key not in self._shaped:
            row = width * dtype.itemsize
            whole = self._buffers[self._current][: self._room // row * row]  # type: ignore[index]  # there are some
            self._shaped[key] = whole.view(dtype).view(-1, width)
        return self._shaped[key]

    def enter(self) -> None:
        """A thread begins on GPU 0, where CUDA makes it a context of hundreds of MB, even to wait for another GPU."""
        if self._side is not None:
            torch.cuda.set_device(self._device)


def _tend(whose: Callable[[], Staging | None], some: Event) -> None:
    """Rows that nobody waits for come home as well, since they keep room on the device, as long as somebody has it."""
    begun = False
    while (staging := whose()) is not None:
        try:
            if begun:
                staging.bring_home(staging.ticket)
            else:
                staging.enter()
        except BaseException:
            logger.exception("rows that wait on the device come to the host only when a request ends")
            return
        del staging
        begun = True
        some.wait()
        sleep(PAUSE)
        some.clear()


class Filed:
    """The files of the requests of a step.

    Args:
        sinks: of each request by number of the readout.
        staging: that has all rows up to this step.
    """

    def __init__(self, sinks: Mapping[str, Mapping[int, Sink]], staging: Staging) -> None:
        self._sinks, self._staging, self._ticket = sinks, staging, staging.ticket

    def ask(self, ending: Collection[str]) -> dict[str, Owed]:
        """Have all rows up to this step of these requests written, as far as they have files."""
        names = [name for name in ending if name in self._sinks]
        if names:
            self._staging.bring_home(self._ticket)
        return {name: Owed(self._sinks[name], self._staging.writer) for name in names}

    def settle(self) -> dict[str, list[list[Any]]]:
        """The same of all requests, and wait for it; by request, as ``Owed.told`` has it.

        Whoever does this does it for each step. The next ones are brought home at once, or they would come home behind
        a step that has been launched since.
        """
        self._staging.at_once = True
        self._staging.bring_home(self._ticket)
        found = {name: Owed(sinks, self._staging.writer).told() for name, sinks in self._sinks.items()}
        return {name: told for name, told in found.items() if told}
