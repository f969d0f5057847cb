"""The conditions of a request: what `when` reads, where, and which bit of a token holds the answer. Knows no values."""

from collections.abc import Sequence
from heapq import heappop, heappush

from saesteer.language.edits import Gate
from saesteer.language.fields import fail
from saesteer.language.sites import order
from saesteer.planning.lookup import feature_of, probe_of, site_of
from saesteer.planning.plan import MOST_CONDITIONS, Catalog, Condition, Direction, Feature

Key = tuple[str, Feature | Direction, float, float]  # site, what is read, above, below


class Conditions:
    """The different conditions of one request."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._fields: dict[Key, str] = {}  # path of the first mention of each
        self._last: dict[Key, tuple[int, int]] = {}  # order of the last site where an edit waits for it

    def __len__(self) -> int:
        return len(self._fields)

    def keys(self, gates: Sequence[Gate], site: str, at: str) -> tuple[Key, ...]:
        """The conditions that an edit at a site waits for.

        Raises:
            SpecError: a name is unknown, or a condition reads what is only known later in the forward pass.
        """
        if not gates:
            return ()
        paths = [f"{at}.when"] if len(gates) == 1 else [f"{at}.when[{i}]" for i in range(len(gates))]
        return tuple(self._key(gate, site, path) for gate, path in zip(gates, paths, strict=True))

    def _key(self, gate: Gate, site: str, at: str) -> Key:
        target: Feature | Direction
        if gate.probe is not None:
            place, target = probe_of(self.catalog, gate.probe, site, at)
            what = f"{at}.probe"
        else:
            assert gate.dictionary is not None and gate.feature is not None
            info = feature_of(self.catalog, gate.dictionary, gate.feature, at)
            place = site_of(self.catalog, gate.dictionary, info, at)
            target, what = Feature(gate.dictionary, gate.feature), f"{at}.dictionary"
        if order(place) > order(site):
            message = f"reads {place}, which comes after {site}, where the edit stands"
            fail(what, "conflict", f"{message}; expected the same site or an earlier one")
        above = float("-inf") if gate.above is None else gate.above
        below = float("inf") if gate.below is None else gate.below
        key = (place, target, above, below)
        self._fields.setdefault(key, at)
        self._last[key] = max(order(site), self._last.get(key, order(site)))
        return key

    def settle(self) -> tuple[tuple[Condition, ...], dict[Key, int]]:
        """The conditions in the order of their sites, and the bit of each.

        A bit is reused at sites after the last edit that waits for it, since a token has only 32 bits.

        Raises:
            SpecError: edits wait for too many conditions at a time.
        """
        found: list[Condition] = []
        free = [1 << bit for bit in range(MOST_CONDITIONS)][::-1]
        held: list[tuple[tuple[int, int], int]] = []  # bits in use; the first to become free comes first
        bits: dict[Key, int] = {}
        for key in sorted(self._last, key=lambda one: order(one[0])):
            site, target, above, below = key
            while held and held[0][0] < order(site):
                free.append(heappop(held)[1])
            if not free:
                message = f"is condition {MOST_CONDITIONS + 1} that edits wait for at {site}"
                fail(self._fields[key], "too_many", f"{message}, expected at most {MOST_CONDITIONS} different ones")
            bits[key] = free.pop()
            heappush(held, (self._last[key], bits[key]))
            found.append(Condition(site, target, above, below, bits[key], self._fields[key]))
        return tuple(found), bits
