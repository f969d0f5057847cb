"""Where a row says that doses are measured, and how they are limited. What its entries mean, test_formulas.py has."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.dictionaries.vectors import from_inline
from saesteer.engine.encode import encode
from saesteer.engine.table import Arrow, Places, Row, Rows
from saesteer.engine.wire import decode
from saesteer.kernels import layout
from saesteer.planning.plan import END, Catalog, Change, Condition, Direction, Group, Plan

SITES = ["resid_mid.0", "resid_post.0", "resid_post.1", "resid_post.7"]
ALONG = Direction("v", None)
PLACES = Places({name: number for number, name in enumerate(SITES)}, {})
CATALOG = Catalog({}, frozenset(SITES), max_entries=64, vectors={"v": from_inline((1.0, 0.0))})


def make_row(found: Plan, *, dose: bool = False, limit: float = 0.0) -> Row:
    """As the worker makes it of what travels."""
    wire = decode(encode(found, CATALOG, dose=dose)["plan"])
    arrows = [Arrow(digest, np.array([1.0, 0.0], np.float32), 1.0) for digest in wire.digests]
    return Rows(PLACES, limit).make(wire, arrows)


def plan(*groups: tuple[str, int], conditions: tuple[str, ...] = ()) -> Plan:
    """Groups of so many additions at a site, and conditions."""
    change = Change(ALONG, ((0, END),), "saesteer.edits[0]", shift=1.0, unit="vector")
    gates = [Condition(site, ALONG, 0.0, 1.0, 1 << n, "saesteer") for n, site in enumerate(conditions)]
    return Plan(tuple(Group(site, (change,) * count) for site, count in groups), tuple(gates))


def columns(row: Row) -> list[int]:
    """Where the doses of each site begin."""
    return [int(row.words[layout.HEAD + layout.SPAN * at + layout.KIND]) >> layout.DOSE for at in range(len(SITES))]


def kinds(row: Row) -> list[int]:
    every = layout.KERNELS
    return [int(row.words[layout.HEAD + layout.SPAN * at + layout.KIND]) & every for at in range(len(SITES))]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(SITES), st.integers(1, 5)), min_size=1, max_size=8), st.floats(1e-300, 1e300))
def test_a_limit_measures_every_site_and_is_never_lost(groups: Any, limit: float) -> None:
    """As a float32 it might be 0, which is none."""
    row = make_row(plan(*groups), limit=limit)
    edits, sites = sum(count for _, count in groups), len({site for site, _ in groups})
    assert (row.edits, row.doses) == (edits, sites)
    assert row.counters <= layout.counters(len(SITES), CATALOG.max_entries)
    held = float(row.words.view(np.float32)[layout.LIMIT])
    assert held > 0 and np.isfinite(held)
    if 1e-37 < limit < 1e38:
        assert held == pytest.approx(limit, rel=2**-24)
    used = [at for at in columns(row) if at]
    assert sorted(used) == list(range(edits, row.counters, layout.DOSE_WORDS))
    assert row.words[layout.COUNTERS] == row.counters and not row.words[layout.COUNTERS + 1 : layout.HEAD].any()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(SITES), st.integers(1, 3)), min_size=1, max_size=8))
def test_each_site_finds_its_entries_and_a_lone_one_in_its_span(groups: Any) -> None:
    """Every edit has a counter of its own, so that counters say which entries a site has."""
    row = make_row(plan(*groups))
    counts = [0] * len(SITES)
    for site, count in groups:
        counts[SITES.index(site)] += count
    found, taken = [], [False] * len(row.words)
    for site, count in enumerate(counts):
        span = row.words[layout.HEAD + layout.SPAN * site :]
        begin, end = (int(word) for word in span[: layout.END + 1])
        assert end - begin == layout.ENTRY * count
        assert count != 1 or begin == layout.one_at(site)
        while begin < end:
            stop = int(row.words[begin + layout.GROUP_END])
            assert begin < stop <= end
            for at in range(begin, stop, layout.ENTRY):
                assert not any(taken[at : at + layout.ENTRY])
                taken[at : at + layout.ENTRY] = [True] * layout.ENTRY
                found.append(int(row.words[at + layout.FLAGS]) >> layout.COUNTER)
            begin = stop
    assert sorted(found) == list(range(sum(counts)))
    assert row.words[0] == sum(counts)
    assert len(row.words) == layout.head(len(SITES)) + layout.ENTRY * sum(count for count in counts if count > 1)
    slots = row.at - layout.SLOT  # where vectors get their slots
    assert len(slots) == sum(counts) and all(taken[at] for at in slots.tolist())
