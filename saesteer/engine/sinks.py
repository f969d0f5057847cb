"""Files that the front end has made, as a worker on its machine knows them. Another process writes them (filer.py)."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from saesteer.engine.filer import Span
from saesteer.engine.readouts import Reading

SPOOLS = "spools"  # next to a plan, as ``address`` makes it


def address(spools: Iterable[Sequence[Any]]) -> list[Any]:
    """How a worker finds files: it must run on this machine.

    Args:
        spools: number of a readout, path of its file, byte of its first row, and rows that it has room for.
    """
    return [platform.node(), [*spools]]


class Sink:
    """A file that takes the rows of one readout of one request.

    Args:
        path: of the file.
        start: byte of its first row.
        rows: that it has room for: steps behind an answer's last token bring more.
        windows: the positions whose rows it has, one behind the other.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str, start: int, rows: int, windows: Sequence[Span]) -> None:
        if not os.access(path, os.W_OK):
            raise OSError(f"{path} cannot be written")
        self.path = path
        self.name = path, start, rows, windows  # as the process that writes it takes it
        self.spans: list[Span] = []  # positions that are written, and have not been sent on
        self.failed = False  # some could not be written


class Sinks:
    """The files of the requests that a worker has."""

    def __init__(self) -> None:
        self._known: dict[str, list[Sequence[Any]]] = {}  # by request, as in its address, until it first reads
        self._open: dict[str, dict[int, Sink]] = {}
        # By path. A request that was preempted has those again that somebody still holds.
        self._alive: WeakValueDictionary[str, Sink] = WeakValueDictionary()

    def add(self, request: str, found: Sequence[Any] | None) -> None:
        """Remember the address of a request's files, if this is their machine."""
        if found is not None and found[0] == platform.node():
            self._known[request] = found[1]

    def of(self, request: str, readings: Sequence[Reading | None]) -> Mapping[int, Sink]:
        """By number of the readout; rows of one whose file cannot be written travel to the front end."""
        for number, path, start, rows in self._known.pop(request, ()):
            if (reading := readings[number]) is None:  # another stage of a pipeline has it
                continue
            try:
                sink = self._alive.get(path)
                if sink is None:
                    sink = self._alive[path] = Sink(path, start, rows, reading.windows)
            except OSError:  # the request may have ended
                continue
            self._open.setdefault(request, {})[number] = sink
        return self._open.get(request, {})

    def all(self) -> Mapping[str, Mapping[int, Sink]]:
        """Those of requests that have read, by request."""
        return dict(self._open)

    def forget(self, request: str) -> None:
        """The request has ended; what waits is still written."""
        self._known.pop(request, None)
        self._open.pop(request, None)
