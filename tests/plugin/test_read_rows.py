"""What was read on its way into an answer, with steps and preemptions made up. Starts no engine."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")


from saesteer.engine.readouts import Reading
from saesteer.planning.answers import Rows
from saesteer.planning.plan import END, Direction, Window
from saesteer.plugin.results import reads, sending
from tests.plugin.blobs import SITE, Shelf, blob, inside, numbers, of_kind, readout, row, strongest
from tests.spec.scopes import windows

WIDTH = 3


@given(
    data=st.data(),
    prompt=st.integers(1, 14),
    generated=st.integers(1, 9),
    streams=st.booleans(),
    scopes=st.lists(windows(), min_size=6, max_size=6),
)
def test_each_position_once_however_it_is_computed(
    data: st.DataObject, prompt: int, generated: int, streams: bool, scopes: list[list[Window]]
) -> None:
    """In chunks, again behind preemptions, and with steps behind the last token that counts."""
    named = {"top_k": 2, "features": (8,)}
    reported = [
        readout("features", scopes[0], **named),
        readout("probe", scopes[1], probe=Direction("p", 3)),
        readout("activation", scopes[2]),
        readout("activation", scopes[3], reduce="mean"),
        readout("activation", scopes[4], reduce="max"),
        readout("activation", scopes[5], reduce="last"),
        readout("hidden", (), last=True),
    ]
    fields: dict[str, Any] = {}
    rows = Rows(reported, fields)
    made, computed, end, waiting = 0, 0, prompt + generated - 1, []
    steps = iter(data.draw(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 2)), max_size=30)))
    while made < generated:
        chunk, preempted, more = next(steps, (8, False, 1))
        if preempted:
            computed = 0
        known = prompt + made
        step = min(known, computed + chunk)
        over = step + more if made == generated - 1 and step == known else step
        for number, (one, *_) in enumerate(reported):
            for lo, hi in ((computed, step), (step, over)):
                spans = inside(one.windows, lo, hi)
                if spans:
                    waiting.append(blob(number, one, spans))
        if step == known:
            waiting.append([6, [[step - 1, step]], np.array(row(step - 1), "<f4").tobytes()])
            made += 1
            rows.add(waiting)
            waiting = []
            final = made == generated
            if streams or final:
                rows.tell(prompt, made, final=final)
                positions = [one["position"] for entry in fields["features"] for one in entry["rows"]]
                assert positions == [p for lo, hi in scopes[0] for p in range(lo, min(hi, prompt + made - 1))], (
                    "all that were inputs"
                )
        computed = step

    for entries in (fields["features"], fields["probes"], of_kind(fields, "activation")):
        empty = [one for one in entries if not one.get("rows", one.get("positions"))]
        assert not empty or len(entries) == 1, "an empty entry only where nothing was read"
    expected = [[p for lo, hi in scope for p in range(lo, min(hi, end))] for scope in scopes]
    assert {key: {one["name"] for one in entries} for key, entries in fields.items()} == {
        "features": {"features"},
        "probes": {"probe"},
        "activations": {"activation", "activation mean", "activation max", "activation last"},
        "hidden": {"hidden"},
    }
    told = [one for entry in fields["features"] for one in entry["rows"]]
    assert told == [
        {
            "position": p,
            "top": [[f, f / 2] for f in strongest(p) if f >= 0],
            "features": {"8": row(p)[0]},
        }
        for p in expected[0]
    ]
    scores = [pair for entry in fields["probes"] for pair in zip(entry["positions"], entry["scores"], strict=True)]
    assert scores == [(p, row(p)[0]) for p in expected[1]]
    tensors = of_kind(fields, "activation")
    whole = [pair for one in tensors for pair in zip(one["positions"], numbers(one), strict=True)]
    assert whole == [(p, row(p)) for p in expected[2]]
    for how, at in zip(("mean", "max", "last"), expected[3:], strict=True):
        (one,) = of_kind(fields, f"activation {how}")
        assert one["tokens"] == len(at)
        if not at:
            assert (one["positions"], one["shape"]) == ([], [0, 0])
            continue
        assert one["positions"] == [at[0], at[-1] + 1]
        x = np.array([row(p) for p in at])
        assert numbers(one) == [{"mean": x.mean(0), "max": x.max(0), "last": x[-1]}[how].astype(np.float32).tolist()]
    (last,) = fields["hidden"]
    assert (last["positions"], numbers(last)) == ([end - 1], [row(end - 1)])


STARTS = (0, 5, 9, 9)


@settings(deadline=None)
@given(
    scope=windows(),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    again=st.integers(0, 12),
    end=st.integers(10, 16),
)
def test_each_message_has_a_mean_of_its_own(scope: list[Window], chunks: list[int], again: int, end: int) -> None:
    """In chunks, and once more from the beginning behind a preemption; a message without tokens is in no row."""
    reported = readout("activation", scope, reduce="message", starts=STARTS)
    reading = Reading("activation", (SITE,), False, scope, False, "message", None, 0, (), STARTS)
    fields: dict[str, Any] = {}
    rows = Rows([reported], fields)
    for steps in (chunks[:again], [*chunks, 99]) if again else ([*chunks, 99],):
        computed = 0
        for tokens in steps:
            tokens = min(tokens, end - computed)
            found = [*reading.parts(computed, tokens)] if tokens > 0 else []
            asked = [p for lo, hi in inside(scope, computed, computed + tokens) for p in range(lo, hi)]
            assert [p for spans in found for lo, hi in spans for p in range(lo, hi)] == asked
            as_mean = replace(reported.readout, reduce="mean")
            rows.add([blob(0, as_mean, spans) for spans in found])
            computed += tokens
    rows.tell(9, end - 8, final=True)
    [entry] = fields["activations"]
    expected = []
    for index, lo, hi in ((0, 0, 5), (1, 5, 9), (3, 9, end)):
        at = [p for a, b in inside(scope, lo, hi) for p in range(a, b)]
        if at:
            mean = np.array([row(p) for p in at]).mean(0).astype(np.float32).tolist()
            expected.append((index, [at[0], at[-1] + 1], len(at), mean))
    told = zip(entry["messages"], entry["positions"], entry["tokens"], numbers(entry), strict=True)
    assert [*told] == expected
    assert entry["shape"] == [len(expected), WIDTH if expected else 0]


def test_what_the_cache_had_is_left_out_and_what_a_preemption_computes_counts_once() -> None:
    """Of a prompt of 8 tokens with 4 in the cache; then all is computed, and a stream does not go back."""
    for streams, at in ((True, [4, 5, 6, 7, 8]), (False, [*range(9)])):
        fields: dict[str, Any] = {}
        rows = Rows([readout("probe", [(0, END)], probe=Direction("p", 3))], fields)
        one = rows._readouts[0].readout
        rows.add([blob(0, one, [(4, 8)])])
        if streams:
            rows.tell(8, 1, final=False)
        rows.add([blob(0, one, [(0, 6)]), blob(0, one, [(6, 9)])])
        rows.tell(8, 2, final=True)
        assert [p for entry in fields["probes"] for p in entry["positions"]] == at


def test_an_answer_that_read_nothing_has_empty_entries() -> None:
    fields: dict[str, Any] = {}
    found = [
        readout("features", [(9, END)], top_k=8),
        readout("probe", [(9, END)], probe=Direction("p", 3)),
        readout("activation", [(9, END)]),
    ]
    rows = Rows(found, fields)
    rows.tell(9, 0, final=False)
    assert fields == {"features": [], "probes": [], "activations": []}
    rows.tell(9, 1, final=True)
    empty = {"positions": [], "dtype": "float32", "shape": [0, 0], "data": ""}
    assert fields == {
        "features": [{"name": "features", "rows": []}],
        "probes": [{"name": "probe", "positions": [], "scores": []}],
        "activations": [{"name": "activation", **empty}],
    }


HOWS = ("none", "mean", "max", "last")


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
        readout("activation", scopes[6], inline=False)._replace(abouts=({"name": "kept"},)),
        readout("hidden", (), last=True),
    ]
    fields: dict[str, Any] = {}
    rows, waiting, read = Rows(found, fields, [Shelf([], 1, 12)]), list[Any](), set[int]()
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


def pieces(spans: Sequence[Window], starts: Sequence[int]) -> list[list[Window]]:
    """The spans, cut where messages begin."""
    found = []
    for lo, hi in spans:
        cuts = [lo, *(at for at in sorted(set(starts)) if lo < at < hi), hi]
        found += [[(a, b)] for a, b in pairwise(cuts)]
    return found


@given(
    how=st.sampled_from(["none", "mean", "max", "last", "message"]),
    scope=windows(),
    sites=st.integers(1, 4),
    prompt=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    streams=st.booleans(),
    kept=st.booleans(),
)
def test_rows_of_several_sites_are_told_as_if_they_had_come_alone(
    how: Any, scope: list[Window], sites: int, prompt: int, chunks: list[int], streams: bool, kept: bool
) -> None:
    starts = STARTS if how == "message" else ()
    one = readout("activation", scope, reduce=how, starts=starts, inline=not kept)
    names = [{"name": f"site {at}"} for at in range(sites)]
    store: list[tuple[Any, bytes]] = []

    apart: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    alone = Rows([one._replace(abouts=(name,)) for name in names], apart, [Shelf(store, 1) for _ in names])
    both = Rows([one._replace(abouts=tuple(names))], joined, [Shelf(store, sites)])
    computed = 0
    for tokens in chunks:
        asked = inside(scope, computed, computed + tokens)
        for spans in pieces(asked, starts) if how == "message" else [asked] * bool(asked):
            at = [p for lo, hi in spans for p in range(lo, hi)]
            x = np.array([[[*row(p), site] for site in range(sites)] for p in at], dtype="<f4")
            made = {"none": x, "max": x.max(0), "last": x[-1]}.get(how, x.sum(0)).astype("<f4")
            both.add([[0, spans, made.tobytes()]])
            alone.add([[n, spans, made[..., n, :].tobytes()] for n in range(sites)])
        computed += tokens
        if streams and computed > prompt:
            alone.tell(prompt, computed - prompt, final=False)
            both.tell(prompt, computed - prompt, final=False)
    for rows in (alone, both):
        rows.tell(prompt, max(1, computed - prompt), final=True)

    def numbered(fields: Any) -> list[Any]:
        found = sorted(fields["activations"], key=lambda entry: entry["name"])
        return [{name: value for name, value in entry.items() if name != "handle"} for entry in found]

    assert numbered(joined) == numbered(apart)
    half = len(store) // 2
    assert sorted(map(repr, store[:half])) == sorted(map(repr, store[half:]))


def test_rows_wait_for_the_end_of_an_answer_that_comes_whole() -> None:
    """Each output that carries something costs both processes; many pieces go before, so no output has too much."""
    asked = {name: {"saesteer": {"whole": name == "whole"}} for name in ("whole", "streamed")}
    params = {name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra)) for name, extra in asked.items()}
    scheduler: Any = SimpleNamespace(requests=params)
    found: dict[str, list[int]] = {name: [] for name in asked}
    for step in range(reads.MOST + 3):
        ends = "length" if step == reads.MOST + 2 else None
        outputs = [SimpleNamespace(request_id=name, kv_transfer_params=None, finish_reason=ends) for name in asked]
        made = {name: [[0, [[step, step + 1]], b"x"]] for name in asked}
        brought: Any = SimpleNamespace(blobs=lambda *_: made, told=dict, owed=lambda _: {})  # noqa: B023
        assert reads.send(scheduler, {0: SimpleNamespace(outputs=outputs)}, brought, frozenset(), {}) == {}
        for output in outputs:
            found[output.request_id] += [len(blobs) for _, blobs in sending.carried(output)]
    assert found == {"whole": [reads.MOST, 3], "streamed": [1] * (reads.MOST + 3)}
