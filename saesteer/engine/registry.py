"""Vectors by the digest of their numbers, and their slots at each site. Knows neither names nor requests nor a device.

A site has two pools. Vectors that a name stands for are pinned in the first pool, and stay there while any row of the
table remains that was filled when they were pinned. All other vectors lie in the second pool, which has ``inline_rows``
slots for every row of the table, so no request takes the slots of another.
"""

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from saesteer.dictionaries.vectors import numbers_of
from saesteer.engine.pool import Pool
from saesteer.engine.table import Arrow, Floats, Row
from saesteer.engine.wire import FEATURE
from saesteer.planning.digests import DIGEST
from saesteer.planning.pins import Pins, Place, no_room

KEPT = 4096  # recently pinned vectors: a request that was admitted before may still be waiting for its turn
BROUGHT = 2048  # vectors that requests brought recently: clients send one set of directions with many requests

# Site and slot → what belongs there, Arrow.unit, as wide as the site.
Written = dict[tuple[str, int], Floats]
# What a filled row protects from overwriting: all that was pinned after this change (0: nothing), and other slots.
Held = tuple[int, list[tuple[Pool, bytes]]]


class Gone(LookupError):
    """A request's vector is no longer here: its name was replaced or deleted too many changes ago."""


class Registry:
    """The vectors that plans may refer to.

    All ranks see changes and requests in the same order, so they agree on what is here.

    Args:
        named: the pools for pins, by site.
        brought: the pools for all other vectors, by site.
        inline_rows: slots of ``brought`` for each row of the table.
        written: the vectors to write before the next step; the caller that writes one removes it.
    """

    def __init__(
        self, named: Mapping[str, Pool], brought: Mapping[str, Pool], inline_rows: int, written: Written
    ) -> None:
        self._written = written
        self._named, self._pools, self._inline_rows = named, brought, inline_rows
        self._changes = 1  # 0 stands for none
        self._pins: dict[Place, tuple[int, int]] = {}  # slots, and the changes that have pinned them
        self._leaving: dict[tuple[Place, int, int], None] = {}  # unpinned, with the changes that pinned and unpinned it
        self._rows: Counter[int] = Counter()  # how many rows hold what was pinned after a change
        self._pinned: dict[bytes, Arrow] = {}
        self._kept: dict[bytes, Arrow] = {}  # oldest first, here and below
        self._brought: dict[bytes, Arrow] = {}

    def change(self, pin: Pins, unpin: Collection[Place]) -> None:
        """Unpin vectors, then pin others; what is already pinned or unpinned stays so.

        Raises:
            RegistryError: running requests leave too little room in a pool; then nothing new is pinned.
        """
        self._changes += 1
        for place in sorted(self._pins.keys() & set(unpin)):
            self._leaving[place, self._pins.pop(place)[1], self._changes] = None
        for leaving in [one for one in self._leaving if not self._is_read(*one[1:])]:
            del self._leaving[leaving]
            self._named[leaving[0][0]].release(leaving[0][1])
        new = {place: row for place, row in pin.items() if place not in self._pins}
        needed = Counter(site for site, digest in new if not self._named[site].holds(digest))
        for site, count in needed.items():
            pool = self._named[site]
            if count > pool.room:
                raise no_room(site, count, pool.room, pool.size)
        for (site, digest), row in new.items():
            if digest not in self._pinned:
                self._pinned |= Arrow.several([digest], row[None])
            slot, fresh = self._named[site].take(digest)
            self._pins[site, digest] = slot, self._changes
            if fresh:
                self._written[site, slot] = self._pinned[digest].unit
        for digest in sorted(self._pinned.keys() - {digest for _, digest in self._pins}):  # all ranks keep the same
            _remember(self._kept, self._pinned.pop(digest), KEPT)

    def _is_read(self, pinned: int, unpinned: int) -> bool:
        """Whether a row that was filled between two changes has not been released."""
        return any(pinned <= change < unpinned for change in self._rows)

    def find(self, digests: Sequence[bytes], vectors: Iterable[tuple[str, bytes, bytes]] = ()) -> list[Arrow]:
        """The vectors of a plan.

        Args:
            digests: the digests that it refers to.
            vectors: the vectors that came with it: dtype, digests of the rows, and the rows as little-endian bytes;
                features as ``wire.FEATURE`` says.

        Raises:
            Gone: a vector is no longer here and did not come with the plan.
        """
        own: dict[bytes, Arrow] = {}
        for dtype, joined, data in vectors:
            names = [joined[at : at + DIGEST] for at in range(0, len(joined), DIGEST)]
            if all(name in self._brought for name in names):
                own |= {name: self._brought[name] for name in names}
            elif dtype.startswith(FEATURE):
                own[joined] = Arrow.feature(joined, dtype.removeprefix(FEATURE), data)
            else:
                own |= Arrow.several(names, numbers_of(dtype, data).reshape(len(names), -1))
        for arrow in own.values():
            _remember(self._brought, arrow, BROUGHT)
        known = ChainMap(own, self._pinned, self._kept)
        try:
            return [known[digest] for digest in digests]
        except KeyError as exc:
            raise Gone(f"vector {exc.args[0].hex()} is not here any more") from None

    def take(self, row: Row) -> Held:
        """Hold slots for all vectors of a row, and put their numbers into its words.

        Raises:
            Gone: more than ``inline_rows`` of them at one site are no longer pinned.
        """
        others: list[tuple[Pool, bytes]] = []
        if row.uses and row.change != self._changes:
            slots: list[int] = []
            loose: dict[str, int] = {}
            try:
                for site, arrow in row.uses:
                    digest = arrow.digest
                    pin = self._pins.get((site, digest))
                    if pin is not None:
                        slots.append(pin[0])
                        continue
                    loose[site] = count = loose.get(site, 0) + 1
                    if count > self._inline_rows:
                        raise Gone(f"names of {count} vectors at {site} were replaced or deleted")
                    pool = self._pools[site]
                    slot, fresh = pool.take(digest)
                    others.append((pool, digest))
                    slots.append(slot)
                    if fresh:
                        self._written[site, slot] = arrow.unit
            except BaseException:
                _give_back(others)
                raise
            row.words[row.at] = np.array(slots, dtype=np.int32)[row.which]
            row.change = 0 if others else self._changes
        change = self._changes if len(row.uses) > len(others) else 0
        self._rows[change] += 1
        return change, others

    def release(self, held: Held) -> None:
        """Give back the slots of a row."""
        change, others = held
        _give_back(others)
        self._rows[change] -= 1
        if not self._rows[change]:
            del self._rows[change]

    def usage(self) -> dict[str, tuple[int, int]]:
        """How many slots for pins are in use, and how many there are, by site."""
        return {site: (len(pool), pool.size) for site, pool in self._named.items()}


def _give_back(taken: Iterable[tuple[Pool, bytes]]) -> None:
    for pool, digest in taken:
        pool.release(digest)


def _remember(known: dict[bytes, Arrow], arrow: Arrow, most: int) -> None:
    known.pop(arrow.digest, None)
    known[arrow.digest] = arrow
    if len(known) > most:
        del known[next(iter(known))]
