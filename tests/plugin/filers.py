"""Files that a worker writes rows into, and what stands in for its device."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from saesteer.engine.sinks import Sink
from saesteer.engine.writer import Filing, Writer
from saesteer.planning.plan import END

ONES = np.ones(8, dtype=np.int64)  # as many files as a step has at most


def children() -> set[int]:
    """Processes that this thread has begun and that have not ended."""
    return {int(one) for one in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


def soon(done: Callable[[], bool]) -> None:
    """Wait until this is so, for a while."""
    end = time.monotonic() + 15
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


def sinks_in(folder: Path, names: str, rows: int) -> list[Sink]:
    """Empty files."""
    for name in names:
        (folder / name).touch()
    return [Sink(str(folder / name), 0, rows, [(0, END)]) for name in names]


def filing(sinks: Sequence[Sink], rows: list[int]) -> Filing:
    """A row of each, at the position of its number."""
    return Filing(sinks, np.array(rows), ONES[: len(rows)])


def positions(writer: Writer, sinks: Sequence[Sink]) -> list[list[tuple[int, int]]]:
    """Wait until all rows are written; the positions of each file's new ones."""
    writer.wait(writer.put_so_far)
    found = dict(writer.take_spans(dict(enumerate(sinks))))
    return [[*map(tuple, found.get(number, []))] for number in range(len(sinks))]


class Device:
    """Brings rows to the host, which land when a test says so."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.copies = writer, 0

    def bring(self, where: Filing, data: bytes, *, lands: bool = True) -> None:
        """The rows of a step."""
        at = self.writer.take(len(data))
        self.writer.ring.at(at, len(data)).numpy()[:] = np.frombuffer(data, np.uint8)
        self.copies += 1
        self.writer.put(self.copies, [(where, at, at + len(data))])
        if lands:
            self.land(self.copies)

    def land(self, copies: int) -> None:
        """So many have."""
        self.writer.ring.landed[0] = copies
