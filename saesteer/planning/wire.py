"""A plan encoded for the holder of the weights: a line of numbers for each change, and a digest for each vector.

Knows plans and digests, but neither weights nor slots. The front end encodes, the worker decodes; ``saesteer.hf`` does
both. A vector that the request brings travels with the plan, as the same bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.vectors import row_digests
from saesteer.language.inline import InlineVector
from saesteer.planning.plan import END, Catalog, Direction, Feature, Plan, Unit

DIGEST = 16  # bytes
UNITS = {unit: number for number, unit in enumerate(get_args(Unit))}
WHOLE, ALONG = -1, -2  # in place of a feature: a reconstruction, a vector

# One line: a condition or a change.
ENTRY = np.dtype(
    [
        ("law", "<f8", 5),  # scale, shift, low, high, gain; for a condition, low and high are its bounds less the bias
        ("site", "<i4"),  # index in Wire.sites
        ("group", "<i4"),  # -1: a condition
        ("of", "<i4"),  # index in Wire.dictionaries, or for ALONG in Wire.digests
        ("feature", "<i4"),
        ("unit", "<i4"),  # number in UNITS
        ("active", "<i4"),  # 1: only if active
        ("gates", "<i4"),  # bits; for a condition, its bit
        ("windows", "<i4"),  # number of windows
    ]
)
_ENTRY = Struct("<5d8i").pack  # makes one such line; many times as fast as numpy for a few lines


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """A plan as the worker reads it."""

    sites: Sequence[str]  # canonical names
    dictionaries: Sequence[str]
    digests: Sequence[bytes]  # one for each vector, DIGEST bytes long
    dose: bool  # whether to measure how much each site changes each token
    entries: NDArray[Any]  # ENTRY [conditions + changes]; conditions first, changes group by group
    windows: NDArray[np.int32]  # [sum of entries["windows"], 2]: first position, position after the last


def digest_of(target: Direction, catalog: Catalog) -> bytes:
    """The digest of a vector's numbers, by which the worker knows it."""
    vector = target.vector
    rows = catalog.vectors[vector].digests if isinstance(vector, str) else row_digests(vector)
    return bytes.fromhex(rows[target.layer][: 2 * DIGEST])


def encode(plan: Plan, catalog: Catalog, *, dose: bool = False) -> dict[str, Any]:
    """What travels with a request: ``plan``, empty where nothing is edited, and the ``vectors`` that it brings.

    Args:
        plan: the plan of its spec.
        catalog: the catalog that it was planned with.
        dose: whether to measure doses.
    """
    if not plan:
        return {"plan": b"", "vectors": []}
    index = _Index(catalog)
    lines: list[bytes] = []
    windows: list[tuple[int, int]] = []
    for one in plan.conditions:
        of, feature = index.target(one.target, one.site)
        named = isinstance(one.target, Direction) and isinstance(one.target.vector, str)
        bias = catalog.vectors[one.target.vector].bias if named else 0.0  # type: ignore[union-attr, index]
        law = 1.0, 0.0, one.above - bias, one.below - bias, 1.0
        lines.append(_ENTRY(*law, index.site(one.site), -1, of, feature, 0, 0, one.bit, 1))
        windows.append((0, END))
    for number, group in enumerate(plan.groups):
        site = index.site(group.site)
        for change in group.changes:
            of, feature = index.target(change.target, group.site)
            bounds = (0.0, 0.0) if feature == WHOLE else (change.low, change.high)
            law = change.scale, change.shift, *bounds, change.gain
            how = UNITS[change.unit], change.only_if_active, change.gates, len(change.windows)
            lines.append(_ENTRY(*law, site, number, of, feature, *how))
            windows += change.windows
    head = json.dumps([[*index.sites], [*index.dictionaries], len(index.vectors), len(lines), dose]).encode()
    size, spans = len(head).to_bytes(4, "little"), np.array(windows, "<i4").tobytes()
    return {
        "plan": b"".join([size, head, *index.vectors, *lines, spans]),
        "vectors": [_brought(vector) for vector in index.brought.values()],
    }


def decode(plan: bytes) -> Wire:
    """The inverse of ``encode`` for a plan that is not empty."""
    at = 4 + int.from_bytes(plan[:4], "little")
    sites, dictionaries, vectors, lines, dose = json.loads(plan[4:at])
    digests = [plan[at + DIGEST * n : at + DIGEST * (n + 1)] for n in range(vectors)]
    entries = np.frombuffer(plan, ENTRY, lines, at + DIGEST * vectors)
    windows = np.frombuffer(plan, "<i4", offset=at + DIGEST * vectors + entries.nbytes).reshape(-1, 2)
    return Wire(sites, dictionaries, digests, dose, entries, windows)


class _Index:
    """Names and vectors in the order of their first mention."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.sites: dict[str, int] = {}
        self.dictionaries: dict[str, int] = {}
        self.vectors: dict[bytes, int] = {}  # by digest
        self.brought: dict[int, InlineVector | tuple[float, ...]] = {}  # by id: equal ones are the same object, or few

    def site(self, name: str) -> int:
        return self.sites.setdefault(name, len(self.sites))

    def target(self, target: object, site: str) -> tuple[int, int]:
        """The fields of an entry for its target: `of` and `feature`."""
        if not isinstance(target, Direction):
            name: str = target.dictionary  # type: ignore[attr-defined]  # a feature or a whole dictionary
            of = self.dictionaries.setdefault(name, len(self.dictionaries))
            return of, target.feature if isinstance(target, Feature) else WHOLE
        vector, pinned = target.vector, self.catalog.pinned
        if not (isinstance(vector, str) or id(vector) in self.brought or (pinned and (site, target) in pinned)):
            self.brought[id(vector)] = vector
        return self.vectors.setdefault(digest_of(target, self.catalog), len(self.vectors)), ALONG


def _brought(vector: InlineVector | tuple[float, ...]) -> list[Any]:
    """The vector's dtype, the digests of its rows, and the rows as little-endian bytes."""
    digests = b"".join(bytes.fromhex(one[: 2 * DIGEST]) for one in row_digests(vector).values())
    if isinstance(vector, InlineVector):
        return [vector.dtype, digests, vector.data]
    return ["float32", digests, np.array(vector, "<f4").tobytes()]
