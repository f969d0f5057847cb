"""At which sites each captured set of graphs has ops, and which set is enough. Knows neither graphs nor requests."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Sites(NamedTuple):
    """Where the ops of a set of graphs are, or those that a request needs."""

    edits: frozenset[str] = frozenset()  # with all that an op does
    reads: frozenset[str] = frozenset()  # where tokens are only captured: nothing is encoded, and no step published

    def holds(self, needed: "Sites") -> bool:
        """Whether this has all that is needed; whoever may edit at a site may do the rest there."""
        return needed.edits <= self.edits and needed.reads <= self.edits | self.reads

    @property
    def all(self) -> frozenset[str]:
        """The sites with an op."""
        return self.edits | self.reads

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.all)


Sets = tuple[Sites, ...]  # fewest ops first; the last has all


def sets_of(sites: Iterable[str], dictionaries: Iterable[str], readable: Iterable[str], most: int = 4) -> Sets:
    """The sets to capture: for steps that do nothing, that only read, that use dictionaries alone, and for all others.

    Args:
        sites: every site with an op.
        dictionaries: the sites where dictionaries read or write.
        readable: the sites whose tensors may be read.
        most: sets at most. With one, every graph has all ops; of two, one has none; the third is for dictionaries,
            and the fourth for reads.
    """
    every = frozenset(sites)
    last = Sites(every)
    some = every & frozenset(dictionaries)
    wanted = [Sites(), Sites(some), Sites(reads=every & frozenset(readable))]
    smaller = {one for one in wanted[: most - 1] if one != last and (one.ops or one == wanted[0])}
    ordered = sorted(smaller, key=lambda one: (one.ops, len(one.edits)))
    return (*ordered, last) if every else (last,)


def enough(sets: Sequence[Sites], needed: Sites) -> int:
    """The numbers of the sets that hold all that is needed, as bits; always the last one's, as sites may be unknown."""
    found = sum(1 << at for at, one in enumerate(sets) if one.holds(needed))
    return found | 1 << len(sets) - 1


def smallest(fits: int, captured: Collection[int]) -> int:
    """The number of the first captured set among those that ``enough`` has found."""
    return min(at for at in captured if fits >> at & 1)
