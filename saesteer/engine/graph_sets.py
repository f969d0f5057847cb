"""At which sites each captured set of graphs has ops, and which set is enough. Knows neither graphs nor requests."""

from collections.abc import Collection, Iterable, Sequence

Sets = tuple[frozenset[str], ...]  # each lies within the next; the last holds every site


def nested(sites: Iterable[str], dictionaries: Iterable[str], most: int) -> Sets:
    """The sets to capture: for steps that edit nowhere, for those that use dictionaries alone, and for all others.

    Args:
        sites: every site with an op.
        dictionaries: the sites where dictionaries read or write.
        most: sets at most; with one, every graph has all ops, with two, dictionaries have no set of their own.
    """
    every = frozenset(sites)
    wanted = (frozenset[str](), every & frozenset(dictionaries), every)
    chosen = {1: wanted[2:], 2: wanted[::2]}.get(most, wanted)
    return tuple(sorted(set(chosen), key=len))


def smallest(sets: Sequence[Collection[str]], needed: Collection[str]) -> int:
    """The index of the first set that holds all needed sites; the last one's if a site is unknown."""
    return next((at for at, held in enumerate(sets) if set(needed) <= set(held)), len(sets) - 1)
