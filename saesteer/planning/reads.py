"""What edits of a request read: conditions, whose bits `when` waits for, and numbers in registers. Knows no values.

Both are shared by all edits that ask for the same, and both are few: 31 bits and so many registers for each token. So
each is free again at sites after the last edit that needs it.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from saesteer.dictionaries.vectors import Function
from saesteer.language.edits import Gate, Source, Strength
from saesteer.language.fields import FLOAT32_MAX, fail
from saesteer.language.sites import canonical, order
from saesteer.planning.lookup import feature_of, probe_of, reading_site
from saesteer.planning.plan import MOST_CONDITIONS, Catalog, Condition, Direction, Feature, Read, Whole

# Site, what is read, and numbers: above and below of a condition; scale, shift, low and high of a read.
Key = tuple[str, Feature | Direction | Whole, tuple[float, ...]]
G = TypeVar("G", bound=Gate)


def bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """Two bounds as numbers, without None."""
    return -math.inf if low is None else low, math.inf if high is None else high


_PLAIN = 1.0, 0.0, *bounds(None, None)


def score_of(function: Function, value: float) -> float:
    """The x · v + bias of which a probe's function makes a value; infinite for one that it never reaches."""
    if function == "linear":
        return value
    share = value if function == "sigmoid" else (value + 1) / 2  # tanh(s) = 2 · sigmoid(2s) − 1
    if not 0 < share < 1:
        return math.copysign(math.inf, share - 0.5)
    return (math.log(share) - math.log1p(-share)) / (1 if function == "sigmoid" else 2)


def bounds_of(gate: Gate, catalog: Catalog) -> tuple[float, float]:
    """The bounds of a condition: on a feature, or on a probe's x · v + bias, without its function."""
    above, below = bounds(gate.above, gate.below)
    function = catalog.function_of(gate.probe)
    return score_of(function, above), score_of(function, below)


def with_paths(gates: Sequence[G], at: str) -> Iterator[tuple[G, str]]:
    """The conditions of an edit or a rule, each with its path."""
    paths = [f"{at}.when"] if len(gates) == 1 else [f"{at}.when[{i}]" for i in range(len(gates))]
    return zip(gates, paths, strict=True)


class _Shared:
    """The different things of one kind that are read.

    Args:
        most: how many may be kept at a time.
        refusal: the words of the refusal of one more.
    """

    def __init__(self, most: int, refusal: str) -> None:
        self._most, self._refusal = most, refusal
        self.fields: dict[Key, str] = {}  # path of the first mention of each
        self._last: dict[Key, tuple[int, int]] = {}  # order of the last site where an edit needs it

    def note(self, key: Key, site: str, at: str) -> Key:
        """An edit at a site needs it."""
        self.fields.setdefault(key, at)
        self._last[key] = max(order(site), self._last.get(key, order(site)))
        return key

    def settle(self) -> dict[Key, int]:
        """The place of each, from 0, in the order of their sites.

        Raises:
            SpecError: too many are needed at a time.
        """
        if not self._last:
            return {}
        free = [*range(self._most)][::-1]
        held: list[tuple[tuple[int, int], int]] = []  # places in use; the first to become free comes first
        places: dict[Key, int] = {}
        for key in sorted(self._last, key=lambda one: order(one[0])):
            while held and held[0][0] < order(key[0]):
                free.append(heappop(held)[1])
            if not free:
                fail(self.fields[key], "too_many", self._refusal.format(self._most + 1, key[0], self._most))
            places[key] = free.pop()
            heappush(held, (self._last[key], places[key]))
        return places


