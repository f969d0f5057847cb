"""Versions of names: what each stands for, its slots, and that nothing moves that somebody may still read."""

from typing import Any

import numpy as np
import pytest

from saesteer.dictionaries.vectors import from_inline
from saesteer.engine.pool import Pool
from saesteer.engine.registry import Registry, changed, rooms
from saesteer.errors import RegistryError
from saesteer.language.spec import Spec, from_json
from saesteer.planning.digests import content_of, digest, module_digests, names_in, users_of
from saesteer.planning.plan import Catalog, Direction

SITES = frozenset({"resid_post.2", "resid_post.3"})


def vector(*numbers: float) -> Any:
    return from_inline(numbers)


def layered(*layers: int, seed: int = 0) -> Any:
    from saesteer.language.inline import InlineVector

    rows = np.random.default_rng(seed).normal(size=(len(layers), 4)).astype(np.float32)
    return from_inline(InlineVector("float32", rows.shape, rows.tobytes(), layers))


def catalog(**vectors: Any) -> Catalog:
    return Catalog(dictionaries={}, sites=SITES, max_entries=64, vectors=vectors, width=4, inline_rows=1)


def spec(*edits: Any) -> Spec:
    return from_json({"edits": list(edits)})


def add(vector: Any, **more: Any) -> dict[str, Any]:
    return {"op": "add", "vector": vector, "site": "resid_post.2", **more}


def registry(first: Catalog, size: int = 4) -> Registry:
    return Registry(first, {site: Pool(10, max(size, room)) for site, room in rooms(first, size).items()})


def slot(of: Registry, version: int, name: Any, site: str = "resid_post.2", layer: int | None = None) -> int:
    return of.versions[version].arrows[site, Direction(name, layer)].slot


def test_a_version_keeps_its_slots_until_it_is_dropped() -> None:
    made = registry(catalog(v=vector(1, 0, 0, 0)), size=2)
    first = slot(made, 0, "v")
    written = made.add(1, changed(made.versions[0].catalog, {"v": vector(0, 2, 0, 0)}, {}))
    assert slot(made, 0, "v") == first != slot(made, 1, "v")
    assert {(site, at) for site, at, _ in written} == {(site, slot(made, 1, "v", site)) for site in SITES}
    assert all(unit.tolist() == [0, 1, 0, 0] for _, _, unit in written)
    third = changed(made.versions[1].catalog, {"v": vector(0, 0, 3, 0)}, {})
    with pytest.raises(RegistryError, match=r"1 more slots .* 0 of 2 are free; start the server with --pool-rows 3"):
        made.add(2, third)
    assert set(made.versions) == {0, 1} and made.usage() == dict.fromkeys(SITES, (2, 2))
    made.drop(0)
    made.add(2, third)
    assert slot(made, 2, "v") == first
    assert made.versions[2].arrows["resid_post.2", Direction("v", None)].length == 3


def test_equal_directions_share_a_slot_and_are_written_once() -> None:
    made = registry(catalog(v=vector(1, 0, 0, 0), w=vector(2, 0, 0, 0)))
    assert slot(made, 0, "v") == slot(made, 0, "w")
    assert len(made.written) == len(SITES)
    assert not made.add(1, changed(made.versions[0].catalog, {"x": vector(5, 0, 0, 0)}, {}))


def test_rows_lie_at_their_layer_and_before_the_layer_behind() -> None:
    made = registry(catalog(v=layered(2, 3)))
    assert set(made.versions[0].arrows) == {
        ("resid_post.2", Direction("v", 2)),
        ("resid_post.2", Direction("v", 3)),
        ("resid_post.3", Direction("v", 3)),
    }


def test_vectors_in_modules_are_pinned_where_they_are_used() -> None:
    inside = spec(add([0.0, 1.0, 0.0, 0.0]), add([0.0, 0.0, 1.0, 0.0]), add([1.0] * 4, site="resid_post.9"))
    made = registry(catalog())
    made.add(1, changed(made.versions[0].catalog, {}, {"m": inside}))
    edits: Any = inside.edits
    first, second = edits[0].vector, edits[1].vector
    assert made.versions[1].catalog.pinned == {("resid_post.2", Direction(one, None)) for one in (first, second)}
    assert made.usage() == {"resid_post.2": (2, 4), "resid_post.3": (0, 4)}
    made.add(2, changed(made.versions[1].catalog, {}, {"m": None}))
    made.drop(1)
    assert made.usage() == dict.fromkeys(SITES, (0, 4))


def test_five_thousand_versions_leave_nothing_behind() -> None:
    made = registry(catalog(), size=3)
    for number in range(1, 5001):
        given = None if number % 3 == 0 else vector(number, 1, 0, 0)
        before = made.versions[number - 1].catalog
        made.add(number, changed(before, {"v": given}, {"m": None if given is None else spec(add("v"))}))
        made.drop(number - 1)
    assert set(made.versions) == {5000}
    assert made.usage() == dict.fromkeys(SITES, (1, 3))
    assert len(made._pins) <= 2 and not made._sets


def known(modules: dict[str, Spec], **vectors: Any) -> Catalog:
    found = changed(catalog(**vectors), {}, modules)
    return Catalog(**{name: getattr(found, name) for name in found.__slots__} | {"digests": module_digests(found)})


def test_content_is_what_names_stand_for() -> None:
    row = [1.0, 2.0, 3.0, 4.0]
    inner = {"inner": spec(add("v", when={"probe": "w", "above": 1.0}))}
    modules = {**inner, "outer": spec({"op": "use", "module": "inner", "scale": 2.0})}
    one = known(modules, v=vector(*row), w=vector(0, 1, 0, 0))

    def told(edits: Spec, where: Catalog = one) -> str:
        return digest(content_of(edits.edits, where))

    assert told(spec(add("v"))) == told(spec(add(row))) != told(spec(add("w")))
    assert told(spec(add("v", when={"probe": "w", "above": 1}))) != told(
        spec(add("v", when={"probe": "v", "above": 1}))
    )
    renamed = known(modules, v=vector(*row), w=vector(0, 2, 0, 0))
    for name in ("inner", "outer"):
        assert one.digests[name] != renamed.digests[name], "a probe inside is another"
        assert told(spec({"op": "use", "module": name})) != told(spec({"op": "use", "module": name}), renamed)
    use = {"op": "use", "module": "inner"}
    assert told(spec(use)) != told(spec({**use, "scale": 0.5})), "scale is the request's, not the module's"
    assert one.digests["inner"] == known(inner, v=vector(*row), w=vector(0, 1, 0, 0)).digests["inner"]


def test_names_are_found_through_modules() -> None:
    modules = {
        "inner": spec(add("v", when={"probe": "w", "above": 1.0})),
        "outer": spec({"op": "use", "module": "inner"}, add([1.0, 0.0, 0.0, 0.0])),
    }
    found = names_in(spec({"op": "use", "module": "outer"}).edits, modules)
    assert found == {("module", "outer"), ("module", "inner"), ("vector", "v"), ("vector", "w")}
    assert users_of([("vector", "w")], modules) == ["inner", "outer"]
    assert users_of([("vector", "w")], modules, direct=True) == ["inner"]
