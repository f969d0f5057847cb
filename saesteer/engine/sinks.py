"""Files that the front end has made, as a worker on its machine has them open. Knows bytes and no tensor's meaning.

A file that lacks rows is marked by its mode, which needs no room on a disk that is full, and outlives the file's
holders here.
"""

import logging
import os
import platform
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from saesteer.config.config import KEY
from saesteer.engine.readouts import Span

logger = logging.getLogger("vllm.saesteer")

SPOOLS = f"{KEY}_spools"  # next to a plan in extra_args, as ``address`` makes it
LACKING = 0o400  # mode of a file that lacks rows
_PIECES = 512  # that are written by one call; a system takes 1,024


def address(spools: Iterable[Sequence[Any]]) -> list[Any]:
    """How a worker finds files: it must run on this machine.

    Args:
        spools: number of a readout, path of its file, byte of its first row, and rows that it has room for.
    """
    return [platform.node(), [*spools]]


Run = tuple[int, list[Any]]  # byte of the file, and what is written from there on, piece by piece


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
        self.runs: list[Run] = []  # that wait; the Writer's, as are the next five
        self._end = -1  # byte behind the last piece
        self.dealt = self.written = 0  # how many pieces came here, and how many of them wait no longer
        self.spans: list[Span] = []  # positions of rows that are here, and of which nobody has been told
        self.busy = False  # somebody writes some now
        weakref.finalize(self, os.close, self.file).atexit = False  # where a thread may still write to it

    def add(self, first: int, end: int, pieces: list[Any], span: Span) -> None:
        """Take rows that wait to be written. It is called for each file, while a step needs the interpreter.

        Args:
            first: byte of the file where they belong.
            end: the byte behind them.
            pieces: the list is the file's from now on.
            span: their positions.
        """
        if self.runs and first == self._end:
            self.runs[-1][1].extend(pieces)
        else:
            self.runs.append((first, pieces))
        self._end = end
        self.dealt += len(pieces)
        spans = self.spans
        if spans and spans[-1][1] == span[0]:
            spans[-1] = spans[-1][0], span[1]
        else:
            spans.append(span)

    def write(self, runs: Iterable[Run]) -> None:
        """Write bytes at places, neighbours by one call: between two calls a thread may wait for the interpreter."""
        if self._failed:
            return
        try:
            for at, pieces in runs:
                for first in range(0, len(pieces), _PIECES):
                    some = pieces[first : first + _PIECES]
                    put(self.file, at, some)
                    at += sum(map(len, some))
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

    def of(self, request: str) -> Mapping[int, Sink]:
        """By number of the readout; rows of one whose file cannot be opened travel to the front end."""
        for number, path, start, rows in self._known.pop(request, ()):
            try:
                sink = self._alive.get(path)
                if sink is None:
                    sink = self._alive[path] = Sink(path, start, rows)
            except OSError:  # the request may have ended
                continue
            self._open.setdefault(request, {})[number] = sink
        return self._open.get(request, {})

    def all(self) -> Mapping[str, Mapping[int, Sink]]:
        """Those that are open, by request."""
        return dict(self._open)

    def forget(self, request: str) -> None:
        """The request has ended; what waits is still written."""
        self._known.pop(request, None)
        self._open.pop(request, None)
