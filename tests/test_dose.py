"""Doses of several rows are those of one row, and what is told of them is what was counted."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from saesteer.engine import doses
from saesteer.kernels import layout

Rows = list[list[tuple[float, bool]]]  # of each site the doses of its tokens, and whether they were above the limit

sizes = st.floats(0, 2, width=32, allow_subnormal=False) | st.floats(0, 2.0**96, width=32, allow_subnormal=False)
tokens = st.tuples(sizes, st.booleans())


@st.composite
def requests(draw: st.DrawFn, rows: int = 3) -> tuple[int, list[tuple[list[int], Rows]]]:
    """How many edits a request counts, and what it counted in each of several rows."""
    edits, sites = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    counts = st.lists(st.integers(0, 10**6), min_size=edits, max_size=edits)
    site = st.lists(st.lists(tokens, max_size=4), min_size=sites, max_size=sites)
    return edits, [(draw(counts), draw(site)) for _ in range(rows)]


def words(counts: list[int], sites: Rows) -> NDArray[np.int32]:
    """Counters as a device writes them."""
    blocks = np.zeros((len(sites), layout.DOSE_WORDS), dtype=np.int32)
    floats = blocks.view(np.float32)
    for site, found in enumerate(sites):
        floats[site, layout.DOSE_MAX] = max((one for one, _ in found), default=0.0)
        floats[site, layout.DOSE_SUM] = np.sum([one for one, _ in found], dtype=np.float32)
        blocks[site, layout.DOSE_TOKENS] = len(found)
        blocks[site, layout.DOSE_LIMITED] = sum(above for _, above in found)
    return np.concatenate([np.array(counts, dtype=np.int32), blocks.reshape(-1)])


@given(requests(rows=2), st.integers(0, 9), st.booleans())
def test_two_rows_are_told_as_one(
    request: tuple[int, list[tuple[list[int], Rows]]], padding: int, limited: bool
) -> None:
    edits, rows = request
    one, two = (np.append(words(*row), np.zeros(padding, dtype=np.int32)) for row in rows)
    merged = doses.merge(one, two, edits)
    assert merged[:edits].tolist() == [sum(pair) for pair in zip(*(counts for counts, _ in rows), strict=True)]
    together = [[*one, *two] for one, two in zip(*(sites for _, sites in rows), strict=True)]
    names = [f"resid_post.{number}" for number in range(len(together))]
    told = json.loads(json.dumps(doses.report(merged, edits, names, limited=limited), allow_nan=False))
    assert [one["site"] for one in told] == names
    for one, found in zip(told, together, strict=True):
        assert one["tokens"] == len(found)
        assert ("tokens_limited" in one) == limited
        assert one.get("tokens_limited", 0) == sum(above for _, above in found) * limited
        if not found:
            assert (one["max"], one["mean"]) == (None, None)
            continue
        # 4 digits: half a unit of the last one is at most 5e-4 of the number, and a float32 sum is off in the 7th.
        assert math.isclose(one["max"], max(value for value, _ in found), rel_tol=5.1e-4)
        mean = sum(value for value, _ in found) / len(found)
        assert math.isclose(one["mean"], mean, rel_tol=5.1e-4)


def test_numbers_have_four_digits() -> None:
    counters = words([80], [[(0.123456, False), (1 / 3, True)], []])
    assert doses.report(counters, 1, ["resid_post.3", "resid_mid.4"]) == [
        {"site": "resid_post.3", "max": 0.3333, "mean": 0.2284, "tokens": 2},
        {"site": "resid_mid.4", "max": None, "mean": None, "tokens": 0},
    ]
    assert doses.report(counters[:5], 1, ["resid_post.3"], limited=True)[0]["tokens_limited"] == 1
