"""What was read on its way into an answer, with steps and preemptions made up. Starts no engine."""

from base64 import b64decode
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.readouts import Blob, Brought, Part, Reading
from saesteer.planning.plan import END, Direction, Readout, Window
from saesteer.plugin.results import counts, reads
from saesteer.plugin.results.reads import READ, Reported, Rows

SITE = "resid_post.3"
WIDTH = 3


def readout(kind: Any, windows: Sequence[Window], **more: Any) -> Reported:
    """A readout by a name of its own."""
    made = Readout(kind, "saesteer.return", SITE, SITE, after=False, windows=tuple(windows), **more)
    return Reported(made, {"name": f"{kind} {more.get('reduce', '')}".strip()}, "float32")


def row(at: int) -> list[float]:
    """The tensor of a position: whole numbers, whose sums are exact, with maxima at several positions."""
    return [float(at), float(-at), float(at * 7 % 5)]


def strongest(at: int) -> list[int]:
    """Fewer active features at odd positions."""
    return [at % 11, -1] if at % 2 else [at % 11, 11 + at % 3]


def blob(number: int, one: Readout, spans: list[Window]) -> Blob:
    """What the worker sends for these positions."""
    at = [p for lo, hi in spans for p in range(lo, hi)]
    x = np.array([row(p) for p in at], dtype="<f4")
    if one.kind == "features":
        indices = np.array([strongest(p) for p in at], dtype="<i4")
        arrays = [indices, indices.astype("<f4") / 2, x[:, :1]]
    elif one.kind == "probe":
        arrays = [x[:, 0]]
    else:
        arrays = [{"none": x, "mean": x.sum(0), "max": x.max(0), "last": x[-1]}[one.reduce]]
    return [number, [list(span) for span in spans], *(array.astype(array.dtype).tobytes() for array in arrays)]


def inside(windows: Sequence[Window], lo: int, hi: int) -> list[Window]:
    return [(max(lo, a), min(hi, b)) for a, b in windows if max(lo, a) < min(hi, b)]


def numbers(entry: Any) -> Any:
    return np.frombuffer(b64decode(entry["data"]), "<f4").reshape(entry["shape"]).tolist()


def of_kind(fields: Any, name: str) -> list[Any]:
    return [one for one in fields["activations"] if one["name"] == name]


@st.composite
def windows(draw: Any) -> list[Window]:
    """Disjoint, ascending; the last may be open."""
    cuts = sorted(draw(st.sets(st.integers(0, 24), max_size=6)))
    found = [*zip(cuts[::2], cuts[1::2], strict=False)]
    return found + ([(cuts[-1], END)] if len(cuts) % 2 else [])


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


PROBE = Reading("probe", SITE, False, [(0, END)], False, "none", None, 0, ())
LAST = Reading("hidden", None, True, (), True, "none", None, 0, ())


def brought(*found: tuple[str, Reading, int]) -> Brought:
    """One position of each of these requests."""
    parts: list[tuple[Part, tuple[torch.Tensor, ...]]] = [
        (Part(name, number, reading, [(at, at + 1)], 0, 1), (torch.tensor([[float(at)]]),))
        for number, (name, reading, at) in enumerate(found)
    ]
    return Brought(parts)


def output(name: str, finish: Any = None, sent: Any = None) -> Any:
    return SimpleNamespace(request_id=name, finish_reason=finish, kv_transfer_params=sent)


def send(scheduler: Any, made: list[Any], found: Brought | None, stops: Sequence[str] = ()) -> dict[str, list[Any]]:
    """What the outputs carry, as number and positions."""
    reads.send(scheduler, {0: SimpleNamespace(outputs=made)}, found, frozenset(stops))
    return {
        one.request_id: [(number, *spans) for number, spans, _ in one.kv_transfer_params[READ]]
        for one in made
        if READ in (one.kv_transfer_params or {})
    }


def test_what_is_read_waits_for_its_request_s_next_output() -> None:
    scheduler = SimpleNamespace(requests={"a": 1, "b": 2})
    assert send(scheduler, [output("b")], brought(("a", PROBE, 0), ("b", PROBE, 5))) == {"b": [(1, (5, 6))]}
    assert send(scheduler, [output("b")], None) == {}
    kept = output("a", sent={"other": 7})
    assert send(scheduler, [kept], brought(("a", PROBE, 1))) == {"a": [(0, (0, 1)), (0, (1, 2))]}
    assert kept.kv_transfer_params["other"] == 7
    assert scheduler.saesteer_read == {}


def test_the_row_of_the_last_token_comes_only_where_an_answer_may_end() -> None:
    scheduler = SimpleNamespace(requests=dict.fromkeys("abc"))
    made = [output("a"), output("b", "length"), output("c")]
    found = brought(("a", LAST, 3), ("b", LAST, 4), ("c", LAST, 5))
    assert send(scheduler, made, found, ["c"]) == {"b": [(1, (4, 5))], "c": [(2, (5, 6))]}
    assert scheduler.saesteer_read == {}


def test_a_step_in_which_nobody_is_steered_lets_go_of_what_an_aborted_request_has_read() -> None:
    outputs: dict[int, Any] = {}
    scheduler = SimpleNamespace(requests={"a": 1}, finished_req_ids=set())
    step = partial(counts._sending(lambda *_: outputs), scheduler, None)
    send(scheduler, [], brought(("a", PROBE, 0)))
    assert step(SimpleNamespace()) is outputs
    assert set(scheduler.saesteer_read) == {"a"}
    scheduler.requests.clear()
    assert step(SimpleNamespace()) is outputs
    assert scheduler.saesteer_read == {}


def test_nothing_is_kept_for_a_request_that_has_ended() -> None:
    scheduler = SimpleNamespace(requests=dict.fromkeys("ab"))
    send(scheduler, [], brought(("a", PROBE, 0), ("b", PROBE, 0)))
    assert set(scheduler.saesteer_read) == {"a", "b"}
    del scheduler.requests["a"]
    send(scheduler, [], None)
    assert set(scheduler.saesteer_read) == {"b"}
    send(scheduler, [], brought(("a", PROBE, 1)))  # a step that was on its way
    assert set(scheduler.saesteer_read) == {"b"}
