"""Positions whose rows are in files, on their way through the scheduler: they come once, when an answer may end.

An answer's last output waits in the scheduler until all of its rows are written, and nobody else does.
"""

import pickle
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.brought import Brought
from saesteer.engine.spool import Owed
from saesteer.engine.staging import Filed
from saesteer.plugin.results import reads
from saesteer.plugin.results.reads import READ
from tests.plugin.blobs import PROBE, brought, output

NAMES = ("a", "b", "c")


Written = dict[str, dict[int, list[tuple[int, int]]]]


class Files(Filed):
    """A worker's files, to which each step adds what it has written; in this process."""

    def __init__(self, written: Written, slow: set[str]) -> None:
        self.written = self._sinks = written  # type: ignore[assignment]
        self.slow = slow

    def ask(self, ending: Collection[str]) -> dict[str, Owed]:
        return {name: Rest(self.written.pop(name), name, self.slow) for name in [*ending] if name in self.written}

    def settle(self) -> dict[str, list[list[Any]]]:
        return {name: owed.told() for name, owed in self.ask(self.written).items()}


class Rest(Owed):
    """What one lacks, as long as the disk is slow for it."""

    def __init__(self, spans: dict[int, list[tuple[int, int]]], name: str, slow: set[str]) -> None:
        self.spans, self.name, self.slow = spans, name, slow

    @property
    def done(self) -> bool:
        return self.name not in self.slow

    def told(self) -> list[list[Any]]:
        return [[number, spans] for number, spans in self.spans.items()]


class Worker:
    """What it has written, and of which nobody was told.

    Args:
        sent: whether what it says goes to another process, step by step.
        slow: requests whose rows are not all written.
    """

    def __init__(self, *, sent: bool, slow: set[str] | None = None) -> None:
        self.sent, self.slow = sent, set() if slow is None else slow
        self.written: Written = {}

    def step(self, *found: tuple[str, int, int, int]) -> Brought:
        """Rows of readouts that are in files: request, readout, and the positions from one to another."""
        for name, number, lo, hi in found:
            self.written.setdefault(name, {}).setdefault(number, []).append((lo, hi))
        made = Brought([], None, Files(self.written, self.slow))
        return pickle.loads(pickle.dumps(made)) if self.sent else made


class Scheduler(SimpleNamespace):
    """An engine's, with requests that have not ended."""

    requests: dict[str, Any]
    saesteer_held: dict[str, Any]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)


def send(
    scheduler: Any, made: list[Any], found: Brought | None, stops: tuple[str, ...] = (), client: int = 0
) -> dict[str, list[Any]]:
    """What a step's outputs tell, once those that wait are left out."""
    outputs = {client: SimpleNamespace(outputs=made)}
    reads.hold(scheduler, outputs, reads.send(scheduler, outputs, found, frozenset(stops)))
    there = [one for batch in outputs.values() for one in batch.outputs]
    return {one.request_id: one.kv_transfer_params[READ] for one in there if one.kv_transfer_params}


def positions(blobs: list[Any]) -> dict[int, list[int]]:
    """By number of the readout."""
    found: dict[int, list[int]] = {}
    for number, spans in blobs:
        found.setdefault(number, []).extend(at for lo, hi in spans for at in range(lo, hi))
    return found


@pytest.mark.parametrize("sent", [False, True])
def test_they_come_with_the_last_output(sent: bool) -> None:
    scheduler, worker = Scheduler(requests=dict.fromkeys("ab")), Worker(sent=sent)
    for at in range(5):
        both = [output("a"), output("b")]
        assert (
            send(scheduler, both, worker.step(("a", 0, at, at + 1), ("a", 1, at, at + 1), ("b", 0, at, at + 1))) == {}
        )
    told = send(scheduler, [output("a", "stop"), output("b")], worker.step(("a", 0, 5, 6)))
    assert told.keys() == {"a"} and positions(told["a"]) == {0: [*range(6)], 1: [*range(5)]}
    assert not sent or told["a"] == [[0, [(0, 6)]], [1, [(0, 5)]]], "an answer of a thousand steps tells as little"
    del scheduler.requests["a"]
    assert send(scheduler, [output("b")], None) == {}
    assert set(scheduler.saesteer_filed) == ({"b"} if sent else set())
    scheduler.requests.clear()  # b was aborted
    assert send(scheduler, [], None) == {}
    assert scheduler.saesteer_filed == scheduler.saesteer_read == {}


