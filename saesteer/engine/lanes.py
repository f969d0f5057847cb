"""Which rows of a step the readouts of a batch get. Knows positions and where sites are captured, and no tensor.

Most requests decode one token more in each step. What they read then follows from a few arrays with an element for
each readout, so a step takes the host hardly longer for many requests than for one. Tokens of prompts and guesses are
looked at request by request.
"""

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.brought import Part
from saesteer.engine.filer import Span
from saesteer.engine.readouts import Reading
from saesteer.engine.shares import ROWS, File, Names, Read, computed
from saesteer.engine.sinks import Sink
from saesteer.engine.writer import Filing
from saesteer.planning.plan import END

_Ints = NDArray[np.int64]
Where = Callable[[tuple[str, ...], bool], tuple[int | None, _Ints]]  # as Captures has it
# The tokens of a request in a step, in pieces that are read apart: the first of each, and how many.
Pieces = Callable[[str, int], Iterable[tuple[int, int]]]


def whole(_: str, tokens: int) -> Iterable[tuple[int, int]]:
    """All tokens of a request are read together."""
    return [(0, tokens)]


class Lane:
    """One readout of a request.

    Args:
        part: the readout.
        place: of its sites: a bank, and the first row of each in it.
        sink: the file of its rows, which are as they are captured; None: it has none.
    """

    def __init__(self, part: Part, place: tuple[int | None, _Ints], sink: Sink | None) -> None:
        reading = part.reading
        self.part, self.sink = part, sink
        self.bank, self.planes = place
        # Rows that are made of a position. All sites of a probe become one.
        self.each = 1 if reading.kind == "probe" else len(self.planes)
        self.named = sink is None and reading.source is not None and len(self.planes) == 1
        # Lanes with the same are computed together.
        self.key = self.bank, len(self.planes), sink is not None, reading.reduce == "none", *computed(reading)
        self.lo = self.hi = 0  # positions from lo up to hi are read

    def seek(self, position: int) -> None:
        """Set the window to that of a position, or to the next one; to none where there is none."""
        windows = [(0, END)] if self.part.reading.last else self.part.reading.windows  # whatever is the last
        self.lo, self.hi = next((one for one in windows if position < one[1]), (END, END))


_Several = tuple[int, int, int, int]  # tokens of a lane's request: number of the lane, first, position, and how many


