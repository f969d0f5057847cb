"""Positions whose rows are in files, on their way through the scheduler: they come once, when an answer may end."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.brought import Brought, Made, Part
from saesteer.engine.readouts import Reading
from saesteer.planning.plan import END
from saesteer.plugin.results import reads
from saesteer.plugin.results.reads import READ
from tests.plugin.test_read_rows import PROBE, brought, output

FILED = Reading("activation", ("resid_post.3",), False, [(0, END)], False, "none", None, 0, ())
NAMES = ("a", "b", "c")


def filed(*found: tuple[str, int, int, int]) -> Brought:
    """Rows of readouts that are in files: request, readout, and the positions from one to another."""
    return Brought([Made([Part(name, number, FILED, [(lo, hi)], 0, hi - lo) for name, number, lo, hi in found], ())])


def send(scheduler: Any, made: list[Any], found: Brought | None, stops: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    reads.send(scheduler, {0: SimpleNamespace(outputs=made)}, found, frozenset(stops))
    return {one.request_id: one.kv_transfer_params[READ] for one in made if one.kv_transfer_params}


def test_they_come_with_the_last_output_as_one_span() -> None:
    scheduler = SimpleNamespace(requests=dict.fromkeys("ab"))
    for at in range(5):
        both = [output("a"), output("b")]
        assert send(scheduler, both, filed(("a", 0, at, at + 1), ("a", 1, at, at + 1), ("b", 0, at, at + 1))) == {}
    assert send(scheduler, [output("a", "stop"), output("b")], filed(("a", 0, 5, 6))) == {
        "a": [[0, [(0, 6)]], [1, [(0, 5)]]]
    }
    del scheduler.requests["a"]
    assert send(scheduler, [output("b")], None) == {}
    assert set(scheduler.saesteer_filed) == {"b"}
    scheduler.requests.clear()  # b was aborted
    assert send(scheduler, [], None) == {}
    assert scheduler.saesteer_filed == scheduler.saesteer_read == {}


def test_rows_that_come_along_do_not_wait_for_them() -> None:
    scheduler = SimpleNamespace(requests=dict.fromkeys("a"))
    both = Brought([*filed(("a", 1, 0, 1)).made, *brought(("a", PROBE, 0)).made])
    (blob,) = send(scheduler, [output("a")], both)["a"]
    assert blob[:2] == [0, [(0, 1)]] and len(blob) == 3
    assert send(scheduler, [output("a", "length")], None) == {"a": [[1, [(0, 1)]]]}


@given(st.data())
def test_each_request_gets_all_of_its_own_in_time(data: st.DataObject) -> None:
    """In chunks, again behind preemptions, with outputs in some steps; whoever has stop strings may end in any."""
    scheduler = SimpleNamespace(requests=dict.fromkeys(NAMES))
    stops = tuple(data.draw(st.lists(st.sampled_from(NAMES), unique=True)))
    at = dict.fromkeys(NAMES, 0)
    wanted: dict[str, set[int]] = {name: set() for name in NAMES}
    found: dict[str, set[int]] = {name: set() for name in NAMES}

    def take(sent: dict[str, list[Any]]) -> None:
        for name, blobs in sent.items():
            for number, spans in blobs:
                assert number == 0
                found[name].update(p for lo, hi in spans for p in range(lo, hi))

    for _ in range(data.draw(st.integers(1, 12))):
        step, outputs = [], []
        for name in data.draw(st.lists(st.sampled_from(NAMES), unique=True)):
            if data.draw(st.integers(0, 5)) == 0:
                at[name] = 0
            tokens = data.draw(st.integers(1, 4))
            step.append((name, 0, at[name], at[name] + tokens))
            wanted[name].update(range(at[name], at[name] + tokens))
            at[name] += tokens
            if data.draw(st.booleans()):
                outputs.append(output(name))
        sent = send(scheduler, outputs, filed(*step) if step else None, stops)
        assert sent.keys() <= set(stops)
        take(sent)
        for one in outputs:
            assert one.request_id not in stops or found[one.request_id] == wanted[one.request_id]
    take(send(scheduler, [output(name, "stop") for name in NAMES], None))
    assert found == wanted
    assert scheduler.saesteer_filed == scheduler.saesteer_read == {}
