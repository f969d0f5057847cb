"""A consumer runs in its own thread behind a bounded queue: who is slow or raises harms nobody else."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.consumers import Consumer, Request, Rows
from saesteer.consumers.consumer import ConsumerError
from saesteer.consumers.known import Consumers
from saesteer.consumers.runner import MAX_RESULT, Policy, Runner, Ticket
from saesteer.errors import ConfigError, SpecError
from saesteer.language.fields import fail
from tests.consumers.rows import request, rows


class Recording(Consumer):
    """Keeps what it gets; it waits for its gate, and raises where a request's parameters say so."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.gate = Event()
        self.gate.set()
        self.taken: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.dropped: list[str] = []
        self.closed = 0
        self.failure: Any = ValueError

    def _fail(self, where: str) -> None:
        raise self.failure(f"cannot {where} this")

    def take(self, request: Request, rows: Rows) -> None:
        assert self.gate.wait(20)
        if request.parameters == "take":
            self._fail("take")
        self.taken += [(request.id, int(at)) for at in rows.positions]

    def end(self, request: Request) -> Any:
        if request.parameters == "end":
            self._fail("end")
        self.ended.append(request.id)
        return request.parameters

    def drop(self, request: Request) -> None:
        self.dropped.append(request.id)
        if request.parameters == "drop":
            self._fail("drop")

    def close(self) -> None:
        self.closed += 1


Made = tuple[Runner, Recording, Counter[str]]


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    made: list[Runner] = []

    def build(**policy: Any) -> Made:
        counted: Counter[str] = Counter()

        def count(what: str, name: str, by: int) -> None:
            assert name == "it"
            counted[what] += by

        consumer = Recording({})
        runner = Runner("it", consumer, Policy(**policy), count)
        made.append(runner)
        return runner, consumer, counted

    yield build
    for one in made:
        consumer = one.consumer
        assert isinstance(consumer, Recording)
        consumer.gate.set()
        one.close()
        one.close()
        assert consumer.closed >= 1


def ticket(number: int, parameters: Any = None, *, captured: bool = False) -> Ticket:
    return Ticket(request(number, parameters=parameters, captured=captured))


def result(one: Ticket) -> Any:
    return one.result.result(20)


def test_results_reach_their_requests(make: Callable[..., Made]) -> None:
    runner, consumer, counted = make()
    tickets = [ticket(number, {"verdict": number}) for number in range(20)]
    for step in range(3):
        for number, one in enumerate(tickets):
            runner.put(one, rows(number, step, step + 1))
    for one in tickets:
        runner.end(one)
    assert [result(one) for one in tickets] == [{"verdict": number} for number in range(20)]
    assert consumer.taken == [(f"request {number}", step) for step in range(3) for number in range(20)]
    assert counted == {"rows": 60}


class Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise IndexError("its words are wrong, too")


FAILURES: list[tuple[Any, str]] = [
    (ValueError, "'it' failed for this request .*cannot {where} this"),
    (sys.exit, "SystemExit: cannot {where} this"),
    (Mute, "Mute: an error without words"),
]


@pytest.mark.parametrize(("failure", "told"), FAILURES, ids=["raises", "exits", "mute"])
@pytest.mark.parametrize("where", ["take", "end"])
def test_one_that_fails_fails_its_request_alone(make: Callable[..., Made], where: str, failure: Any, told: str) -> None:
    runner, consumer, counted = make()
    consumer.failure = failure
    good, bad = ticket(0, "fine"), ticket(1, where)
    for one in (good, bad, good, bad):
        runner.put(one, rows(0, 0, 2))
    for one in (bad, good):
        runner.end(one)
    with pytest.raises(ConsumerError, match=told.format(where=where)):
        result(bad)
    assert result(good) == "fine" and consumer.ended == ["request 0"] and consumer.dropped == ["request 1"]
    assert counted["failures"] == 1 and len(consumer.taken) == (4 if where == "take" else 8)


@pytest.mark.parametrize("failure", [one for one, _ in FAILURES], ids=["raises", "exits", "mute"])
def test_one_that_fails_when_it_forgets_goes_on(make: Callable[..., Made], failure: Any) -> None:
    runner, consumer, counted = make()
    consumer.failure = failure
    runner.drop(ticket(0, "drop"))
    last = ticket(1, 5)
    runner.end(last)
    assert result(last) == 5 and counted["failures"] == 1 and consumer.dropped == ["request 0"]


