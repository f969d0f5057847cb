"""What requests read of a step together: rows, whose they are, and the names that one computation serves.

Readouts of features of one dictionary, and probes of one site, are computed together, whatever each of them names: a
step takes the product of its distinct rows and of all names once, and picks each readout's numbers from it. So a
request that watches many features, or many requests that read one each, cost hardly more than one. It holds no tensor.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.brought import Part
from saesteer.engine.filer import Span
from saesteer.engine.readouts import Reading, Source
from saesteer.engine.writer import Filing

_Ints = NDArray[np.int64]
ROWS = 4096  # of which something is made at once, so that memory is bounded; more where a single position has more


def computed(reading: Reading) -> tuple[Any, ...]:
    """Equal for readouts that one computation serves."""
    source = reading.source
    if source is None:
        return (0,)
    if reading.kind == "features":
        ranked = source.encoder is not None and source.encoder.groups > 0
        return 2, id(source), reading.top_k > 0 or ranked  # whether it takes the whole encoder
    return 1, id(source) if len(reading.ops) > 1 else None  # a probe


class Names:
    """What the lanes of a batch that are computed together name: features of a dictionary, or probes of one site.

    Args:
        readings: of each lane.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.top_k = max(one.top_k for one in readings)
        self.sources: tuple[Source, ...] = ()  # of probes
        own: list[_Ints]  # of each lane, the columns of its names
        if readings[0].kind == "features":
            names = [one.named for one in readings]
            every = np.fromiter(chain.from_iterable(names), np.int64)
            self.features, columns = np.unique(every, return_inverse=True)
            if all(one == names[0] for one in names):
                self.features, columns = every[: len(names[0])], np.tile(np.arange(len(names[0])), len(names))
            own = [columns[lo:hi] for lo, hi in pairwise(accumulate(map(len, names), initial=0))]
            self.total = len(self.features)
        else:
            first: dict[Source, int] = {}
            self.total = 0
            for one in readings:
                assert one.source is not None
                if one.source not in first:
                    first[one.source], self.total = self.total, self.total + one.source.probed
            self.sources = (*first,)
            own = [first[one.source] + np.arange(one.source.probed) for one in readings if one.source is not None]
        self.widths = [len(one) for one in own]
        self._own = own
        every = np.arange(self.total)
        self._all = all(np.array_equal(one, every) for one in own)  # each lane names all there is, in order

    def picks(self, lanes: Sequence[int], rows: Sequence[int], order: _Ints | None) -> _Ints | None:
        """Where the numbers of each lane stand in [rows, names], flattened; None: they are all of it, in order.

        Args:
            lanes: by number, one behind the other.
            rows: how many each has.
            order: the row of each; None: as they come.
        """
        if order is None and self._all:
            return None
        order = np.arange(sum(rows)) if order is None else order
        if len(order) == len(lanes):
            widths = [self.widths[lane] for lane in lanes]
            picked: _Ints = np.repeat(order * self.total, widths) + np.concatenate([self._own[lane] for lane in lanes])
            return picked
        found: list[_Ints] = []
        at = 0
        for lane, count in zip(lanes, rows, strict=True):
            found.append((order[at : at + count, None] * self.total + self._own[lane]).ravel())
            at += count
        return np.concatenate(found)


class Read(NamedTuple):
    """Rows of a step of which something is made together, and whose that is, one part behind the other."""

    bank: int | None  # None: what lm_head multiplies
    chosen: _Ints  # rows of the bank, those of a position side by side
    parts: Sequence[Part]
    spans: Sequence[list[Span]]  # positions of each part
    rows: Sequence[int]  # that are made for each part
    reduced: bool = False  # whether all become one
    # Where names are computed together: all of them, for each part how many are its own, the row of ``chosen`` for each
    # of its rows where parts share rows, and as ``Names.picks``.
    names: Names | None = None
    widths: Sequence[int] | None = None
    order: _Ints | None = None
    picks: _Ints | None = None


class File(NamedTuple):
    """Rows of a step that go into files, one file behind the other."""

    bank: int | None
    chosen: _Ints  # as in Read
    filing: Filing
