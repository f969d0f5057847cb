"""Writes rows to files in a process of its own, which leaves the worker its interpreter lock.

The worker (writer.py) shares a block of memory with this process. It sends over a socket

    (copies, files, steps)  once so many copies have landed in the memory, it has rows of these steps for these files

and receives for each message, in order,

    (spans, failed)         for each file the positions whose rows are written, and why files could not be written

A file that lacks rows is marked by its mode, which needs no room on a full disk. Imports neither torch nor NumPy: the
process starts in 50 ms.
"""

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection
from stat import S_IMODE
from time import sleep
from typing import Any

from saesteer.engine.private import private

LACKING = 0o400  # mode of a file that lacks rows
THREADS = 4  # one copies 11 MB into the system's memory in 5 ms, which is a step of a 4B
HELD = 8  # bytes at the memory's beginning: how many copies have landed
_LOOK = 0.0005  # seconds between two looks at them
_PIECES = 512  # that are written by one call; a system takes 1,024

Span = tuple[int, int]  # absolute positions [lo, hi)
# Of rows of a step that lie side by side, file by file: the first byte, and bytes of a row; then for each file its
# number in the message, the first position of these, and how many they are.
Step = tuple[int, int, list[int], list[int], list[int]]
Name = tuple[str, int, int, Sequence[Span]]  # of a file: path, byte of its first row, room in rows, positions of these


def join(spans: list[Span], span: Span) -> None:
    """Append positions; those behind the last ones become one span with these."""
    if spans and spans[-1][1] == span[0]:
        spans[-1] = spans[-1][0], span[1]
    else:
        spans.append(span)


class _File:
    """Rows of a message for one file."""

    def __init__(self, path: str, start: int, rows: int, windows: Sequence[Span]) -> None:
        self._path, self._start, self._room, self._windows = path, start, rows, windows
        self._runs: list[tuple[int, list[memoryview]]] = []  # bytes that belong side by side, and where they begin
        self._end = -1
        self.spans: list[Span] = []

    def add(self, position: int, rows: memoryview, stride: int) -> None:
        """Take rows, this one's and those behind it; what the file has no room for is left out."""
        row = sum(min(hi, position) - lo for lo, hi in self._windows if lo < position)
        piece = rows[: max(0, self._room - row) * stride]
        if not piece:
            return
        at = row * stride
        if at != self._end:
            self._runs.append((self._start + at, []))
        self._runs[-1][1].append(piece)
        self._end = at + len(piece)
        join(self.spans, (position, position + len(piece) // stride))

    def write(self) -> str | None:
        """Write them in their order, neighbours by one call; return why that failed. A deleted file is left alone."""
        folder, name = os.path.split(self._path)
        try:
            with private(folder) as inside:
                file = os.open(name, os.O_WRONLY, dir_fd=inside)
            try:
                for at, pieces in self._runs:
                    for first in range(0, len(pieces), _PIECES):
                        some = pieces[first : first + _PIECES]
                        put(file, at, some)
                        at += sum(map(len, some))
            finally:
                os.close(file)
        except FileNotFoundError:
            pass
        except OSError as exc:
            mark(self._path)
            return exc.strerror or type(exc).__name__
        return None


def mark(path: str) -> None:
    """Mark a file as one that lacks rows. On some file systems a mode does not last, and the file is deleted."""
    folder, name = os.path.split(path)
    try:
        with private(folder) as inside:
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


def write(
    memory: memoryview, names: Iterable[Name], steps: Iterable[Step], pool: ThreadPoolExecutor
) -> tuple[list[list[Span]], dict[int, str]]:
    """Write the rows of a message.

    Args:
        memory: that has them.
        names: of the files.
        steps: of the message.
        pool: of threads that write a file each.

    Returns:
        For each file the positions of its rows, and by number of the file why it could not be written.
    """
    files = [_File(*name) for name in names]
    for at, stride, *numbers in steps:
        for file, position, length in zip(*numbers, strict=True):
            end = at + length * stride
            files[file].add(position, memory[at:end], stride)
            at = end
    failed = {number: why for number, why in enumerate(pool.map(_File.write, files)) if why is not None}
    return [file.spans for file in files], failed


def run(connection: Connection, memory: memoryview, worker: int) -> None:
    """Write what the worker, the process of this number, sends until it has ended."""
    landed = memory[:HELD].cast("q")
    with ThreadPoolExecutor(THREADS) as pool, suppress(EOFError):
        while True:
            copies, files, steps = connection.recv()
            while landed[0] < copies:
                if os.getppid() != worker:
                    return
                sleep(_LOOK)
            written = write(memory, files, steps, pool)
            with suppress(OSError):  # a worker that has ended takes no answer, but has its rows written
                connection.send(written)


if __name__ == "__main__":
    # The worker ends for these, perhaps once its requests have; then this ends.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    connection, memory, worker = map(int, sys.argv[1:])
    run(Connection(connection), memoryview(mmap(memory, 0)), worker)
