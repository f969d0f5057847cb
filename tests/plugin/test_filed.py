"""Positions whose rows are in files, on their way through the scheduler: they come once, when an answer may end."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.brought import Brought
from saesteer.engine.spool import Filed
from saesteer.plugin.results import reads
from saesteer.plugin.results.reads import READ
from tests.plugin.test_read_rows import PROBE, brought, output

NAMES = ("a", "b", "c")


class Files(Filed):
    """A worker's files, to which each step adds what it has written; in this process."""

    def __init__(self, written: dict[str, dict[int, list[tuple[int, int]]]]) -> None:
        self.written = written

    def settle(self, ending: Any = None) -> dict[str, list[list[Any]]]:
        names = [name for name in self.written if ending is None or name in ending]
        return {name: [[number, spans] for number, spans in self.written.pop(name).items()] for name in names}


class Worker:
    """What it has written, and of which nobody was told.

    Args:
        sent: whether what it says goes to another process, step by step.
    """

    def __init__(self, *, sent: bool) -> None:
        self.sent = sent
        self.written: dict[str, dict[int, list[tuple[int, int]]]] = {}

    def step(self, *found: tuple[str, int, int, int]) -> Brought:
        """Rows of readouts that are in files: request, readout, and the positions from one to another."""
        for name, number, lo, hi in found:
            self.written.setdefault(name, {}).setdefault(number, []).append((lo, hi))
        made = Brought([], None, Files(self.written))
        return pickle.loads(pickle.dumps(made)) if self.sent else made


def send(scheduler: Any, made: list[Any], found: Brought | None, stops: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    reads.send(scheduler, {0: SimpleNamespace(outputs=made)}, found, frozenset(stops))
    return {one.request_id: one.kv_transfer_params[READ] for one in made if one.kv_transfer_params}


def positions(blobs: list[Any]) -> dict[int, list[int]]:
    """By number of the readout."""
    found: dict[int, list[int]] = {}
    for number, spans in blobs:
        found.setdefault(number, []).extend(at for lo, hi in spans for at in range(lo, hi))
    return found


@pytest.mark.parametrize("sent", [False, True])
def test_they_come_with_the_last_output(sent: bool) -> None:
    scheduler, worker = SimpleNamespace(requests=dict.fromkeys("ab")), Worker(sent=sent)
    for at in range(5):
        both = [output("a"), output("b")]
        assert (
            send(scheduler, both, worker.step(("a", 0, at, at + 1), ("a", 1, at, at + 1), ("b", 0, at, at + 1))) == {}
        )
    told = send(scheduler, [output("a", "stop"), output("b")], worker.step(("a", 0, 5, 6)))
    assert told.keys() == {"a"} and positions(told["a"]) == {0: [*range(6)], 1: [*range(5)]}
    del scheduler.requests["a"]
    assert send(scheduler, [output("b")], None) == {}
    assert set(scheduler.saesteer_filed) == ({"b"} if sent else set())
    scheduler.requests.clear()  # b was aborted
    assert send(scheduler, [], None) == {}
    assert scheduler.saesteer_filed == scheduler.saesteer_read == {}


def test_rows_that_come_along_do_not_wait_for_them() -> None:
    scheduler = SimpleNamespace(requests=dict.fromkeys("a"))
    worker = Worker(sent=False)
    worker.step(("a", 1, 0, 1))
    (blob,) = send(scheduler, [output("a")], Brought(brought(("a", PROBE, 0)).made, None, Files(worker.written)))["a"]
    assert blob[:2] == [0, [(0, 1)]] and len(blob) == 3
    assert send(scheduler, [output("a", "length")], worker.step()) == {"a": [[1, [(0, 1)]]]}


@given(st.data())
def test_each_request_gets_all_of_its_own_in_time(data: st.DataObject) -> None:
    """In chunks, again behind preemptions, with outputs in some steps; whoever has stop strings may end in any."""
    scheduler, worker = SimpleNamespace(requests=dict.fromkeys(NAMES)), Worker(sent=data.draw(st.booleans()))
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
        sent = send(scheduler, outputs, worker.step(*step), stops)
        assert sent.keys() <= set(stops)
        take(sent)
        for one in outputs:
            assert one.request_id not in stops or found[one.request_id] == wanted[one.request_id]
    take(send(scheduler, [output(name, "stop") for name in NAMES], worker.step()))
    assert found == wanted
    assert scheduler.saesteer_filed == scheduler.saesteer_read == {}
