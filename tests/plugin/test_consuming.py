"""Between outputs and consumers, with stand-ins for vLLM's objects: who waits, for what, and who learns of an end."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.consumers import Consumer, DiskError, Request
from saesteer.consumers.known import Consumers
from saesteer.consumers.runner import Policy, Runner
from saesteer.errors import SpecError
from saesteer.language import spec as language
from saesteer.language.fields import fail
from saesteer.planning.plan import Catalog
from saesteer.planning.readouts import captures
from saesteer.planning.together import together
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.frontend import _settled
from saesteer.plugin.results import consuming
from saesteer.plugin.results.errors import SpecRefused
from tests.consumers.rows import token, value


class Judge(Consumer):
    """Says which positions it got, once its gate is open."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.gate = Event()
        self.gate.set()
        self.gone: list[str] = []

    def check(self, parameters: Mapping[str, Any], at: str) -> Any:
        return dict(parameters)

    def end(self, request: Request) -> Any:
        assert self.gate.wait(20)
        if request.parameters.get("ill"):
            raise RuntimeError("the judge is ill")
        if request.parameters.get("full"):
            raise DiskError("the book is full")
        return [int(at) for rows in request.rows for at in rows.positions]

    def drop(self, request: Request) -> None:
        self.gone.append(request.id)


@pytest.fixture
def judge() -> Judge:
    return Judge({})


@pytest.fixture
def consumers(judge: Judge) -> Iterator[Consumers]:
    made = Consumers({"judge": Runner("judge", judge)})
    yield made
    judge.gate.set()
    made.close()


CATALOG = Catalog({}, None, 64, width=2, consumers={"judge": lambda parameters, _: parameters})
PROMPT = 5


def admitted(consumers: Consumers, spec: Any, *, capture: Any = (), silent: bool = False) -> Any:
    """The report of an admitted request, and what travels with it."""
    params = SimpleNamespace(extra_args=None, max_tokens=4, n=1)
    request = SimpleNamespace(prompt_token_ids=[token(at) for at in range(PROMPT)], sampling_params=params)
    door = Door(consumers=consumers, capture=capture)
    door.admit(language.from_json(spec), CATALOG, request, silent=silent)
    return params.saesteer_report, params.extra_args


READ = {"activations": [{"site": "resid_post.3"}]}


def state(report: Any, queue: Any = None) -> Any:
    """vLLM's RequestState of a running request."""
    ids: list[int] = []
    detokenizer = SimpleNamespace(output_token_ids=ids, num_output_tokens=lambda: len(ids))
    made = SimpleNamespace(external_req_id="a", request_id="a-1", parent_req=None, request_index=0, queue=queue)
    made.prompt_token_ids, made.prompt_len = [token(at) for at in range(PROMPT)], PROMPT
    made.detokenizer, made.saesteer = detokenizer, report.of_choice()
    made.saesteer.feed = report.wanted.feed(made, made.saesteer.read)
    return made


def blob(number: int, lo: int, hi: int) -> list[Any]:
    numbers = [[value(0, at)] * 2 for at in range(lo, hi)]
    return [number, [[lo, hi]], np.array(numbers, "<f4").tobytes()]


def run(made: Any, reason: str = "stop") -> Any:
    """Three tokens, the last of which is never an input."""
    report = made.saesteer
    for lo, hi in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 2)):
        report.add([blob(0, lo, hi)])
        consuming.give(made, report.feed)
        made.detokenizer.output_token_ids.append(token(hi))
    consuming.finish(made, report.feed, reason)
    choice = SimpleNamespace(finish_reason=reason, saesteer=report.fields, saesteer_feed=report.feed)
    return SimpleNamespace(outputs=[choice])


FAILING = [("ill", "the judge is ill", "consumer"), ("full", "the book is full", "no_space")]


def test_only_the_last_output_waits_and_nobody_else(consumers: Consumers, judge: Judge) -> None:
    """Over HTTP: other requests go on while a consumer takes its time."""
    report, _ = admitted(consumers, {"return": READ | {"consumers": {"judge": {}}}})
    judge.gate.clear()
    last = run(state(report, queue=object()))
    first = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=None, saesteer_feed=report.feed)])

    async def outputs() -> Any:
        yield first
        yield last

    async def play() -> list[str]:
        said: list[str] = []

        async def read() -> None:
            async for one in _settled(outputs()):
                name = "first" if one is first else "last"
                said.append(name)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        said.append("others")
        judge.gate.set()
        await reading
        return said

    assert asyncio.run(play()) == ["first", "others", "last"]
    assert last.outputs[0].saesteer["consumers"]["judge"]


