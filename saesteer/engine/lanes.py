"""Which rows of a step the readouts of a batch get. Knows positions and where sites are captured, and no tensor.

Most requests decode one token more in each step. What they read then follows from a few arrays with an element for
each readout, so a step takes the host hardly longer for many requests than for one. Tokens of prompts and guesses are
looked at request by request.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.brought import Part
from saesteer.engine.readouts import Reading, Span
from saesteer.engine.sinks import Sink
from saesteer.engine.spool import Filing
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
        self.key = self.bank, len(self.planes), sink is not None, reading.reduce == "none", *_computed(reading)
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


def _computed(reading: Reading) -> tuple[Any, ...]:
    """Equal for readouts that one computation serves."""
    if reading.kind == "features":
        return 2, id(reading.source), reading.top_k, reading.named
    return (1, id(reading.source)) if reading.kind == "probe" else (0,)


class Read(NamedTuple):
    """Rows of a step of which something is made together, and whose that is, one part behind the other."""

    bank: int | None  # None: what lm_head multiplies
    chosen: _Ints  # rows of the bank, those of a position side by side
    parts: Sequence[Part]
    spans: Sequence[list[Span]]  # positions of each part
    rows: Sequence[int]  # that are made for each part
    reduced: bool = False  # whether all become one


class File(NamedTuple):
    """Rows of a step that go into files, one file behind the other."""

    bank: int | None
    chosen: _Ints  # as in Read
    filing: Filing


_Several = Sequence[int]  # tokens of a lane's request: number of the lane, first, position, and how many


class _Kind:
    """Lanes that are computed together, whoever of them is in a batch: what is known of each stands at its seat.

    Args:
        lane: one of them.
    """

    def __init__(self, lane: Lane) -> None:
        self.bank, self.each, self.key = lane.bank, lane.each, lane.key
        self.lanes: dict[int, Lane] = {}  # by seat
        self._left: list[int] = []  # seats that somebody has left
        self.planes: _Ints = np.zeros((1, len(lane.planes)), dtype=np.int64)
        self.windows: _Ints = np.zeros((1, 3), dtype=np.int64)  # lo, hi and base

    def seat(self, lane: Lane) -> int:
        """Give a lane a seat."""
        number = self._left.pop() if self._left else len(self.lanes)
        if number == len(self.planes):
            self.planes = np.concatenate([self.planes, self.planes])
            self.windows = np.concatenate([self.windows, self.windows])
        self.lanes[number] = lane
        self.planes[number] = lane.planes
        self.windows[number] = lane.lo, lane.hi, lane.base
        return number

    def leave(self, seat: int) -> None:
        """Take a lane its seat, which another may get."""
        del self.lanes[seat]
        self._left.append(seat)

    def seek(self, seat: int, position: int) -> None:
        """Set a lane's window, as ``Lane.seek``."""
        lane = self.lanes[seat]
        lane.seek(position)
        self.windows[seat] = lane.lo, lane.hi, lane.base


