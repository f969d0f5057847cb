"""Rows for files on the device, where they wait for those of later steps: one copy brings several steps home.

Each way home costs the host several calls of the driver, as many for one row as for a thousand. When an answer ends,
what its files still lack comes home at once. Knows tensors and files, and nobody who reads.
"""

import logging
from collections.abc import Collection, Mapping
from threading import Event, Lock, Thread
from time import sleep
from typing import Any

import torch
from torch import Tensor

from saesteer.engine.pinned import Pinned
from saesteer.engine.sinks import Sink
from saesteer.engine.spool import MOST, PAUSE, Filing, Owed, Writer

logger = logging.getLogger("vllm.saesteer")

ROOM = 48 << 20  # bytes of each of two buffers; four steps of 64 requests that read all layers of a 4B


class Staging:
    """Two buffers in turn: steps fill one while the rows of the other one come home.

    They come home when somebody waits for their files, when the buffer is full, or PAUSE seconds after the first.

    Args:
        device: where rows are.
        side: the stream that copies them; None on a CPU.
    """

    def __init__(self, device: torch.device, side: Any) -> None:
        self.writer = Writer(self._enter)
        self._device, self._side, self._room = device, side, ROOM
        self._main: Any = None  # the stream that fills the buffers
        # Behind the last rows that were taken: steps launched since then are not waited for.
        self._taken = None if side is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: Pinned | None = None
        self._lock = Lock()  # the thread below brings rows home, too, and so may one that sends a step's output
        self._buffers: list[Tensor] | None = None
        self._shaped: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._copied: list[Any] = [None, None]  # of each, an event behind its last copy
        self._current = self._used = 0
        self._steps: list[tuple[Filing, int, int]] = []  # with the first byte of its rows, and the one behind them
        self._some = Event()

    def warm(self) -> None:
        """Make the memory in which rows come home."""
        if self._side is not None:
            self._pinned = Pinned(MOST, locked=True)

    @property
    def ticket(self) -> int:
        """The writer's, of what has all rows so far, once they have come home."""
        with self._lock:
            return self.writer.ticket + bool(self._steps)

    def add(self, filing: Filing, source: Tensor, index: Tensor) -> None:
        """Take rows of a tensor that the next step may overwrite.

        Args:
            filing: where they go.
            source: [n, d].
            index: of the rows, on the device.

        Raises:
            RuntimeError: a thread that writes has ended.
        """
        width = source.shape[1]
        row = width * source.itemsize
        with self._lock:
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

    def bring_home(self) -> None:
        """Copy what waits here to the host, and hand it to the writer.

        Raises:
            RuntimeError: a thread that writes has ended.
        """
        with self._lock:
            self._bring_home()

    def _bring_home(self) -> None:
        if not self._steps or self._buffers is None:
            return
        steps, self._steps = self._steps, []
        self._copied[self._current] = self._copy(self._buffers[self._current][: self._used], steps)
        self._current, self._used = 1 - self._current, 0
        behind = self._copied[self._current]
        if behind is not None:
            self._main.wait_event(behind)

    def _copy(self, rows: Tensor, steps: list[tuple[Filing, int, int]]) -> Any:
        """Start it; the event behind it."""
        event = None
        if self._side is None:
            there = _bytes(rows.clone())
        else:
            self._side.wait_event(self._taken)
            with torch.cuda.stream(self._side):
                found = None if self._pinned is None else self._pinned.copied(rows)
                there = _bytes(rows.to("cpu", non_blocking=True)) if found is None else found
                rows.record_stream(self._side)
                # Who waits for it sleeps: a thread that looks all the time would take a core from the steps.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._side)
        self.writer.put([(filing, there[lo:hi]) for filing, lo, hi in steps], event)
        return event

    def _has_room(self) -> bool:
        """Whether there are buffers: made when they are first needed, as most servers need none."""
        if self._buffers is None:
            try:
                self._buffers = [torch.empty(self._room, dtype=torch.uint8, device=self._device) for _ in range(2)]
            except torch.OutOfMemoryError:
                self._buffers = []
                logger.warning("the GPU has no room for rows to wait in, so each step brings what requests read home")
            else:
                Thread(target=self._tend, daemon=True).start()
        return bool(self._buffers)

    def _as_rows(self, dtype: torch.dtype, width: int) -> Tensor:
        """The buffer that is filled now, as rows: each view of a tensor takes as long as a launch."""
        key = self._current, dtype, width
        if key not in self._shaped:
            row = width * dtype.itemsize
            whole = self._buffers[self._current][: self._room // row * row]  # type: ignore[index]  # there are some
            self._shaped[key] = whole.view(dtype).view(-1, width)
        return self._shaped[key]

    def _enter(self) -> None:
        """A thread begins on GPU 0, where CUDA makes it a context of hundreds of MB, even to wait for another GPU."""
        if self._side is not None:
            torch.cuda.set_device(self._device)

    def _tend(self) -> None:
        """Rows that nobody waits for come home as well, since they hold files open."""
        try:
            self._enter()
            while True:
                self._some.wait()
                sleep(PAUSE)
                self._some.clear()
                self.bring_home()
        except BaseException as exc:  # noqa: BLE001  # whoever waits for these rows learns it
            self.writer.fail(exc)


def _bytes(rows: Tensor) -> memoryview:
    return rows.view(torch.uint8).view(-1).numpy().data


class Filed:
    """The files of the requests of a step.

    Args:
        sinks: of each request by number of the readout.
        staging: that has all rows up to this step.
    """

    def __init__(self, sinks: Mapping[str, Mapping[int, Sink]], staging: Staging) -> None:
        self._sinks, self._staging, self._ticket = sinks, staging, staging.ticket

    def ask(self, ending: Collection[str]) -> dict[str, Owed]:
        """Have all rows up to this step of these requests written, as far as they have files.

        Raises:
            RuntimeError: a thread that writes has ended.
        """
        return {name: self._ask(self._sinks[name]) for name in ending if name in self._sinks}

    def _ask(self, sinks: Mapping[int, Sink]) -> Owed:
        writer = self._staging.writer
        if writer.ticket < self._ticket:
            self._staging.bring_home()
        return Owed([*sinks], writer, writer.ask(self._ticket, [*sinks.values()]))

    def settle(self) -> dict[str, list[list[Any]]]:
        """The same of all requests, and wait for it; by request, as ``Owed.told`` has it.

        Raises:
            RuntimeError: a thread that writes has ended.
        """
        found = {name: owed.told() for name, owed in self.ask(self._sinks).items()}
        return {name: told for name, told in found.items() if told}