def test_a_full_queue_drops_and_says_so(make: Callable[..., Made]) -> None:
    one = rows(0, 0, 2)
    runner, consumer, counted = make(queue_bytes=3 * one.nbytes)
    consumer.gate.clear()
    asked, captured, other = ticket(0, "fine"), ticket(1, captured=True), ticket(2, "other")
    runner.put(other, one)
    start = time.monotonic()
    for mine in (asked, captured) * 4:
        runner.put(mine, rows(0, 2, 4))
    assert time.monotonic() - start < 1, "nobody waits"
    assert runner.behind
    consumer.gate.set()
    for mine in (asked, captured, other):
        runner.end(mine)
    assert result(asked) == {"dropped": 6} and result(other) == "other" and result(captured) is None
    assert (asked.dropped, captured.dropped) == (6, 6) and counted["dropped"] == 12
    assert consumer.ended == ["request 1", "request 2"], "what is captured is not asked to be whole"
    assert not runner.behind


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30), st.integers(1, 400))
def test_each_row_is_taken_or_counted(puts: list[tuple[int, int]], queue_bytes: int) -> None:
    counted: Counter[str] = Counter()
    consumer = Recording({})
    runner = Runner("it", consumer, Policy(queue_bytes), lambda what, _, by: counted.update({what: by}))
    tickets = [ticket(number, captured=True) for number in range(4)]
    for number, count in puts:
        runner.put(tickets[number], rows(number, 0, count))
    for one in tickets:
        runner.end(one)
    wait([one.result for one in tickets], 20)
    runner.close()
    total = sum(count for _, count in puts)
    assert counted["rows"] == len(consumer.taken) == total - counted["dropped"]
    assert sum(one.dropped for one in tickets) == counted["dropped"] and runner._held == 0


@pytest.mark.parametrize("wrong", [float("nan"), {"a": object()}, "x" * (MAX_RESULT + 1), {1, 2}])
def test_results_are_json_of_bounded_size(make: Callable[..., Made], wrong: Any) -> None:
    runner, _, counted = make()
    one = ticket(0, wrong)
    runner.end(one)
    with pytest.raises(ConsumerError):
        result(one)
    assert counted["failures"] == 1


class Picky(Recording):
    def check(self, parameters: Mapping[str, Any], at: str) -> Any:
        if "spec" in parameters:
            fail(f"{at}.spec", "conflict", "is wrong, expected nothing")
        return 1 / parameters["by"]


@pytest.mark.parametrize(
    ("parameters", "field", "words"),
    [({"spec": 1}, "at.spec", "is wrong"), ({"by": 0}, "at", "division by zero"), ({}, "at", "by")],
)
def test_what_a_check_raises_is_a_refusal(parameters: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        Runner("it", Picky({})).check(parameters, "at")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loging": {}}, "no consumer 'loging'.*did you mean 'logging'.*filesystem"),
        ({"filesystem": {}}, "consumers.filesystem has no folder"),
        ({"logging": {"top": 1}}, "consumers.logging has the options top"),
        ({"logging": {"queue_mib": 0}}, "consumers.logging.queue_mib: got 0"),
        ({"logging": {"wait_ms": -1}}, "consumers.logging.wait_ms: got -1"),
        ({"logging": {"all": 1}}, "consumers.logging.all: got 1"),
    ],
)
def test_wrong_settings_stop_the_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Consumers.open(settings)


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from saesteer.consumers import known

    points = [
        EntryPoint("reward", "tests.consumers.test_runner:Recording", known.GROUP),
        EntryPoint("broken", "tests.consumers.nowhere:Nothing", known.GROUP),
    ]
    monkeypatch.setattr(known, "entry_points", lambda group: points if group == known.GROUP else [])
    assert isinstance(known.factory_of("reward")({}), Consumer)
    with pytest.raises(ConfigError, match=r"consumers.broken: tests.consumers.nowhere:Nothing cannot be loaded"):
        known.factory_of("broken")