def test_rows_that_come_along_do_not_wait_for_them() -> None:
    scheduler = Scheduler(requests=dict.fromkeys("a"))
    worker = Worker(sent=False)
    worker.step(("a", 1, 0, 1))
    (blob,) = send(
        scheduler, [output("a")], Brought(brought(("a", PROBE, 0)).made, None, Files(worker.written, set()))
    )["a"]
    assert blob[:2] == [0, [(0, 1)]] and len(blob) == 3
    assert send(scheduler, [output("a", "length")], worker.step()) == {"a": [[1, [(0, 1)]]]}


@given(st.data())
def test_each_request_gets_all_of_its_own_in_time(data: st.DataObject) -> None:
    """In chunks, again behind preemptions, with outputs in some steps; whoever has stop strings may end in any."""
    scheduler, worker = Scheduler(requests=dict.fromkeys(NAMES)), Worker(sent=data.draw(st.booleans()))
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


def test_a_last_output_waits_for_its_rows_while_others_go_on() -> None:
    """And reaches the client that asked, whole, in the step in which its rows are there."""
    slow = {"a"}
    scheduler, worker = Scheduler(requests=dict.fromkeys("bc")), Worker(sent=False, slow=slow)
    last = output("a", "length")
    last.kv_transfer_params = {"of another": 1}
    assert send(scheduler, [last, output("b")], worker.step(("a", 0, 0, 5), ("b", 0, 0, 5)), client=3) == {}
    assert [*scheduler.saesteer_held] == ["a"]
    others = {0: SimpleNamespace(outputs=[output("c", "stop")])}
    reads.hold(scheduler, others, reads.send(scheduler, others, worker.step(("c", 1, 0, 2)), frozenset()))
    assert [*others] == [0] and [one.request_id for one in others[0].outputs] == ["c"], "c's rows are there"
    slow.clear()
    nothing: dict[int, Any] = {}  # a step without outputs, and without anybody who reads
    reads.hold(scheduler, nothing, reads.send(scheduler, nothing, None, frozenset()))
    assert [*nothing] == [3] and nothing[3].outputs == [last] and not scheduler.saesteer_held
    assert last.kv_transfer_params == {"of another": 1, READ: [[0, [(0, 5)]]]}


def test_a_step_waits_for_rows_if_none_would_follow() -> None:
    scheduler, worker = Scheduler(requests={}), Worker(sent=False, slow={"a"})
    assert send(scheduler, [output("a", "stop")], worker.step(("a", 0, 0, 5))) == {"a": [[0, [(0, 5)]]]}
    scheduler.requests["b"] = None
    assert send(scheduler, [output("a", "stop"), output("b")], worker.step(("a", 0, 0, 5))) == {}
    scheduler.requests.clear()  # b was aborted
    assert send(scheduler, [], None) == {"a": [[0, [(0, 5)]]]}


def test_who_is_held_has_a_step_though_the_engine_is_paused() -> None:
    scheduler, worker = Scheduler(requests=dict.fromkeys("b")), Worker(sent=False, slow={"a"})
    having = reads._having(lambda _: False)
    assert not having(scheduler)
    send(scheduler, [output("a", "stop")], worker.step(("a", 0, 0, 5)))
    assert having(scheduler)
    scheduler.requests.clear()  # as vLLM counts them while it is paused
    assert send(scheduler, [], None) == {"a": [[0, [(0, 5)]]]}
    assert not having(scheduler)


def test_an_output_that_may_be_the_last_waits_at_once() -> None:
    """The front end looks for stop strings, and may end the answer with any output."""
    scheduler, worker = Scheduler(requests=dict.fromkeys("ab")), Worker(sent=False, slow={"a"})
    assert send(scheduler, [output("a"), output("b")], worker.step(("a", 0, 0, 5)), ("a",)) == {"a": [[0, [(0, 5)]]]}
