"""Which vectors lie at which sites while names stand for them. Knows catalogs and rows, no slots and no server."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.vectors import VectorSet, rows_of
from saesteer.errors import RegistryError, SpecError
from saesteer.language.edits import VectorEdit
from saesteer.language.sites import parse
from saesteer.language.spec import Spec
from saesteer.planning.digests import digest_of, module_digests
from saesteer.planning.lookup import places_of
from saesteer.planning.plan import Catalog, Direction

Place = tuple[str, bytes]  # a site, and the digest of a vector
Pins = Mapping[Place, NDArray[np.float32]]  # the vector [d], as it was given


def settle(catalog: Catalog) -> tuple[Catalog, Pins]:
    """The catalog with the digests of its modules and the vectors in them, and the vectors at each site for its names.

    A named row lies at each site of its width that a request may mean by its layer, including resid_post of the layer
    before, which is resid_pre of its own layer. A module's edit at a site without an op needs nothing, since no request
    can use it.
    """
    assert catalog.sites is not None, "a server knows its sites"
    sites_of: defaultdict[int | None, list[str]] = defaultdict(list)
    for site in catalog.sites:
        kind, layer = parse(site)
        sites_of[None].append(site)
        sites_of[layer].append(site)
        if kind == "resid_post":
            sites_of[layer + 1].append(site)
    pins: dict[Place, NDArray[np.float32]] = {}
    for name, found in catalog.vectors.items():
        for at, row in found.rows.items():
            digest = digest_of(Direction(name, at), catalog)
            fitting = [site for site in sites_of.get(at, ()) if catalog.width_at(site) in (None, found.width)]
            pins |= {(site, digest): row for site in fitting}
    inline: set[tuple[str, Direction]] = set()
    for edit in (edit for module in catalog.modules.values() for edit in module.edits):
        if not isinstance(edit, VectorEdit) or isinstance(vector := edit.vector, str):
            continue
        try:
            places = [(site, one) for site, one, _ in places_of(catalog, vector, edit.site, "")]
        except SpecError:
            continue
        rows = rows_of(vector)
        pins |= {(catalog.op_site(site), digest_of(one, catalog)): rows[one.layer] for site, one in places}
        inline.update(places)
    return replace(catalog, pinned=frozenset(inline), digests=module_digests(catalog)), pins


def counts(*pins: Mapping[Place, Any]) -> Counter[str]:
    """The number of vectors at each site, with equal vectors counted once."""
    return Counter(site for site, _ in set().union(*pins))


def changed(catalog: Catalog, vectors: Mapping[str, VectorSet | None], modules: Mapping[str, Spec | None]) -> Catalog:
    """The catalog with new contents for some names; a name with None is removed."""
    return replace(catalog, vectors=_merged(catalog.vectors, vectors), modules=_merged(catalog.modules, modules))


def _merged(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in {**before, **change}.items() if found is not None}


def no_room(site: str, needed: int, free: int, size: int) -> RegistryError:
    """The refusal of vectors that a site's pool cannot hold.

    Args:
        site: the site of the pool.
        needed: how many more slots are needed.
        free: how many slots nobody holds.
        size: the number of slots in the pool.
    """
    have = f"{needed} more slots are needed at {site}, and {free} of {size} are free"
    hint = f"start the server with --pool-rows {size + needed - free} or more, or delete a vector"
    return RegistryError(f"{have}; {hint}", code="no_room")