class _Group:
    """Lanes of a batch that are computed together.

    Args:
        lanes: all of them.
        places: of their requests in the batch, ascending.
    """

    def __init__(self, lanes: Sequence[Lane], places: Sequence[int]) -> None:
        self._lanes, self._places = lanes, np.array(places, dtype=np.int64)
        self._bank, self._each = lanes[0].bank, lanes[0].each
        self._filed = lanes[0].sink is not None  # all of them, or none
        self._whose: list[Any] = [lane.sink if self._filed else lane.part for lane in lanes]
        self._planes: _Ints = np.array([lane.planes for lane in lanes], dtype=np.int64)  # [lanes, sites]
        self._ones: _Ints = np.ones(len(lanes), dtype=np.int64)
        self._names = Names([lane.part.reading for lane in lanes]) if lanes[0].named else None
        self._several = len({*places}) < len(places)  # whether a request has several lanes
        # Of a step of single tokens that all lanes read: its rows, and where the first lane is in such steps behind it.
        self._chosen: Read | _Ints = self._ones
        self._same = range(0)
        self._look()

    def _look(self) -> None:
        self._lo, self._hi = np.array([(lane.lo, lane.hi) for lane in self._lanes], dtype=np.int64).T

    def step(
        self, first: NDArray[Any], end: NDArray[Any], positions: NDArray[Any], pieces: Pieces, *, single: bool
    ) -> list[Read | File]:
        """What is read of a step; arguments as for ``Lanes.step``."""
        position = positions.take(self._places)
        here = int(position[0])
        if single and here in self._same:  # the usual step
            return [self._all(self._chosen, position)]
        self._same = range(0)
        at = self._places if single else first.take(self._places)
        tokens = self._ones if single else end.take(self._places) - at
        alone = tokens == 1
        over = np.flatnonzero(alone & (position >= self._hi)).tolist()  # a window has ended, or none was looked for
        for number in over:
            self._lanes[number].seek(int(position[number]))
        if over:
            self._look()
        reads = alone & (position >= self._lo) & (position < self._hi)
        if reads.all() and (self._filed or self._planes.size <= ROWS):
            chosen = _rows(self._planes, at)
            found: Read | _Ints = chosen
            if not self._filed:
                found = self._read(chosen, range(len(position)), (), [self._each] * len(position))
            if single:
                self._chosen, self._same = found, range(here, here + int((self._hi - position).min()))
            return [self._all(found, position)]
        one = np.flatnonzero(reads)
        others = [] if single else np.flatnonzero(~alone).tolist()
        several = [(n, int(at[n]), int(position[n]), int(tokens[n])) for n in others]
        chosen = _rows(self._planes.take(one, axis=0), at.take(one))
        made = self._files if self._filed else self._reads
        return [*made(one, chosen, position.take(one), several, pieces)]

    def _all(self, chosen: Read | _Ints, position: NDArray[Any]) -> Read | File:
        if isinstance(chosen, Read):
            return chosen._replace(spans=_singles(position))
        return File(self._bank, chosen, Filing(self._whose, position, self._ones))

    def _read(
        self,
        chosen: _Ints,
        lanes: Sequence[int],
        spans: Sequence[list[Span]],
        rows: Sequence[int],
        *,
        reduced: bool = False,
    ) -> Read:
        """Rows of lanes, by their numbers; each row once."""
        parts, names = [self._whose[number] for number in lanes], self._names
        if names is None:
            return Read(self._bank, chosen, parts, spans, rows, reduced)
        order = None
        if self._several:
            once, order = np.unique(chosen, return_inverse=True)
            chosen, order = (chosen, None) if len(once) == len(chosen) else (once, order)
        widths = [names.widths[number] for number in lanes]
        return Read(
            self._bank, chosen, parts, spans, rows, False, names, widths, order, names.picks(lanes, rows, order)
        )

    def _reads(
        self, one: _Ints, chosen: _Ints, position: NDArray[Any], several: Sequence[_Several], pieces: Pieces
    ) -> Iterator[Read]:
        each, wide = self._each, self._planes.shape[1]
        most = max(1, ROWS // wide)  # tokens at once
        spans = _singles(position)
        for start in range(0, len(one), most):
            some = slice(start, start + most)
            lanes = one[some].tolist()
            yield self._read(chosen[start * wide :][: len(lanes) * wide], lanes, spans[some], [each] * len(lanes))
        where: list[list[Span]] = []  # of what is not in a Read yet
        rows: list[_Ints] = []
        made: list[int] = []
        lanes, held = [], 0  # and its distinct rows
        for _, own in groupby(several, itemgetter(1)):
            request = sorted(own, key=lambda one: tuple(self._planes[one[0]].tolist()))  # whose rows are the same
            name, tokens = self._whose[request[0][0]].name, request[0][3]
            for ahead, length, ends in _cut(pieces(name, tokens), most):
                before, counted = None, 0
                for number, at, here, _ in request:
                    reading, planes = self._whose[number].reading, self._planes[number]
                    fresh = self._names is None or before is None or not np.array_equal(planes, before)
                    before, counted = planes, 0 if fresh else counted
                    if fresh and held >= ROWS:
                        yield self._read(np.concatenate(rows), lanes, where, made)
                        lanes, where, made, rows, held = [], [], [], [], 0
                    for those in () if reading.last and not ends else reading.parts(here + ahead, length):
                        there = np.concatenate([np.arange(lo, hi) for lo, hi in those]) + (at - here)
                        mine = _rows(planes, there)
                        if reading.reduce != "none":  # each by itself
                            yield self._read(mine, [number], [those], [1], reduced=True)
                            continue
                        held += max(0, len(mine) - counted)
                        counted = max(len(mine), counted)
                        rows.append(mine)
                        lanes.append(number)
                        where.append(those)
                        made.append(each * len(there))
        if rows:
            yield self._read(np.concatenate(rows), lanes, where, made)

    def _files(
        self, one: _Ints, chosen: _Ints, position: NDArray[Any], several: Sequence[_Several], _: Pieces
    ) -> Iterator[File]:
        rows = [chosen]
        filed = [*zip(one.tolist(), position.tolist(), repeat(1))]  # lane, first position, and how many
        for number, at, here, tokens in several:
            for lo, hi in self._lanes[number].part.reading.spans(here, tokens):
                rows.append(_rows(self._planes[number], np.arange(lo, hi) + (at - here)))
                filed.append((number, lo, hi - lo))
        if filed:
            lanes, *numbers = np.array(filed, dtype=np.int64).T
            sinks = [self._whose[number] for number in lanes.tolist()]
            yield File(self._bank, np.concatenate(rows), Filing(sinks, *numbers))


def _cut(pieces: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int, bool]]:
    """Pieces of tokens, of which none is longer than so many, and whether each ends one of those given."""
    for first, length in pieces:
        for start in range(first, first + length, most):
            left = first + length - start
            yield start, min(most, left), left <= most


