"""What reads bring home: how many bytes, together or alone, and what must be computed again for it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.errors import SpecError
from saesteer.planning.plan import END, Readout
from saesteer.planning.readouts import declared, first_recomputed, refuse_above
from saesteer.planning.together import together
from tests.spec.plans import P
from tests.spec.reads import CATALOG, KEPT, features, planned


def test_the_first_position_that_is_computed_again() -> None:
    def first(*scopes: tuple[Any, str], prompt_len: int = P) -> int | None:
        wanted = [
            {"site": site, "scope": scope, "cached": cached}
            for site, (scope, cached) in zip(sorted(KEPT), scopes, strict=False)
        ]
        return first_recomputed(planned(activations=wanted), prompt_len)

    assert first() is None
    assert first(({"generated": True}, "recompute")) is None
    assert first(({}, "recompute")) == 0
    assert first(({}, "skip")) is None
    assert first(({"positions": [[-1, None]]}, "recompute"), ({}, "skip")) == P - 1
    assert first(({"positions": [[7, 9], [4, 5]]}, "recompute"), ({"positions": [[6, 7]]}, "recompute")) == 4
    assert first_recomputed(planned(hidden=True), P) is None
    assert first_recomputed(planned(hidden={"scope": {"positions": [[3, 4]]}}), P) == 3


near_windows = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=4).map(
    lambda pairs: tuple((10 * n + low % 8, 10 * n + low % 8 + min(length, 2)) for n, (low, length) in enumerate(pairs))
)
drawn = st.builds(
    Readout,
    st.sampled_from(["features", "probe", "activation", "hidden"]),
    st.just("x"),
    st.sampled_from(["resid_post.3", "z.3", None]),
    st.none(),
    st.booleans(),
    near_windows | near_windows.map(lambda found: (*found, (60, END))),
    top_k=st.integers(0, 9),
    features=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    reduce=st.sampled_from(["none", "mean", "max", "last"]),
    recompute=st.booleans(),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(drawn, max_size=4), st.integers(1, 70), st.integers(1, 30), st.sampled_from([2, 4]))
def test_declared_bytes_are_those_of_each_number(
    found: list[Readout], prompt_len: int, max_tokens: int, itemsize: int
) -> None:
    """Position by position, in a sequence whose last token is never an input."""
    total = 0
    lowest = None
    for readout in found:
        rows = 0
        for position in range(prompt_len + max_tokens - 1):
            if any(low <= position < high for low, high in readout.windows):
                rows += 1 if readout.reduce == "none" or rows == 0 else 0
                if position < prompt_len and readout.recompute:
                    lowest = position if lowest is None else min(lowest, position)
        for _ in range(rows):
            if readout.kind == "features":
                total += readout.top_k * (4 + 4) + 4 * len(readout.features)
            elif readout.kind == "probe":
                total += 4
            else:
                number = itemsize if readout.reduce == "none" else 4  # reductions are float32
                total += number * (7 if readout.site == "z.3" else 4)
    assert sum(declared(found, CATALOG, prompt_len + max_tokens - 1, itemsize)) == total
    assert first_recomputed(found, prompt_len) == lowest


def test_the_last_hidden_state_is_one_row() -> None:
    assert declared(planned(hidden=True), CATALOG, P, 2) == [4 * 2]
    assert declared(planned(**features()), CATALOG, P, 2) == [0], "the only generated token is never an input"


def test_more_bytes_than_the_limit_are_refused() -> None:
    refuse_above(100, 100)
    with pytest.raises(SpecError, match=r"may read 101 bytes, expected at most 100.*--max-read-mib") as caught:
        refuse_above(100, 101)
    assert (caught.value.field, caught.value.code) == ("saesteer.return", "too_large")


def test_neighbours_that_differ_in_their_site_or_probe_alone_travel_as_one() -> None:
    mean = {"reduce": "mean"}
    asked = [("resid_post.15", {}), ("mlp_in.15", {}), ("z.15", {}), ("resid_post.20", mean), ("resid_mid.15", mean)]
    asked += [("resid_mid.15", {"at": "after"}), ("resid_post.15", {"at": "after", "cached": "skip"})]
    probes = ["one", {"probe": "each", "site": "resid_post.15"}]
    found = planned(probes=probes, activations=[{"site": site, **more} for site, more in asked])
    scored, *sites = [[one.site for one in several] for several in together(found, CATALOG)]
    assert scored == ["resid_post.15", "resid_post.15"]
    asked_after = [{"probe": "wide", "site": "z.15"}, {"probe": "any", "site": "mlp_in.15", "at": "after"}, "one"]
    assert [len(several) for several in together(planned(probes=asked_after), CATALOG)] == [1, 1, 1]
    assert sites[:2] == [["resid_post.15", "mlp_in.15"], ["z.15"]], "z is wider"
    assert sites[2:] == [["resid_post.20", "resid_mid.15"], ["resid_mid.15"], ["resid_post.15"]]
