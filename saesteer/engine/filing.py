"""Which rows of a step go into files: the requests of a batch that read by handle. Knows positions, and no tensor.

Most of them decode one token more in each step. What they read then follows from a few arrays with an element for each
file, so a step takes the host no longer for many requests than for one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.readouts import Reading
from saesteer.engine.spool import Rows, Sink
from saesteer.planning.plan import END

_Ints = NDArray[np.int64]
Where = Callable[[tuple[str, ...], bool], tuple[int | None, _Ints]]  # as Captures has it


class Lane:
    """One readout of a request, and its file.

    Args:
        reading: of the request; its rows are as they are captured.
        sink: where they go.
        place: of its sites: a bank, and the first row of each in it.
    """

    def __init__(self, reading: Reading, sink: Sink, place: tuple[int | None, _Ints]) -> None:
        self.reading, self.sink = reading, sink
        self.bank, self.planes = place
        # Of the positions from lo up to hi, one after the other, each is the file's row of that number less `base`.
        self.lo = self.hi = self.base = 0

    def seek(self, position: int) -> None:
        """Set the window to that of a position, or to the next one; to none where there is none with room."""
        before = 0
        for lo, hi in self.reading.windows:
            self.lo, self.base = lo, lo - before
            self.hi = min(hi, self.base + self.sink.rows)
            if position < self.hi:
                return
            before += hi - lo
        self.lo = self.hi = END

    def parts(self, position: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Of a step's tokens those that are read and have room: the first position, its row, and how many follow."""
        for lo, hi in self.reading.spans(position, tokens):
            self.seek(lo)
            if self.lo <= lo < self.hi:
                yield lo, lo - self.base, min(hi, self.hi) - lo
        self.seek(position)  # if tokens behind it were guesses that do not hold, they come once more


class Step(NamedTuple):
    """Rows of a step that are gathered together, and whose they are, one file behind the other."""

    bank: int | None  # None: what lm_head multiplies
    chosen: _Ints  # rows of the bank, those of a position side by side
    sinks: Sequence[Sink]
    first: _Ints  # by file, its row of the first one
    positions: _Ints  # by file, of the first one
    lengths: _Ints  # by file, how many positions follow one another

    def rows(self, data: memoryview) -> Rows:
        """These rows, once they are gathered."""
        return Rows(self.sinks, self.first.tolist(), self.positions.tolist(), self.lengths.tolist(), data)


class _Group:
    """Lanes of one bank with as many sites each.

    Args:
        lanes: of these requests.
        places: of their requests in the batch.
    """

    def __init__(self, lanes: Sequence[Lane], places: Sequence[int]) -> None:
        self._lanes, self._sinks = lanes, [lane.sink for lane in lanes]
        self._places: _Ints = np.array(places, dtype=np.int64)
        self._planes: _Ints = np.concatenate([lane.planes for lane in lanes]).reshape(len(lanes), -1)
        self._ones: _Ints = np.ones(len(lanes), dtype=np.int64)
        self._look()

    def _look(self) -> None:
        lanes = self._lanes
        self._lo, self._hi = np.array([lane.lo for lane in lanes]), np.array([lane.hi for lane in lanes])
        self._base = np.array([lane.base for lane in lanes])

    def step(self, starts: NDArray[Any], positions: NDArray[Any]) -> Step | None:
        """What is read of a step; arguments as for ``Filing.step``."""
        places, bank = self._places, self._lanes[0].bank
        at, tokens, position = starts[places], starts[places + 1] - starts[places], positions[places]
        alone = tokens == 1
        over = alone & (position >= self._hi)  # where a window has ended, or none was looked for
        if over.any():
            for number in np.flatnonzero(over).tolist():
                self._lanes[number].seek(int(position[number]))
            self._look()
        reads = alone & (position >= self._lo) & (position < self._hi)
        first = position - self._base
        if reads.all():
            return Step(bank, (self._planes + at[:, None]).ravel(), self._sinks, first, position, self._ones)
        one = np.flatnonzero(reads)
        chosen = [(self._planes[one] + at[one, None]).ravel()]
        found = [[*one.tolist()], first[one].tolist(), position[one].tolist(), [1] * len(one)]
        if not alone.all():
            for number in np.flatnonzero(~alone).tolist():
                here = int(position[number])
                for lo, row, length in self._lanes[number].parts(here, int(tokens[number])):
                    ahead = np.arange(lo - here, lo - here + length) + at[number]
                    chosen.append((self._planes[number] + ahead[:, None]).ravel())
                    for numbers, new in zip(found, (number, row, lo, length), strict=True):
                        numbers.append(new)
            self._look()
        numbers, *others = found
        if not numbers:
            return None
        sinks = [self._sinks[number] for number in numbers]
        return Step(bank, np.concatenate(chosen), sinks, *(np.array(one, dtype=np.int64) for one in others))


class Filing:
    """The requests of a worker that have files, and those of its last batch."""

    def __init__(self) -> None:
        self._lanes: dict[str, Sequence[Lane]] = {}
        self._groups: Sequence[_Group] = ()
        self.sinks: Mapping[str, Mapping[int, Sink]] = {}  # of the batch

    def add(self, request: str, readings: Sequence[Reading | None], sinks: Mapping[int, Sink], where: Where) -> None:
        """Remember a request.

        Args:
            request: its id.
            readings: by number; None: another stage of a pipeline has it.
            sinks: by number of the readout.
            where: a readout's sites are.
        """
        here = ((readings[number], sink) for number, sink in sinks.items())
        self._lanes[request] = [Lane(one, sink, where(one.ops, one.after)) for one, sink in here if one is not None]

    def forget(self, request: str) -> None:
        """Forget a request, and the batch, which may hold its files; ``look`` comes before the next step."""
        if self._lanes.pop(request, None) is not None:
            self.look((), {})

    def look(self, batch: Iterable[tuple[int, str]], sinks: Mapping[str, Mapping[int, Sink]]) -> None:
        """Remember a batch.

        Args:
            batch: places and names of its requests that read.
            sinks: of those that have files.
        """
        found: dict[tuple[int | None, int], tuple[list[Lane], list[int]]] = {}
        for at, name in batch:
            for lane in self._lanes.get(name, ()):
                lanes, places = found.setdefault((lane.bank, len(lane.planes)), ([], []))
                lanes.append(lane)
                places.append(at)
        self._groups, self.sinks = [_Group(*group) for group in found.values()], sinks

    def step(self, starts: NDArray[Any], positions: NDArray[Any]) -> list[Step]:
        """What is read of a step of the batch.

        Args:
            starts: the first token of each request in the step, then the number of tokens.
            positions: of these tokens in their requests.
        """
        found = (group.step(starts, positions) for group in self._groups)
        return [one for one in found if one is not None]