@pytest.mark.parametrize(("how", "why", "code"), FAILING)
def test_a_failure_over_http_is_a_refusal(consumers: Consumers, how: str, why: str, code: str) -> None:
    report, _ = admitted(consumers, {"return": READ | {"consumers": {"judge": {how: 1}}}})
    last = run(state(report, queue=object()))

    async def outputs() -> Any:
        yield last

    async def play() -> None:
        async for _ in _settled(outputs()):
            pass

    with pytest.raises(SpecRefused, match=rf"{why}.*\[{code}\]"):
        asyncio.run(play())


def test_a_consumer_that_hangs_is_given_up(consumers: Consumers, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "ANSWER_SECONDS", 0.1)
    judge.gate.clear()
    report, _ = admitted(consumers, {"return": READ | {"consumers": {"judge": {}}}})
    with pytest.raises(SpecError, match="did not answer within"):
        consuming.settle(run(state(report)), set())
    with pytest.raises(SpecError, match="did not answer within"):
        asyncio.run(consuming.settled(run(state(report))))


def test_a_call_waits_once_for_one_that_hangs(
    consumers: Consumers, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "ANSWER_SECONDS", 0.5)
    judge.gate.clear()
    report, _ = admitted(consumers, {"return": READ | {"consumers": {"judge": {}}}})
    begun, late = time.monotonic(), set[str]()
    for _ in range(20):
        with pytest.raises(SpecError, match="did not answer within"):
            consuming.settle(run(state(report)), late)
    assert time.monotonic() - begun < 5, "seconds; 20 times half of one would be 10"


def test_a_consumer_that_refuses_late_does_so_at_the_door(consumers: Consumers, judge: Judge) -> None:
    """Behind it, vLLM would know the request, and nobody would end it."""
    judge.check = lambda parameters, at: fail(at, "conflict", "is used up")  # type: ignore[method-assign]
    with pytest.raises(SpecError, match=r"saesteer\.return\.consumers\.judge: is used up"):
        admitted(consumers, {"return": READ | {"consumers": {"judge": {}}}})


def test_new_requests_wait_for_one_that_is_behind() -> None:
    slow = Runner("slow", Judge({}), Policy(queue_bytes=10, wait=0.2))
    slow._held = 9
    asked = SimpleNamespace(extra_args={"saesteer": {"return": {"consumers": {"slow": {}}}}})
    for capturing, params, waits in (((), None, False), ((), asked, True), ((slow,), None, True)):
        start = time.monotonic()
        asyncio.run(consuming.room(Consumers({"slow": slow}, capturing), params))
        assert (time.monotonic() - start > 0.15) == waits
    slow._held = 0
    start = time.monotonic()
    asyncio.run(consuming.room(Consumers({"slow": slow}, (slow,)), asked))
    assert time.monotonic() - start < 0.15


def test_a_request_and_the_operator_share_a_read() -> None:
    wanted = {
        "activations": [{"site": "resid_post.9"}, {"site": "resid_post.3"}, {"site": "resid_post.5", "at": "after"}]
    }
    from saesteer.planning.planner import plan

    planned = plan(language.from_json({"return": wanted}), CATALOG, PROMPT)
    *asked, added = captures(("resid_post.3", "resid_post.5", "resid_post.9"), planned, CATALOG)
    assert [replace(one, captured=False) for one in asked] == [*planned.readouts]
    assert [one.captured for one in asked] == [True, True, False] and added.captured
    assert (added.site, added.recompute, added.after) == ("resid_post.5", False, False)
    groups = [[one.site for one in several] for several in together((*asked, added), CATALOG)]
    assert groups == [["resid_post.9", "resid_post.3"], ["resid_post.5"], ["resid_post.5"]]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_has_no_end_is_forgotten(consumers: Consumers, judge: Judge, reason: str) -> None:
    report, _ = admitted(consumers, {"return": READ | {"consumers": {"judge": {}}}})
    output = run(state(report), reason)
    consuming.settle(output, set())
    consumers.close()
    assert judge.gone == ["a"] and "consumers" not in output.outputs[0].saesteer
