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
        # Lanes with the same are computed together.
        self.key = self.bank, len(self.planes), sink is not None, reading.reduce == "none", *computed(reading)
        # Positions from lo up to hi are read; one after the other, each is the file's row of that number less `base`.
        self.lo = self.hi = self.base = 0

    def seek(self, position: int) -> None:
        """Set the window to that of a position, or to the next one; to none where there is none with room."""
        if self.part.reading.last:  # whatever is the last
            self.lo, self.hi = 0, END
            return
        before = 0
        for lo, hi in self.part.reading.windows:
            self.lo, self.base = lo, lo - before
            self.hi = hi if self.sink is None else min(hi, self.base + self.sink.rows)
            if position < self.hi:
                return
            before += hi - lo
        self.lo = self.hi = END

    def filed(self, position: int, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Of a step's tokens those that have room in the file: the first position, its row, and how many follow."""
        for lo, hi in self.part.reading.spans(position, tokens):
            self.seek(lo)
            if self.lo <= lo < self.hi:
                yield lo, lo - self.base, min(hi, self.hi) - lo


_Several = tuple[int, int, int, int]  # tokens of a lane's request: number of the lane, first, position, and how many


class _Kind:
    """Lanes that are computed together, whoever of them is in a batch: what is known of each stands at its seat.

    Args:
        lane: one of them.
        number: of the kind.
    """

    def __init__(self, lane: Lane, number: int) -> None:
        self.number, self.bank, self.each, self.key = number, lane.bank, lane.each, lane.key
        self.filed = lane.sink is not None  # all of them, or none
        self.named = not self.filed and lane.part.reading.source is not None and len(lane.planes) == 1
        self.lanes: dict[int, Lane] = {}  # by seat
        self._left: list[int] = []  # seats that somebody has left
        self.planes: _Ints = np.zeros((1, len(lane.planes)), dtype=np.int64)
        self.lo, self.hi, self.base = (np.zeros(1, dtype=np.int64) for _ in range(3))  # as a lane has them
        self.whose = np.empty(1, dtype=object)  # the file, or the readout if there are no files

    def seat(self, lane: Lane) -> int:
        """Give a lane a seat."""
        number = self._left.pop() if self._left else len(self.lanes)
        if number == len(self.planes):
            for name in ("planes", "lo", "hi", "base", "whose"):
                setattr(self, name, np.concatenate([getattr(self, name)] * 2))
        self.lanes[number] = lane
        self.planes[number] = lane.planes
        self._show(number)
        self.whose[number] = lane.sink if self.filed else lane.part
        return number

    def leave(self, seat: int) -> None:
        """Take a lane its seat, which another may get."""
        del self.lanes[seat]
        self.whose[seat] = None
        self._left.append(seat)

    def seek(self, seat: int, position: int) -> None:
        """Set a lane's window, as ``Lane.seek``."""
        self.lanes[seat].seek(position)
        self._show(seat)

    def _show(self, seat: int) -> None:
        lane = self.lanes[seat]
        self.lo[seat], self.hi[seat], self.base[seat] = lane.lo, lane.hi, lane.base


class _Group:
    """Lanes of a batch that are computed together.

    Args:
        kind: of all.
        seats: of each.
        places: of their requests in the batch, ascending.
    """

    def __init__(self, kind: _Kind, seats: _Ints, places: _Ints) -> None:
        self._kind, self._bank = kind, kind.bank
        self._seats, self._places = seats, places
        self._whose: list[Any] = kind.whose.take(seats).tolist()
        self._ones: _Ints = np.ones(len(seats), dtype=np.int64)
        self._planes: _Ints = kind.planes.take(seats, axis=0)
        self._names = Names([part.reading for part in self._whose]) if kind.named else None
        self._several = bool((places[1:] == places[:-1]).any())  # whether a request has several lanes
        # Of a step of single tokens that all lanes read: its rows, and where the first lane is in such steps behind it.
        self._chosen: Read | _Ints = seats
        self._same = range(0)
        self._look()

    def _look(self) -> None:
        kind, seats = self._kind, self._seats
        self._lo, self._hi, self._base = kind.lo.take(seats), kind.hi.take(seats), kind.base.take(seats)

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
        reads = alone & (position >= self._lo) & (position < self._hi)
        if not reads.all():
            over = np.flatnonzero(alone & (position >= self._hi))  # where a window has ended, or none was looked for
            for number in over.tolist():
                self._kind.seek(int(self._seats[number]), int(position[number]))
            if len(over):
                self._look()
                reads = alone & (position >= self._lo) & (position < self._hi)
        if reads.all() and (self._kind.filed or self._planes.size <= ROWS):
            chosen = _rows(self._planes, at)
            found: Read | _Ints = chosen
            if not self._kind.filed:
                found = self._read(chosen, range(len(position)), (), [self._kind.each] * len(position))
            if single:
                self._chosen, self._same = found, range(here, here + int((self._hi - position).min()))
            return [self._all(found, position)]
        one = np.flatnonzero(reads)
        others = [] if single else np.flatnonzero(~alone).tolist()
        several = [(n, int(at[n]), int(position[n]), int(tokens[n])) for n in others]
        chosen = _rows(self._planes.take(one, axis=0), at.take(one))
        made = self._files if self._kind.filed else self._reads
        return [*made(one, chosen, position.take(one), several, pieces)]

    def _all(self, chosen: Read | _Ints, position: NDArray[Any]) -> Read | File:
        if isinstance(chosen, Read):
            return chosen._replace(spans=_singles(position))
        return File(self._bank, chosen, Filing(self._whose, position - self._base, position, self._ones))

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
        each, wide = self._kind.each, self._planes.shape[1]
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
        more: list[tuple[int, int, int, int]] = []  # lane, row of the file, position, and how many
        for number, at, here, tokens in several:
            seat = int(self._seats[number])
            for lo, row, length in self._kind.lanes[seat].filed(here, tokens):
                rows.append(_rows(self._planes[number], np.arange(lo, lo + length) + (at - here)))
                more.append((number, row, lo, length))
            self._kind.seek(seat, here)  # of guesses that do not hold, tokens come once more
        filed = one, position - self._base.take(one), position, self._ones[: len(one)]
        if several:
            self._look()
        if more:
            filed = tuple(np.concatenate(both) for both in zip(filed, np.array(more).T, strict=True))
        if len(filed[0]):
            lanes, *numbers = filed
            sinks = [self._whose[number] for number in lanes.tolist()]
            yield File(self._bank, np.concatenate(rows) if more else chosen, Filing(sinks, *numbers))


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
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._numbered: list[_Kind | None] = []  # the same by number
        self._known: dict[str, int] = {}  # of each request a line of the table
        self._left: list[int] = []  # lines that somebody has left
        # [requests, lanes, 2]: of each lane its kind and its seat there, or -1 twice; line 0 is of all who read nothing
        self._table: _Ints = np.full((1, 1, 2), -1, dtype=np.int64)
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
        seats: list[tuple[int, int]] = []
        for number, one in enumerate(readings):
            if one is not None:
                lane = Lane(Part(request, number, one), where(one.ops, one.after), sinks.get(number))
                kind = self._kinds.get(lane.key) or self._new(lane)
                seats.append((kind.number, kind.seat(lane)))
        line = self._left.pop() if self._left else len(self._known) + 1
        lines, lanes, _ = self._table.shape
        if line >= lines or len(seats) > lanes:
            more = (0, lines if line >= lines else 0), (0, max(0, len(seats) - lanes)), (0, 0)
            self._table = np.pad(self._table, more, constant_values=-1)
        self._table[line, : len(seats)] = seats or -1
        self._known[request] = line

    def _new(self, lane: Lane) -> _Kind:
        free = next((number for number, kind in enumerate(self._numbered) if kind is None), len(self._numbered))
        kind = self._kinds[lane.key] = _Kind(lane, free)
        self._numbered[free : free + 1] = [kind]
        return kind

    def forget(self, request: str) -> None:
        """Forget a request, and the batch, which may hold its files; ``look`` comes before the next step."""
        line = self._known.pop(request, None)
        if line is not None:
            self.look((), {})
            for number, seat in self._table[line].tolist():
                kind = self._numbered[number] if number >= 0 else None
                if kind is not None:
                    kind.leave(seat)
                    if not kind.lanes:  # there are as many kinds as lists of features that requests may name
                        del self._kinds[kind.key]
                        self._numbered[number] = None
            widest = self._table[line, -1, 0] >= 0
            self._table[line] = -1
            self._left.append(line)
            if widest:  # batches without it need not look at as many lanes
                used = int((self._table[:, :, 0] >= 0).any(axis=0).sum())
                self._table = self._table[:, : max(1, used)].copy()

    def look(self, batch: Sequence[str], sinks: Mapping[str, Mapping[int, Sink]]) -> None:
        """Remember a batch.

        Args:
            batch: its requests, whether they read or not.
            sinks: of those that have files, by number of the readout.
        """
        lines = np.fromiter(map(self._known.get, batch, repeat(0)), dtype=np.int64, count=len(batch))
        found = self._table.take(lines, axis=0)
        places, lanes = (found[:, :, 0] >= 0).nonzero()
        kinds, seats = found[places, lanes].T
        order = kinds.argsort(kind="stable")
        groups = []
        for own in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1) if len(order) else ():
            kind = self._numbered[int(kinds[own[0]])]
            assert kind is not None
            groups.append(_Group(kind, seats[own], places[own]))
        self._groups, self.sinks = groups, sinks

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