class Reads:
    """The conditions and the reads of one request."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        waiting = "is condition {} that edits wait for at {}, expected at most {} different ones"
        making = "is reconstruction {} that is made at {} for a later site, expected at most {} on its way at a time"
        self._conditions, self._wholes = _Shared(MOST_CONDITIONS, waiting), _Shared(1, making)
        self._reads = _Shared(catalog.max_entries, "")  # each is an entry, too, so there is always a register

    def __len__(self) -> int:
        return len(self._conditions.fields) + len(self._reads.fields) + len(self._wholes.fields)

    def gates(self, gates: Sequence[Gate], site: str, at: str, until: str) -> tuple[Key, ...]:
        """The conditions that an edit waits for; it stands at a site, as written, and ``until`` is that or a later one.

        Raises:
            SpecError: a name is unknown, or a condition reads what is only known later in the forward pass.
        """
        if not gates:
            return ()
        return tuple(
            self._conditions.note((*self._source(gate, site, path), bounds_of(gate, self.catalog)), until, path)
            for gate, path in with_paths(gates, at)
        )

    def held(self, target: Feature | Whole, reads: str, site: str, at: str) -> Key | None:
        """A feature's activation, or a reconstruction, if the dictionary reads at another site than the edit's."""
        if reads == site:
            return None
        kept = self._wholes if isinstance(target, Whole) else self._reads
        return kept.note((reads, target, _PLAIN), site, at)

    def strength(self, one: Strength, site: str, at: str, until: str) -> Key:
        """A strength that is read for an edit; ``at`` is its path, and the sites are as in ``gates``.

        Raises:
            SpecError: a name is unknown, or what is read is only known later in the forward pass.
        """
        if one.probe is not None and one.probe in self.catalog.vectors:  # another name is refused below
            function, bias = self.catalog.function_of(one.probe), self.catalog.vectors[one.probe].bias
            if function != "linear":
                message = f"reads {one.probe!r}, whose function is {function}, which this version cannot multiply by"
                fail(f"{at}.probe", "not_served", f"{message}; expected a linear probe, or a condition")
            if abs(shift := one.slope * bias + one.bias) > FLOAT32_MAX:
                message = f"got {one.slope:g}, which makes {shift:g} with the bias of the probe and of the strength"
                fail(f"{at}.slope", "out_of_range", f"{message}, expected what float32 can hold")
        law = one.slope, one.bias, *bounds(one.min, one.max)
        return self._reads.note((*self._source(one, site, at), law), until, at)

    def _source(self, source: Source, site: str, at: str) -> tuple[str, Feature | Direction]:
        """Where a probe or a feature is read for an edit at a site, as written, and what.

        Raises:
            SpecError: a name is unknown, or the place comes later in the forward pass.
        """
        target: Feature | Direction
        if source.probe is not None:
            place, target = probe_of(self.catalog, source.probe, site, at)
            what, named = f"{at}.probe", place
        else:
            assert source.dictionary is not None and source.feature is not None
            target, info = feature_of(self.catalog, source.dictionary, source.layer, source.feature, at)
            place, what = reading_site(self.catalog, target.dictionary, info, at), f"{at}.dictionary"
            named = canonical(str(info.site_in or info.site_out))
        if order(named) > order(site):  # mlp_in_pregain comes after resid_mid, whose op reads it
            message = f"reads {named}, which comes after {site}, where the edit stands"
            fail(what, "conflict", f"{message}; expected the same site or an earlier one")
        if self.catalog.op_site(place) != place:
            message = f"reads {place}, where this server has no op; start it with --sites {place} to have one there"
            fail(what, "not_served", message)
        return place, target

    def settle(self) -> tuple[dict[Key, Condition], dict[Key, Read]]:
        """The conditions with their bits, and the reads with their registers, in the order of their sites.

        Raises:
            SpecError: edits wait for too many conditions at a time, or keep too many numbers.
        """
        if not len(self):
            return {}, {}
        bits, registers = self._conditions.settle(), self._reads.settle() | self._wholes.settle()
        fields = self._conditions.fields | self._reads.fields | self._wholes.fields
        conditions = {}
        for key, bit in bits.items():
            site, target, (above, below) = key
            assert not isinstance(target, Whole)
            conditions[key] = Condition(site, target, above, below, 1 << bit, fields[key])
        reads = {}
        for key, register in registers.items():
            site, target, (scale, shift, low, high) = key
            reads[key] = Read(site, target, register, scale, shift, low, high, fields[key])
        return conditions, reads
