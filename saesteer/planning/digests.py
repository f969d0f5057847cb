"""What edits do, by content and not by name: the basis of version hashes and use counts.

Knows catalogs and fingerprints, no server and no token. Two specs with equal content change every prompt the same way.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any, Literal

from saesteer.dictionaries.vectors import fingerprint_of, row_digests
from saesteer.language.alike import parts_of
from saesteer.language.edits import Edit, Use, VectorEdit
from saesteer.language.returns import Return
from saesteer.language.spec import Spec
from saesteer.planning.plan import Catalog, Direction

DIGEST = 16  # bytes of a vector's digest where it stands for the vector

Kind = Literal["vector", "module"]
Name = tuple[Kind, str]
_NO_READS = Return()
_KINDS: dict[str, Kind] = {"vector": "vector", "probe": "vector", "module": "module"}  # fields of changeable names


def digest(content: object) -> str:
    """The hex digest of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(target: Direction, catalog: Catalog) -> bytes:
    """The digest of a vector's numbers, by which the holder of the weights knows it."""
    vector = target.vector
    rows = catalog.vectors[vector].digests if isinstance(vector, str) else row_digests(vector)
    return bytes.fromhex(rows[target.layer][: 2 * DIGEST])


def content_of(edits: Sequence[Edit], catalog: Catalog, modules: Mapping[str, str]) -> list[Any]:
    """The edits as JSON, with fingerprints in place of vectors and modules.

    Dictionaries stay names, as nobody can change what they stand for while a server runs. The bytes of vectors are
    hashed once, and neither written out nor encoded.

    Args:
        edits: edits that ``plan`` has accepted, so every name is known.
        catalog: the catalog that they were planned with.
        modules: the digests of its modules.
    """
    contents = []
    for edit in edits:
        found = (replace(edit, vector="not encoded") if isinstance(edit, VectorEdit) else edit).to_json()
        if isinstance(edit, Use):
            found["module"] = modules[edit.module]
        if isinstance(edit, VectorEdit):
            found["vector"] = _fingerprint(edit.vector, catalog)
        probes = [source.probe for _, source in edit.sources() if source.probe is not None]
        if probes:
            found["probes"] = [_fingerprint(name, catalog) for name in probes]
        contents.append(found)
    return contents


def module_digests(catalog: Catalog) -> dict[str, str]:
    """The version hash of every module: a hash of what it does, including the vectors and modules that it names."""
    uses = {name: {used for _, used in _direct(spec.edits, "module")} for name, spec in catalog.modules.items()}
    found: dict[str, str] = {}
    order = TopologicalSorter(uses)
    with suppress(CycleError):  # the plan refuses a cycle, and nobody needs the digests of its modules
        order.prepare()
    while order.is_active():
        for name in order.get_ready():
            if name in uses and uses[name] <= found.keys():
                found[name] = digest(content_of(catalog.modules[name].edits, catalog, found))
            order.done(name)
    return found


def names_in(edits: Sequence[Edit], modules: Mapping[str, Spec], returns: Return = _NO_READS) -> set[Name]:
    """The vectors and modules that edits name, directly or through modules, and the probes that ``return`` reads."""
    found: set[Name] = {("vector", one.probe) for one in returns.probes}
    ahead = set(_direct(edits))
    while ahead:
        one = ahead.pop()
        found.add(one)
        kind, name = one
        if kind == "module" and name in modules:
            ahead |= set(_direct(modules[name].edits)) - found
    return found


def users_of(names: Iterable[Name], modules: Mapping[str, Spec], *, direct: bool = False) -> list[str]:
    """The modules that name one of these, directly or through modules; with ``direct``, only directly."""
    users: defaultdict[Name, list[str]] = defaultdict(list)
    for name, spec in modules.items():
        for used in _direct(spec.edits):
            users[used].append(name)
    found: set[str] = set()
    ahead = list(names)
    while ahead:
        new = set(users[ahead.pop()]) - found
        found |= new
        ahead += [] if direct else [("module", name) for name in new]
    return [name for name in modules if name in found]


def _direct(edits: Sequence[Edit], kind: Kind | None = None) -> list[Name]:
    mentions = (part.first.mentions() for part in parts_of(edits))  # those that are alike mention the same names
    named = ((_KINDS[key], name) for key, _, name in chain.from_iterable(mentions) if key in _KINDS)
    return [one for one in named if kind in (None, one[0])]


def _fingerprint(vector: Any, catalog: Catalog) -> str:
    return catalog.vectors[vector].fingerprint if isinstance(vector, str) else fingerprint_of(vector)
