"""Vectors of names: where they are pinned, their slots, and that nothing moves that somebody may still read."""

from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.dictionaries.vectors import from_inline
from saesteer.engine.pool import Pool
from saesteer.engine.registry import KEPT, Gone, Held, Registry
from saesteer.engine.table import Row
from saesteer.errors import RegistryError
from saesteer.language.spec import Spec, from_json
from saesteer.planning.digests import DIGEST, content_of, module_digests
from saesteer.planning.digests import digest as json_digest
from saesteer.planning.pins import changed, counts, settle
from saesteer.planning.plan import Catalog

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


def places(pins: Any) -> set[tuple[str, str]]:
    return {(site, digest.hex()[:8]) for site, digest in pins}


def digest(vector: Any, layer: int | None = None) -> str:
    return str(vector.digests[layer][:8])


def test_rows_lie_at_their_layer_and_before_the_layer_behind() -> None:
    rows = layered(2, 3)
    _, pins = settle(catalog(v=rows, w=vector(1, 0, 0, 0)))
    assert places(pins) == {
        ("resid_post.2", digest(rows, 2)),
        ("resid_post.2", digest(rows, 3)),
        ("resid_post.3", digest(rows, 3)),
        *((site, digest(vector(1, 0, 0, 0))) for site in SITES),
    }
    assert {tuple(row.tolist()) for row in pins.values()} == {
        (1, 0, 0, 0),
        *(tuple(rows.rows[n].tolist()) for n in (2, 3)),
    }
    assert counts(pins) == {"resid_post.2": 3, "resid_post.3": 2}


SIZE, INLINE, ROWS = 4, 2, 3  # slots for pins at a site, slots of a row, rows


class Memory:
    """A registry, and what lies in the slots of its sites."""

    def __init__(self) -> None:
        named = {site: Pool(10, SIZE) for site in SITES}
        others = {site: Pool(10 + SIZE, ROWS * INLINE) for site in SITES}
        self.written: Any = {}
        self.registry = Registry(named, others, INLINE, self.written)
        self.slots: dict[tuple[str, int], list[float]] = {}
        self.rows: dict[int, tuple[Row, Held]] = {}
        self.pins: set[tuple[str, int]] = set()  # sites and contents

    def change(self, pin: Any, unpin: Any = ()) -> None:
        """Of sites and contents."""
        self.pins -= set(unpin)
        pins = {(site, name(content)): numbers(content) for site, content in pin}
        self.registry.change(pins, {(site, name(content)) for site, content in unpin})
        self.pins |= set(pin)

    def fill(self, row: int, uses: Any, brought: Any = ()) -> None:
        """A row of sites and contents; those that are brought come with it."""
        self.release(row)
        joined, data = b"".join(map(name, brought)), b"".join(numbers(one).tobytes() for one in brought)
        arrows = self.registry.find([name(one) for _, one in uses], [("float32", joined, data)] if brought else [])
        pairs = tuple((site, arrow) for (site, _), arrow in zip(uses, arrows, strict=True))
        every = np.arange(len(uses))
        content = Row(np.zeros(len(uses), np.int32), np.zeros(1, np.int32), 1, 0, 1, True, pairs, every, every)
        self.rows[row] = content, self.registry.take(content)

    def release(self, row: int) -> None:
        if row in self.rows:
            self.registry.release(self.rows.pop(row)[1])

    def check(self) -> None:
        """Each row reads what it asked for."""
        self.slots |= {place: unit.tolist() for place, unit in self.written.items()}
        self.written.clear()
        for content, _ in self.rows.values():
            for (site, arrow), slot in zip(content.uses, content.words.tolist(), strict=True):
                assert self.slots[site, slot] == arrow.unit.tolist()


def name(content: int) -> bytes:
    return content.to_bytes(DIGEST, "little")


def numbers(content: int) -> Any:
    return np.array([1, content, 0, 0], np.float32)


A, B = "resid_post.2", "resid_post.3"
MANY = st.sets(st.tuples(st.sampled_from([A, B]), st.integers(0, 9)), max_size=4)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, ROWS + 1), MANY, MANY), max_size=30))
def test_a_row_reads_what_it_asked_for_whatever_changes(steps: list[tuple[int, Any, Any]]) -> None:
    """Names come and go, rows are filled, filled again and released; nobody's slot is lost."""
    memory = Memory()
    for row, one, other in steps:
        if row >= ROWS:
            with suppress(RegistryError):
                memory.change(one - memory.pins, other & memory.pins)
        else:
            loose = one - memory.pins
            most = max(Counter(site for site, _ in loose).values(), default=0)
            with pytest.raises(Gone) if most > INLINE else nullcontext():
                memory.fill(row, sorted(one), sorted({content for _, content in loose}))
        memory.check()
    for row in range(ROWS):
        memory.release(row)
    memory.change((), set(memory.pins))
    assert memory.registry.usage() == dict.fromkeys(SITES, (0, SIZE))
    assert not any(map(len, memory.registry._pools.values())) and not memory.registry._rows


def test_what_was_pinned_is_kept_for_a_while() -> None:
    memory = Memory()
    for n in range(KEPT + 2):
        memory.change([(A, n)], [(A, n - 1)] if n else ())
    assert len(memory.registry._kept) == KEPT
    memory.fill(0, [(A, 2)])
    memory.check()
    with pytest.raises(Gone, match="is not here any more"):
        memory.fill(0, [(A, 0)])


def known(modules: dict[str, Spec], **vectors: Any) -> Catalog:
    found = changed(catalog(**vectors), {}, modules)
    return Catalog(**{name: getattr(found, name) for name in found.__slots__} | {"digests": module_digests(found)})


def test_content_is_what_names_stand_for() -> None:
    row = [1.0, 2.0, 3.0, 4.0]
    inner = {"inner": spec(add("v", when={"probe": "w", "above": 1.0}))}
    modules = {**inner, "outer": spec({"op": "use", "module": "inner", "scale": 2.0})}
    one = known(modules, v=vector(*row), w=vector(0, 1, 0, 0))

    def told(edits: Spec, where: Catalog = one) -> str:
        return json_digest(content_of(edits.edits, where, where.digests))

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
