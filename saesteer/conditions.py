"""The conditions of a request: what `when` reads, where, and which bit of a token holds the answer. Knows no values."""

from collections.abc import Sequence

from saesteer.checks import fail
from saesteer.edits import Gate
from saesteer.names import feature_of, probe_of, site_of
from saesteer.planned import MOST_CONDITIONS, Catalog, Condition, Direction, Feature
from saesteer.sites import order

Key = tuple[str, Feature | Direction, float, float]  # site, what is read, above, below


class Conditions:
    """The different conditions of one request."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._fields: dict[Key, str] = {}  # path of its first mention

    def keys(self, gates: Sequence[Gate], site: str, at: str) -> tuple[Key, ...]:
        """What an edit at a site waits for.

        Raises:
            SpecError: an unknown name, or something that is only known later in the forward pass.
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
        return key

    def settle(self, uses: Sequence[tuple[Key, str]]) -> tuple[tuple[Condition, ...], dict[Key, int]]:
        """The conditions in the order of their sites, and the bit of each.

        A bit is given again at a site behind the last edit that waits for it: all that a token has is 32 bits.

        Args:
            uses: each condition with the sites of the edits that wait for it.

        Raises:
            SpecError: too many of them at a time.
        """
        last: dict[Key, tuple[int, int]] = {}
        for key, site in uses:
            last[key] = max(order(site), last.get(key, order(site)))
        found: list[Condition] = []
        free = [1 << bit for bit in range(MOST_CONDITIONS)][::-1]
        held: dict[Key, int] = {}
        bits: dict[Key, int] = {}
        for key in sorted(last, key=lambda one: order(one[0])):
            site, target, above, below = key
            for other in [one for one in held if last[one] < order(site)]:
                free.append(held.pop(other))
            if not free:
                message = f"is condition {MOST_CONDITIONS + 1} that edits wait for at {site}"
                fail(self._fields[key], "too_many", f"{message}, expected at most {MOST_CONDITIONS} different ones")
            held[key] = bits[key] = free.pop()
            found.append(Condition(site, target, above, below, bits[key], self._fields[key]))
        return tuple(found), bits
