"""What a request may cost before it is refused or planned: entries are counted as they are made, depth has a bound, and
twice the request is about twice the work.

Work is counted in lines of Python that run, so that a busy machine changes nothing.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import saesteer.planning.planner
from saesteer.config.modules import read_modules
from saesteer.errors import ConfigError, SpecError
from saesteer.language.edits import Mode
from saesteer.language.spec import (
    Spec,
    ablate,
    add,
    cap,
    clamp,
    from_json,
    reconstruct,
    use,
)
from saesteer.planning.expand import MAX_DEPTH
from saesteer.planning.messages import resolve
from saesteer.planning.plan import Catalog, Change, Plan
from saesteer.planning.planner import plan
from tests.spec.kinds import INFOS, SITES, VECTORS

P = 10
ANY = 2**31  # more entries than any spec makes


def catalog(max_entries: int = 64, **modules: Any) -> Catalog:
    return Catalog(
        INFOS, SITES, max_entries, VECTORS, {name: from_json({"edits": edits}) for name, edits in modules.items()}, 4
    )


def lines(work: Callable[[], object]) -> int:
    """Lines of Python that run."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(work: Callable[[int], Callable[[], object]], size: int) -> None:
    """Twice the size is at most two and a half times the work."""
    work(1)()  # what is cached for good is made here
    assert lines(work(2 * size)) <= 2.5 * lines(work(size))


def test_twice_the_work_would_be_seen() -> None:
    assert_linear(lambda size: lambda: [None for _ in range(size)], 1000)
    with pytest.raises(AssertionError):
        assert_linear(lambda size: lambda: [None for _ in range(size) for _ in range(size)], 100)


MODES: tuple[Mode, ...] = ("set", "min", "max")
BAND: tuple[tuple[Mode, float], ...] = (("min", 1.0), ("max", 2.0))

scopes = st.sampled_from(
    [None, {"generated": True}, {"positions": [[2, 4], [6, 8]]}, {"positions": [[2, 3], [3, 4], [9, None]]}]
)
gates = st.lists(
    st.builds(lambda n, above: {"dictionary": "gs15", "feature": n, "above": above}, st.integers(0, 2), st.just(1.0))
    | st.just({"probe": "any", "below": 2.0}),
    max_size=3,
)
clamps = st.builds(
    lambda feature, mode, when, scope: clamp("gs15", feature, 3.0, mode, when=when, scope=scope),
    st.integers(0, 2),
    st.sampled_from(MODES),
    gates.filter(lambda found: all("probe" not in one for one in found)),
    scopes,
)
bands = st.builds(
    lambda feature, when, scope: [clamp("gs15", feature, value, mode, when=when, scope=scope) for mode, value in BAND],
    st.integers(3, 9),
    gates,
    scopes,
)
vectors = st.builds(
    lambda make, site, when, scope: make(site, when, scope),
    st.sampled_from(
        [
            lambda site, when, scope: add("any", site, when=when, scope=scope),
            lambda site, when, scope: add("each", "resid_post", scope=scope),
            lambda site, when, scope: cap("any", site, max=1.0, when=when, scope=scope),
            lambda site, when, scope: ablate("any", site, when=when, scope=scope),
        ]
    ),
    st.sampled_from(["resid_post.15", "resid_mid.16", ["resid_post.16", "resid_post.20"]]),
    gates,
    scopes,
)
lists = st.lists(
    st.one_of(
        clamps.map(lambda one: [one]),
        bands,
        bands.map(lambda band: [*band, reconstruct("gs15", "keep", band[0].when, band[0].scope)]),
        vectors.map(lambda one: [one]),
        st.just([use("inner", 2.0)]),
        st.just([use("outer")]),
        st.just([reconstruct("gs15")]),
    ),
    max_size=6,
).map(lambda found: [edit for part in found for edit in part])


def outcome(spec: Spec, known: Catalog) -> Plan | SpecError:
    try:
        return plan(spec, known, P)
    except SpecError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(lists, lists, st.integers(-3, 3))
def test_the_limit_lets_through_what_a_count_of_the_whole_lets_through(edits: Any, inner: Any, away: int) -> None:
    inner = [one for one in inner if one.op != "use"]
    known = catalog(ANY, inner=inner, outer=[*inner[:2], use("inner")])
    spec = Spec(tuple(edits))
    whole = outcome(spec, known)
    if isinstance(whole, SpecError):
        assert whole.code != "too_many" or "31" in str(whole)
        for limit in (1, 4, 16, 64):
            assert isinstance(outcome(spec, replace(known, max_entries=limit)), SpecError)
        return
    count = sum(len(change.windows) for group in whole.groups for change in group.changes) + len(whole.conditions)
    limit = max(1, count + away)
    found = outcome(spec, replace(known, max_entries=limit))
    if count <= limit:
        assert found == whole
    else:
        assert isinstance(found, SpecError)
        assert (found.field, found.code) == ("saesteer.edits", "too_many")


