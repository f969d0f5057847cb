"""What a plan edits at each position, as runs of positions with equal edits. Knows content, no server and no cache.

A request's key/value cache depends on the edits at each position and on nothing else in its spec. So blocks of the
prefix cache are keyed by these runs (``saesteer.plugin.prefix_cache``): requests share a block where their edits agree.
"""

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, compress, pairwise, repeat
from operator import itemgetter
from struct import Struct
from typing import Any

from saesteer.language.sites import canonical, order
from saesteer.planning.digests import digest_of
from saesteer.planning.plan import Catalog, Change, Clamps, Condition, Direction, Feature, Plan, Read, Whole, Window

_LAW = Struct("<5d?iI").pack
Run = tuple[int, int, str]  # positions [lo, hi) with the same edits, and the hex digest of these edits


def contents(plan: Plan, catalog: Catalog) -> list[list[bytes]]:
    """What each part of a group does, by its site and content, without its windows; group by group.

    A vector is identified by its numbers and not by its name, and so are rows from a file, together with what they
    read; a dictionary by its name, whose meaning is fixed while a server runs; a gate by what it reads and its bounds.
    The path of the edit in the request does not matter, nor whether clamps form one part or several.

    Args:
        plan: the plan of one request.
        catalog: the catalog that it was planned with.
    """
    waiting = _Waiting(plan.conditions, catalog)
    return [[_content(part, group.site, waiting, catalog) for part in group.parts] for group in plan.groups]


def runs(plan: Plan, parts: Sequence[Sequence[bytes]]) -> tuple[Run, ...]:
    """The runs of positions with the same edits, ascending; positions without an edit are in none.

    A group that has no change at a position is left out there, but the groups before and after it remain separate: the
    second reads what the first left. Sites follow the order of the forward pass, so edits of different sites may stand
    in the request in any order.

    Args:
        plan: the plan of one request.
        parts: the ``contents`` of the plan.
    """
    groups: list[_Group] = []
    holding: defaultdict[tuple[Window, ...], list[tuple[_Group, int]]] = defaultdict(list)  # most edits share windows
    for group, inside in sorted(zip(plan.groups, parts, strict=True), key=lambda pair: order(pair[0].site)):
        made = _Group(inside)
        groups.append(made)
        for place, part in enumerate(group.parts):
            holding[part.windows].append((made, place))
    toggles: defaultdict[int, list[tuple[_Group, int]]] = defaultdict(list)
    for windows, places in holding.items():
        for bound in chain.from_iterable(windows):
            toggles[bound] += places
    found: list[Run] = []
    for lo, hi in pairwise(sorted(toggles)):
        for made, place in toggles[lo]:
            made.toggle(place)
        active = b"".join([one.digest() for one in groups])
        if not active:
            continue
        digest = hashlib.sha256(active).hexdigest()
        if found and found[-1][1:] == (lo, digest):
            found[-1] = (found[-1][0], hi, digest)
        else:
            found.append((lo, hi, digest))
    return tuple(found)


def meeting(found: Sequence[Run], start: int, end: int) -> list[Run]:
    """The runs that hold a position of [start, end), cut to this interval.

    Args:
        found: the runs, ascending and disjoint.
        start: the first position.
        end: the position after the last.
    """
    inside = []
    for place in range(bisect_right(found, start, key=itemgetter(1)), len(found)):
        lo, hi, digest = found[place]
        if lo >= end:
            break
        inside.append((max(lo, start), min(hi, end), digest))
    return inside


class _Group:
    """The parts of a group, and which of them hold at the current position.

    Args:
        parts: their contents.
    """

    __slots__ = ("_active", "_digest", "_parts")

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts
        self._active = bytearray(len(parts))
        self._digest: bytes | None = b""

    def toggle(self, place: int) -> None:
        """Switch a part on or off."""
        self._active[place] ^= 1
        self._digest = None

    def digest(self) -> bytes:
        """The digest of the parts that hold; empty where there are none."""
        if self._digest is None:
            active = b"".join(compress(self._parts, self._active))
            self._digest = hashlib.sha256(active).digest() if active else b""
        return self._digest


class _Waiting:
    """The meaning of the bits that a change waits for; a bit is reused at sites after its last use."""

    def __init__(self, conditions: Iterable[Condition], catalog: Catalog) -> None:
        self._conditions: defaultdict[int, list[tuple[Any, Any]]] = defaultdict(list)
        for one in conditions:
            self._conditions[one.bit].append((order(one.site), (*_source(one, catalog), one.above, one.below)))

    def of(self, bits: int, site: str) -> list[Any]:
        """The conditions that these bits stand for at a site, in an order that does not depend on the bits."""
        found: list[Any] = []
        here = order(site)
        for bit, known in self._conditions.items():
            if bits & bit:
                found.append(max((one for one in known if one[0] <= here), key=itemgetter(0))[1])
        return sorted(found, key=repr)


def _content(part: Change | Clamps, site: str, waiting: _Waiting, catalog: Catalog) -> bytes:
    one = part.first if isinstance(part, Clamps) else part
    gates = repr(waiting.of(one.gates, site)) if one.gates else ""
    held, strength = (
        repr((*_source(read, catalog), read.scale, read.shift, read.low, read.high)) if read else ""
        for read in (one.held, one.strength)
    )
    feature, target = -1, _target(one.target, catalog)
    if isinstance(one.target, Feature) and one.target not in catalog.rows:
        feature, target = one.target.feature, ("feature", one.target.dictionary)
    # Only the last part, which may be a name, can contain the separator.
    text = "\0".join((site, one.unit, one.part or "", gates, held, strength, *target)).encode()
    behind = one.low, one.high, one.gain, one.only_if_active
    if not isinstance(part, Clamps):
        return _LAW(one.scale, one.shift, *behind, feature, len(text)) + text
    scales, shifts = (part.values, repeat(one.shift)) if part.scales else (repeat(one.scale), part.values)
    laws = map(_LAW, scales, shifts, *map(repeat, behind), part.features, repeat(len(text)))
    return text.join(laws) + text


def _source(read: Condition | Read, catalog: Catalog) -> tuple[Any, ...]:
    """What is read, and where."""
    found: tuple[Any, ...] = read.site, _target(read.target, catalog)
    if isinstance(read.target, Direction) and isinstance(read.target.vector, str):
        found = (*found, catalog.vectors[read.target.vector].bias)
    return found


def _target(target: Feature | Direction | Whole, catalog: Catalog) -> tuple[str, str]:
    if isinstance(target, Direction):
        return "direction", digest_of(target, catalog).hex()
    if isinstance(target, Feature) and target in catalog.rows:  # several API servers may have opened different files
        info = catalog.dictionaries[target.dictionary]  # its rows do not say how they read x
        return "rows", " ".join([catalog.rows[target].digest, info.in_norm, canonical(str(info.site_in))])
    return str(target.feature) if isinstance(target, Feature) else "whole", target.dictionary
