"""Versions of a server's catalog, and where the vectors of each lie in the sites' pools. Knows no device and no server.

A version never changes. Whoever registers, replaces or deletes a name makes the next one, and a version is dropped when
no request refers to it; only then the slots that no other version needs may be used again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.vectors import VectorSet, from_inline
from saesteer.engine.pool import Pool
from saesteer.engine.table import Arrow, unit_of
from saesteer.errors import RegistryError, SpecError
from saesteer.language.edits import VectorEdit
from saesteer.language.inline import Vector
from saesteer.language.sites import parse
from saesteer.language.spec import Spec
from saesteer.planning.digests import module_digests
from saesteer.planning.lookup import places_of
from saesteer.planning.plan import Catalog, Direction

Row = NDArray[np.float32]
Written = tuple[str, int, Row]  # site, slot, and the direction at unit length that belongs there


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """What names stand for, for the requests that were admitted with it."""

    number: int
    catalog: Catalog
    arrows: Mapping[tuple[str, Direction], Arrow]  # of named vectors, and of those that stand in modules
    held: frozenset[tuple[str, bytes]]  # sites and contents of their slots


@dataclass(frozen=True, slots=True, eq=False)
class _Pin:
    row: Row
    length: float
    content: bytes


class Registry:
    """The versions that somebody may still ask for.

    Whether there is room depends on the names alone, not on the order of slots, so every process that makes the same
    versions in the same order comes to the same answer.

    Args:
        catalog: version 0.
        pools: the slots for named vectors, by site; as many as ``rooms`` says at least.
    """

    def __init__(self, catalog: Catalog, pools: Mapping[str, Pool]) -> None:
        self.versions: dict[int, Version] = {}
        self._pools = pools
        self._sets: dict[Vector, VectorSet] = {}  # of vectors that stand in modules of the newest version
        self._pins: dict[int, _Pin] = {}  # by the id of its row, which it keeps alive
        self.written = self.add(0, catalog)

    def add(self, number: int, catalog: Catalog) -> list[Written]:
        """Make a version, and say what must be written to slots before a request uses it.

        Raises:
            RegistryError: a pool has too little room; then nothing has changed.
        """
        named, self._sets = _pinned(catalog, self._sets)
        pins = {
            site: {direction: self._pins.get(id(row)) or _pin(row) for direction, row in rows.items()}
            for site, rows in named.items()
        }
        held = frozenset((site, pin.content) for site, found in pins.items() for pin in found.values())
        self._refuse_without_room(held)
        self._pins = {id(pin.row): pin for found in pins.values() for pin in found.values()}
        slots = {one: self._pools[one[0]].take(one[1]) for one in held}
        arrows: dict[tuple[str, Direction], Arrow] = {}
        written: dict[tuple[str, bytes], Written] = {}
        for site, found in pins.items():
            for direction, pin in found.items():
                slot, fresh = slots[site, pin.content]
                bias = _named(catalog, direction).bias if isinstance(direction.vector, str) else 0.0
                arrows[site, direction] = Arrow(slot, pin.length, bias)
                if fresh and (site, pin.content) not in written:
                    written[site, pin.content] = site, slot, unit_of(pin.row)[0]
        inline = frozenset(one for one in arrows if not isinstance(one[1].vector, str))
        catalog = replace(catalog, pinned=inline, digests=module_digests(catalog))
        self.versions[number] = Version(number, catalog, MappingProxyType(arrows), held)
        return list(written.values())

    def drop(self, number: int) -> None:
        """Forget a version that no request refers to."""
        for site, content in self.versions.pop(number).held:
            self._pools[site].release(content)

    def usage(self) -> dict[str, tuple[int, int]]:
        """Slots in use, and all, by site."""
        return {site: (pool.size - pool.room, pool.size) for site, pool in self._pools.items()}

    def _refuse_without_room(self, held: frozenset[tuple[str, bytes]]) -> None:
        for site, pool in self._pools.items():
            new = sum(1 for place, content in held if place == site and not pool.holds(content))
            if new > pool.room:
                have = f"{new} more slots are needed at {site}, and {pool.room} of {pool.size} are free"
                hint = f"start the server with --pool-rows {pool.size + new - pool.room} or more, or delete a vector"
                raise RegistryError(f"{have}; {hint}", code="no_room")


def rooms(catalog: Catalog, pool_rows: int) -> dict[str, int]:
    """Slots for named vectors at every site: as many as the operator reserves, or as the first version needs."""
    return {site: max(pool_rows, len(rows)) for site, rows in _pinned(catalog, {})[0].items()}


def changed(catalog: Catalog, vectors: Mapping[str, VectorSet | None], modules: Mapping[str, Spec | None]) -> Catalog:
    """The catalog with some names put in the place of what they stood for, or, where None, taken away."""
    return replace(catalog, vectors=_merged(catalog.vectors, vectors), modules=_merged(catalog.modules, modules))


def _merged(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in {**before, **change}.items() if found is not None}


def _pinned(
    catalog: Catalog, known: Mapping[Vector, VectorSet]
) -> tuple[dict[str, dict[Direction, Row]], dict[Vector, VectorSet]]:
    """The rows that have slots of their own at every site, and the vectors that stand in modules, decoded.

    An edit of a module that no request could use, since its site has no op, has none; the plan refuses its use.
    """
    assert catalog.sites is not None, "a server knows its sites"
    vectors = {name: _named(catalog, Direction(name, None)) for name in catalog.vectors}
    found = {site: directions_at(site, vectors) for site in catalog.sites}
    sets: dict[Vector, VectorSet] = {}
    for module in catalog.modules.values():
        for edit in module.edits:
            if not isinstance(edit, VectorEdit) or isinstance(vector := edit.vector, str):
                continue
            sets[vector] = known.get(vector) or sets.get(vector) or from_inline(vector)
            try:
                places = list(places_of(catalog, vector, edit.site, ""))
            except SpecError:
                continue
            for site, direction in places:
                found[site][direction] = sets[vector].rows[direction.layer]
    return found, sets


def directions_at(site: str, vectors: Mapping[str, VectorSet]) -> dict[Direction, Row]:
    """The rows of named vectors that a request may mean at a site, as they were given.

    Those of its layer, and at resid_post those that it may mean by resid_pre of the layer behind.
    """
    kind, layer = parse(site)
    layers = (layer, layer + 1) if kind == "resid_post" else (layer,)
    return {
        Direction(name, row): found.rows[row]
        for name, found in vectors.items()
        for row in (None, *layers)
        if row in found.rows
    }


def _named(catalog: Catalog, direction: Direction) -> VectorSet:
    found = catalog.vectors[str(direction.vector)]
    assert isinstance(found, VectorSet), "a server's catalog holds the vectors themselves"
    return found


def _pin(row: Row) -> _Pin:
    unit, length = unit_of(row)
    return _Pin(row, float(length), blake2b(unit.tobytes(), digest_size=16).digest())