MANY = {"positions": [[2 * n, 2 * n + 1] for n in range(1, 4097)]}
GATES = [{"dictionary": "gs15", "feature": n, "above": 1.0} for n in range(16)]
TOO_LARGE: dict[str, list[Any]] = {
    "uses of a large module": [use("large")] * 64,
    "uses of a module with many windows": [use("windows")] * 64,
    "adds at all layers": [add("each", "resid_post")] * 4096,
    "caps with gates": [cap("any", ["resid_post.15", "resid_post.16"], 1.0, when=GATES) for _ in range(500)],
    "gates alone": [clamp("gs20", 1, 1.0, when=[{**one, "above": float(n)} for one in GATES]) for n in range(500)],
}


@pytest.mark.parametrize("edits", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_before_it_is_made(edits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    large = [clamp("gs15", n % 100, 1.0) for n in range(4000)]
    known = catalog(64, large=large, windows=[clamp("gs15", 1, 1.0, scope=MANY)])
    changes = Mock(wraps=Change)
    monkeypatch.setattr(saesteer.planning.planner, "Change", changes)
    with pytest.raises(SpecError, match="makes more than 64 entries with ") as caught:
        plan(from_json({"edits": edits}), known, P)
    assert (caught.value.field, caught.value.code) == ("saesteer.edits", "too_many")
    assert changes.call_count <= 64 + 1


def test_planning_is_linear_in_the_edits() -> None:
    known = catalog(ANY)

    def gated(n: int) -> Any:
        return cap(
            "any", ["resid_post.15", "resid_post.20"], 1.0, when=GATES[:8], scope={"positions": [[n + 1, n + 3]]}
        )

    def banded(n: int) -> Any:
        return clamp("gs15", n // 2 % 100, 1.0, ("min", "max")[n % 2], scope={"positions": [[n // 2, n // 2 + 1]]})

    for one in (gated, banded):
        assert_linear(lambda size, one=one: (lambda spec: lambda: plan(spec, known, P))(  # type: ignore[misc]
            from_json({"edits": [one(n + 2) for n in range(size)]})), 100)  # fmt: skip


def chain(length: int) -> dict[str, Any]:
    """Modules each of which uses the next; the one that uses none stands last."""
    return {f"m{n}": [use(f"m{n + 1}")] if n + 1 < length else [clamp("gs15", 1, 1.0)] for n in range(length)}


def test_a_server_does_not_start_with_modules_that_no_request_could_use() -> None:
    wire = {name: Spec(tuple(edits)).to_json() for name, edits in chain(MAX_DEPTH).items()}
    assert len(read_modules(wire, dictionaries=["gs15"], vectors=[])) == MAX_DEPTH
    for length in (MAX_DEPTH + 1, 600):
        wire = {name: Spec(tuple(edits)).to_json() for name, edits in chain(length).items()}
        with pytest.raises(ConfigError, match=f"^module 'm0': .* expected at most {MAX_DEPTH}"):
            read_modules(wire, dictionaries=["gs15"], vectors=[])


def test_no_more_edits_are_looked_at_than_the_server_takes_entries() -> None:
    asked = 0

    def spans(runs: Any, at: str) -> Any:
        nonlocal asked
        asked += 1
        return [(2 * first, 2 * end) for first, end in runs]

    spec = Spec(tuple(clamp("gs15", n, 1.0, scope={"messages": [n]}) for n in range(100)))
    with pytest.raises(SpecError, match="makes 13 intervals up to here, expected at most 12") as caught:
        resolve(spec, catalog(4), 200, ["user"] * 100, spans)
    assert (caught.value.field, caught.value.code, asked) == (
        "saesteer.edits[12].scope.messages",
        "too_many",
        13,
    )
    first = {"messages": [1]}
    three: list[Any] = [clamp("gs15", 1, value, mode, scope=first) for mode, value in BAND]
    three.append(reconstruct("gs15", "keep", scope=first))
    assert plan(resolve(Spec(tuple(three)), catalog(1), 200, ["user"] * 2, spans), catalog(1), 200)
