"""Answers name what the prefix cache had of a read that skips it, with caches, steps and preemptions made up."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.planning.answers import Rows
from saesteer.planning.plan import END, Direction
from tests.plugin.blobs import blob, inside, of_kind, readout
from tests.spec.scopes import windows

HOWS = ("none", "mean", "max", "last")
SHELF = SimpleNamespace(width=12, write=lambda *_: None, keep=lambda entries, _: ["a handle"] * len(entries))


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    prompt=st.integers(1, 14),
    generated=st.integers(0, 6),
    streams=st.booleans(),
    scopes=st.lists(windows(), min_size=7, max_size=7),
)
def test_what_was_read_and_what_was_cached_are_the_scope(
    data: st.DataObject, prompt: int, generated: int, streams: bool, scopes: Any
) -> None:
    """Each position is in one of both; a rule ends the answer in its prompt where there is no generated token."""
    cached = data.draw(st.integers(0, prompt - 1), label="cached")
    found = [
        readout("features", scopes[0], top_k=2, features=(8,)),
        readout("probe", scopes[1], probe=Direction("p", 3)),
        *(readout("activation", scope, reduce=how) for how, scope in zip(HOWS, scopes[2:6], strict=True)),
        readout("activation", scopes[6], inline=False)._replace(about={"name": "kept"}),
        readout("hidden", (), last=True),
    ]
    fields: dict[str, Any] = {}
    rows, waiting, read = Rows(found, fields, [SHELF]), list[Any](), set[int]()
    first = min((scope[0][0] for scope in scopes if scope), default=END)  # where a preempted request begins at last
    told, at = 0, cached
    ends_in = data.draw(st.integers(cached + 1, prompt), label="ends in") if not generated else END
    while True:
        at = min(at, data.draw(st.integers(0, first))) if not data.draw(st.integers(0, 3), label="preempted") else at
        step = min(prompt + told, at + data.draw(st.integers(1, 8)))
        for number, (one, *_) in enumerate(found):
            if spans := inside(one.windows, at, step):
                waiting.append(blob(number, one, spans))
        read.update(range(at, step))
        at = step
        if at >= ends_in or at == prompt + told:
            told += bool(generated)
            rows.add(waiting)
            waiting, final = [], told == generated
            if streams or final:
                rows.tell(prompt, told, final=final, cached=cached)
            if final:
                break
    end = prompt + max(0, generated - 1)
    all_ = {"features": fields["features"], "probe": fields["probes"]}
    all_ |= {name: of_kind(fields, name) for name in (*(f"activation {how}" for how in HOWS), "kept")}
    for scope, (name, (entry, *later)) in zip(scopes, all_.items(), strict=True):
        assert not any("cached" in one for one in later), name
        skipped = {p for lo, hi in entry.get("cached", ()) for p in range(lo, hi)}
        asked = {p for lo, hi in scope for p in range(lo, min(hi, end))}
        has = [
            one["position"] if isinstance(one, dict) else one
            for entry in (entry, *later)
            for one in entry.get("rows", entry.get("positions"))
        ]
        if "tokens" in entry:
            has = sorted(asked & read)
            assert entry["tokens"] == len(has) and entry["positions"] == ([has[0], has[-1] + 1] if has else [])
        assert skipped.isdisjoint(has) and all(p < cached for p in skipped), name
        assert skipped | set(has) == (asked if generated else asked & (read | {*range(cached)})), name
        assert entry.get("cached") != [] and all(lo < hi for lo, hi in entry.get("cached", ())), name
    assert "cached" not in fields["hidden"][0]


def test_all_sites_of_a_read_say_it() -> None:
    fields: dict[str, Any] = {}
    one = readout("activation", [(0, 3), (5, 7)])._replace(about={"name": "a"}, beside=({"name": "b"},))
    rows = Rows([one], fields)
    rows.tell(8, 1, final=True, cached=6)
    assert [(entry["name"], entry["cached"]) for entry in fields["activations"]] == [
        (name, [[0, 3], [5, 6]]) for name in "ab"
    ]


def test_rows_in_files_come_in_the_order_in_which_they_were_computed() -> None:
    """Of a scope that was cached in part, and computed as a whole behind a preemption."""
    fields: dict[str, Any] = {}
    rows = Rows([readout("activation", [(1, 3), (5, END)], inline=False)], fields, [SHELF])
    rows.add([[0, [(5, 9), (1, 3), (5, 9)]]])
    rows.tell(8, 3, final=True, cached=4)
    [entry] = fields["activations"]
    assert entry["positions"] == [1, 2, *range(5, 9)] and "cached" not in entry