class _Group:
    """Lanes of a batch that are computed together.

    Args:
        kind: of all.
        lanes: of each the seat, and the place of its request in the batch.
    """

    def __init__(self, kind: _Kind, lanes: Sequence[tuple[int, int]]) -> None:
        self._kind, self._bank = kind, kind.bank
        self._seats, self._places = np.array(lanes, dtype=np.int64).T
        seated = kind.lanes
        self._lanes = [seated[seat] for seat, _ in lanes]
        self._sinks = [lane.sink for lane in self._lanes if lane.sink is not None]  # all have one, or none
        self._ones: _Ints = np.ones(len(lanes), dtype=np.int64)
        self._planes: _Ints = kind.planes[self._seats]
        self._chosen: _Ints | None = None  # of the last step, if all lanes read its only token
        self._last = range(0)  # positions of the first lane, up to which all of them do
        self._look()

    def _look(self) -> None:
        self._lo, self._hi, self._base = self._kind.windows[self._seats].T

    def step(
        self, first: NDArray[Any], end: NDArray[Any], positions: NDArray[Any], pieces: Pieces
    ) -> list[Read | File]:
        """What is read of a step; arguments as for ``Lanes.step``."""
        at, position = first[self._places], positions[self._places]
        tokens = end[self._places] - at
        alone = tokens == 1
        over = alone & (position >= self._hi)  # where a window has ended, or none was looked for
        if over.any():
            for number in np.flatnonzero(over).tolist():
                self._kind.seek(int(self._seats[number]), int(position[number]))
            self._look()
        reads = alone & (position >= self._lo) & (position < self._hi)
        self._chosen = None
        if reads.all():  # the usual step
            self._chosen, here = _rows(self._planes, at), int(position[0])
            self._last = range(here, here + int((self._hi - position).min()))
            return [self._singly(self._chosen, position)]
        one, others = np.flatnonzero(reads), np.flatnonzero(~alone)
        several = np.stack([others, at[others], position[others], tokens[others]], axis=1).tolist()
        chosen = _rows(self._planes[one], at[one])
        if self._sinks:
            return [*self._files(one, chosen, position[one], several)]
        return [*self._reads(one, chosen, position[one], several, pieces)]

    def again(self, positions: NDArray[Any]) -> Read | File | None:
        """The same of a step whose requests have one token each, as in the last one; None if ``step`` has to look."""
        position = positions[self._places]
        if self._chosen is None or int(position[0]) not in self._last:
            return None
        return self._singly(self._chosen, position)

    def _singly(self, chosen: _Ints, position: NDArray[Any]) -> Read | File:
        if self._sinks:
            return File(self._bank, chosen, Filing(self._sinks, position - self._base, position, self._ones))
        parts = [lane.part for lane in self._lanes]
        return Read(self._bank, chosen, parts, _singles(position), [self._kind.each] * len(parts))

    def _reads(
        self, one: _Ints, chosen: _Ints, position: NDArray[Any], several: Sequence[_Several], pieces: Pieces
    ) -> Iterator[Read]:
        bank, each, where = self._bank, self._kind.each, _singles(position)
        parts, made, rows = [self._lanes[number].part for number in one.tolist()], [each] * len(one), [chosen]
        for number, at, here, tokens in several:
            part = self._lanes[number].part
            for ahead, some in pieces(part.name, tokens):
                for spans in part.reading.parts(here + ahead, some):
                    there = np.concatenate([np.arange(lo, hi) for lo, hi in spans]) + (at - here)
                    own = _rows(self._planes[number], there)
                    if part.reading.reduce != "none":  # each by itself
                        yield Read(bank, own, [part], [spans], [1], True)
                        continue
                    rows.append(own)
                    parts.append(part)
                    where.append(spans)
                    made.append(each * len(there))
        if parts:
            yield Read(bank, np.concatenate(rows), parts, where, made)

    def _files(self, one: _Ints, chosen: _Ints, position: NDArray[Any], several: Sequence[_Several]) -> Iterator[File]:
        rows = [chosen]
        more: list[tuple[int, int, int, int]] = []  # lane, row of the file, position, and how many
        for number, at, here, tokens in several:
            for lo, row, length in self._lanes[number].filed(here, tokens):
                rows.append(_rows(self._planes[number], np.arange(lo, lo + length) + (at - here)))
                more.append((number, row, lo, length))
            self._kind.seek(int(self._seats[number]), here)  # of guesses that do not hold, tokens come once more
        self._look()
        if len(one) or more:
            lanes, first, there, lengths = (
                np.concatenate([these, np.array([other[n] for other in more], dtype=np.int64)])
                for n, these in enumerate((one, position - self._base[one], position, self._ones[one]))
            )
            sinks = [self._sinks[number] for number in lanes.tolist()]
            yield File(self._bank, np.concatenate(rows), Filing(sinks, first, there, lengths))


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
        self._known: dict[str, Sequence[tuple[_Kind, int]]] = {}  # of each request's lanes the kind, and the seat there
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
        seats: list[tuple[_Kind, int]] = []
        for number, one in enumerate(readings):
            if one is not None:
                lane = Lane(Part(request, number, one), where(one.ops, one.after), sinks.get(number))
                kind = self._kinds.get(lane.key)
                if kind is None:
                    kind = self._kinds[lane.key] = _Kind(lane)
                seats.append((kind, kind.seat(lane)))
        self._known[request] = seats

    def forget(self, request: str) -> None:
        """Forget a request, and the batch, which may hold its files; ``look`` comes before the next step."""
        known = self._known.pop(request, None)
        if known is not None:
            self.look((), {})
            for kind, seat in known:
                kind.leave(seat)
                if not kind.lanes:  # there are as many kinds as lists of features that requests may name
                    del self._kinds[kind.key]

    def look(self, batch: Iterable[tuple[int, str]], sinks: Mapping[str, Mapping[int, Sink]]) -> None:
        """Remember a batch.

        Args:
            batch: places and names of its requests that read.
            sinks: of those that have files, by number of the readout.
        """
        found: defaultdict[_Kind, list[tuple[int, int]]] = defaultdict(list)
        for at, name in batch:
            for kind, seat in self._known[name]:
                found[kind].append((seat, at))
        self._groups, self.sinks = [_Group(kind, own) for kind, own in found.items()], sinks

    def step(
        self,
        first: NDArray[Any],
        end: NDArray[Any],
        positions: NDArray[Any],
        pieces: Pieces = whole,
        *,
        alike: bool = False,
    ) -> tuple[list[Read], list[File]]:
        """What is read of a step of the batch, and what goes into files.

        Args:
            first: the first token of each request in the step.
            end: the token behind its last one.
            positions: of the first ones in their requests.
            pieces: of a request with several tokens.
            alike: in this step and the one before, each request of the batch has one token.
        """
        reads: list[Read] = []
        files: list[File] = []
        for group in self._groups:
            usual = group.again(positions) if alike else None
            for one in group.step(first, end, positions, pieces) if usual is None else (usual,):
                if isinstance(one, Read):
                    reads.append(one)
                else:
                    files.append(one)
        return reads, files