def _rows(planes: _Ints, tokens: NDArray[Any]) -> _Ints:
    """Rows of a bank, those of a token side by side; the planes are [sites], or [tokens, sites]."""
    found: _Ints = (planes + tokens[:, None]).ravel()
    return found


def _singles(positions: NDArray[Any]) -> list[list[Span]]:
    """Positions that are read one by one, as spans."""
    return [[(at, at + 1)] for at in positions.tolist()]


class Lanes:
    """The requests of a worker that read, and those of its last batch."""

    def __init__(self) -> None:
        self._known: dict[str, list[Lane]] = {}
        self._groups: Sequence[_Group] = ()
        self.sinks: Mapping[str, Mapping[int, Sink]] = {}  # of the batch

    @property
    def known(self) -> KeysView[str]:
        """The requests that are remembered."""
        return self._known.keys()

    def add(self, request: str, readings: Sequence[Reading | None], sinks: Mapping[int, Sink], where: Where) -> None:
        """Remember a request.

        Args:
            request: its id.
            readings: by number; None: another stage of a pipeline has it.
            sinks: of those that have files, by number.
            where: a readout's sites are.
        """
        self._known[request] = [
            Lane(Part(request, number, one), where(one.ops, one.after), sinks.get(number))
            for number, one in enumerate(readings)
            if one is not None
        ]

    def forget(self, request: str) -> None:
        """Forget a request, and the batch, which may hold its files; ``look`` comes before the next step."""
        if self._known.pop(request, None) is not None:
            self.look((), {})

    def look(self, batch: Sequence[str], sinks: Mapping[str, Mapping[int, Sink]]) -> None:
        """Remember a batch.

        Args:
            batch: its requests, whether they read or not.
            sinks: of those that have files, by number of the readout.
        """
        found: dict[Any, tuple[list[Lane], list[int]]] = {}
        for place, request in enumerate(batch):
            for lane in self._known.get(request, ()):
                lanes, places = found.setdefault(lane.key, ([], []))
                lanes.append(lane)
                places.append(place)
        self._groups, self.sinks = [_Group(*one) for one in found.values()], sinks

    def step(
        self,
        first: NDArray[Any],
        end: NDArray[Any],
        positions: NDArray[Any],
        pieces: Pieces = whole,
        *,
        single: bool = False,
    ) -> tuple[list[Read], list[File]]:
        """What is read of a step of the batch, and what goes into files.

        Args:
            first: the first token of each request in the step.
            end: the token behind its last one.
            positions: of the first ones in their requests.
            pieces: of a request with several tokens.
            single: each request of the batch has one token, so that the first is the first request's.
        """
        found = [one for group in self._groups for one in group.step(first, end, positions, pieces, single=single)]
        return [one for one in found if isinstance(one, Read)], [one for one in found if isinstance(one, File)]
