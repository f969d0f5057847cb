"""What writes rows into files, as threads of a test's process: there it can be held up and watched. And a device."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saesteer.engine.filer import Filer
from saesteer.engine.sinks import Sink
from saesteer.engine.spool import Filing, Writer

PUT = "saesteer.engine.filer.put"
ONES = np.ones(8, dtype=np.int64)  # as many files as a step has at most


class Thread(threading.Thread):
    """In place of the process: it ends as that does."""

    def __init__(self, connection: int, memory: int) -> None:
        super().__init__(daemon=True)
        self._broken = False
        self._connection = Connection(connection)
        self._other = socket.socket(fileno=os.dup(connection))
        self.filer = Filer(self._connection, memoryview(mmap(memory, 0)), self._begin)

    def _begin(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self._do, args=[work], daemon=True).start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001  # the process would end
            self._broken = True
            self._other.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        self._do(self.filer.run)
        self._connection.close()
        self._other.close()

    def wait(self, timeout: float) -> None:
        if not self._broken:
            self.join(timeout)


def in_this_process(patch: pytest.MonkeyPatch) -> list[Filer]:
    """Have threads of this process write; those that have begun."""
    begun: list[Filer] = []

    def begin(*given: int) -> Any:
        thread = Thread(*given)
        begun.append(thread.filer)
        thread.start()
        return thread

    patch.setattr("saesteer.engine.spool.begin", begin)
    return begun


def path_of(file: int) -> str:
    """Of an open file: what ``put`` is called with."""
    return os.readlink(f"/proc/self/fd/{file}")


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
    return [Sink(str(folder / name), 0, rows) for name in names]


def filing(sinks: Sequence[Sink], rows: list[int]) -> Filing:
    """A row of each, at the position of its number."""
    return Filing(sinks, np.array(rows), np.array(rows), ONES[: len(rows)])


class Device:
    """Brings rows home, which land when a test says so."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.copies = writer, 0

    def bring(self, where: Filing, data: bytes, *, lands: bool = True) -> None:
        """The rows of a step."""
        at = self.writer.take(len(data))
        self.writer.shared.at(at, len(data)).numpy()[:] = np.frombuffer(data, np.uint8)
        self.copies += 1
        self.writer.put(self.copies, at, at + len(data), [(where, at, at + len(data))])
        if lands:
            self.land(self.copies)

    def land(self, copies: int) -> None:
        """So many have."""
        self.writer.shared.landed[0] = max(copies, self.landed)

    @property
    def landed(self) -> int:
        return int(self.writer.shared.landed[0])
