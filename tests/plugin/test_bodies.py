"""Counts from the scheduler into bodies and chunks, piece by piece, with stand-ins for vLLM. Starts nothing."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin.http import bodies
from saesteer.plugin.results import counts  # needs vLLM
from saesteer.plugin.results.reads import Unsent

SAID = {"applied": [{"op": "clamp", "tokens_edited": 3}]}
PLAIN: Any = SimpleNamespace(model_extra={}, vllm_xargs=None, n=None)
STEERED: Any = SimpleNamespace(model_extra={"saesteer": {}}, vllm_xargs=None, n=None)


def test_the_scheduler_sends_with_the_last_output_or_where_a_stop_string_may_end_it() -> None:
    def output(name: str, reason: Any = None, **more: Any) -> Any:
        return SimpleNamespace(request_id=name, finish_reason=reason, kv_transfer_params=None, **more)

    made = [output("runs"), output("ends", 1), output("stops"), output("plain", 1), output("other", 1)]
    made[4].kv_transfer_params = {"block": 7}
    send = counts._sending(lambda *_: {0: SimpleNamespace(outputs=made)})
    counted = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=np.int32)
    table = counts.Table(["runs", "ends", "stops", "other"], counted, {}, frozenset(["stops"]))
    scheduler = SimpleNamespace(finished_req_ids={"ends", "plain", "other"})
    send(scheduler, None, SimpleNamespace())
    assert [one.kv_transfer_params for one in made] == [None] * 4 + [{"block": 7}]
    send(scheduler, None, SimpleNamespace(saesteer=table))
    runs, ends, stops, plain, other = (one.kv_transfer_params for one in made)
    assert runs is None and plain is None
    assert np.frombuffer(ends["saesteer"], np.int32).tolist() == [2, 3]
    assert np.frombuffer(stops["saesteer"], np.int32).tolist() == [4, 5]
    assert other == {"block": 7, "saesteer": counted[3].tobytes()}

    # And at the other end of the wire.
    params: Any = SimpleNamespace(saesteer_report=counts.Report([{"positions": [[1, None]]}]))
    tokens = SimpleNamespace(num_output_tokens=lambda: 1)
    states: Any = {"other": object()}
    processor = SimpleNamespace(request_states=states)
    add = counts._expecting(lambda *_: states.update(ends=SimpleNamespace(detokenizer=tokens, prompt_len=5)))
    add(processor, SimpleNamespace(request_id="ends", sampling_params=params), None)
    counts._receiving(lambda *_: None)(processor, made)
    completion = counts._telling(lambda *_: SimpleNamespace())(states["ends"], [5], 1)
    assert completion.saesteer == {"applied": [{"positions": [[1, None]], "tokens_edited": 3, "tokens_cached": 1}]}
    assert [one.kv_transfer_params for one in made] == [None] * 4 + [{"block": 7}]


def test_the_scheduler_reads_no_counts_where_nobody_ends() -> None:
    class Unread:
        failed: ClassVar[dict[str, str]] = {}
        stops: ClassVar[frozenset[str]] = frozenset()
        read = None  # and nothing to read besides
        watched = False
        guessed: ClassVar[dict[str, Any]] = {}

    outputs = {0: SimpleNamespace(outputs=[object()])}
    send = counts._sending(lambda *_: outputs)
    assert send(SimpleNamespace(finished_req_ids=set()), None, SimpleNamespace(saesteer=Unread())) is outputs


def unsent(fields: Any, *, ended: bool = False) -> Unsent:
    """What a stream has to say after one output."""
    made = Unsent()
    made.add(fields, ended=ended)
    return made


def test_a_chunk_keeps_its_bytes_and_only_the_end_of_a_choice_is_longer() -> None:
    begin = 'data: {"id":"a","choices":[{"index":0,"text":"\\"finish_reason\\":\\"no\\"","finish_reason":null}]}\n\n'
    end = 'data: {"id":"a","choices":[{"index":1,"text":"é\\u2028","finish_reason":"stop","logprobs":1e-07}]}\n\n'
    said = {1: unsent(SAID, ended=True)}
    assert bodies._with_answer(begin, said) is begin
    assert bodies._with_answer("data: [DONE]\n\n", said) == "data: [DONE]\n\n"
    told = bodies._with_answer(end, said)
    assert told.startswith(end.rstrip()[:-1]) and told.endswith("}\n\n")
    assert json.loads(told.removeprefix("data: ")) == json.loads(end.removeprefix("data: ")) | {"saesteer": SAID}
    assert bodies._with_answer(end, {0: unsent(SAID, ended=True)}) is end, "of another choice"
    error = 'data: {"error":{"message":"\\"finish_reason\\":\\"error\\""}}\n\n'
    assert bodies._with_answer(error, said) is error


def test_a_chunk_brings_what_was_read_since_the_last_one() -> None:
    middle = 'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
    end = middle.replace("null", '"length"')
    report: dict[str, Any] = {**SAID, "features": [1]}
    said = unsent(report)

    def read(chunk: str) -> Any:
        return json.loads(bodies._with_answer(chunk, {0: said}).removeprefix("data: ")).get("saesteer")

    assert read(middle) == {"features": [1]}
    assert bodies._with_answer(middle, {0: said}) is middle, "nothing is new"
    report["features"] += [2, 3]
    assert bodies._with_answer(middle, {0: said}) is middle, "no output has brought it yet"
    said.add(report, ended=False)
    assert read(middle) == {"features": [2, 3]}
    report["features"].append(4)
    said.add(report, ended=True)
    assert bodies._with_answer(middle, {0: said}) is middle, "the end brings it"
    assert read(end) == {**SAID, "features": [4]}
    assert read(end) == {**SAID, "features": []}


def test_events_of_a_response_bring_what_was_read_and_the_last_one_the_rest() -> None:
    """With vLLM's context and events. The body, which can be retrieved later, has all."""
    from openai.types.responses import ResponseOutputItemAddedEvent, ResponseTextDeltaEvent
    from vllm.entrypoints.openai.responses.context import SimpleContext
    from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent, ResponsesResponse

    def body() -> Any:
        return ResponsesResponse.model_construct(output=[], status="completed")

    def event(kind: Any, name: str, **fields: Any) -> Any:
        return kind.model_construct(type=name, sequence_number=0, **fields)

    report: dict[str, Any] = {**SAID, "features": [], "hidden": []}
    remember = bodies._remembering(lambda *_: None)
    context, stored = SimpleContext(), []

    def output(row: Any, finish_reason: Any = None) -> None:
        report["features"].append(row)
        choice = SimpleNamespace(saesteer=report, finish_reason=finish_reason)
        remember(context, SimpleNamespace(outputs=[choice]))

    async def events(*_: Any) -> AsyncIterator[Any]:
        yield event(ResponseCompletedEvent, "response.created", response=body())
        output(1)
        output(2)
        yield event(ResponseOutputItemAddedEvent, "response.output_item.added")
        yield event(ResponseTextDeltaEvent, "response.output_text.delta")
        yield event(ResponseTextDeltaEvent, "response.output_text.delta")
        output(math.nan)
        report["hidden"].append(9)  # the engine is ahead
        yield event(ResponseTextDeltaEvent, "response.reasoning_text.delta")
        output(3, "length")
        yield event(ResponseTextDeltaEvent, "response.output_text.delta")

        async def whole(*_: Any) -> Any:
            return body()

        stored.append(await bodies._response(whole)(None, STEERED, None, None, context))
        yield event(ResponseCompletedEvent, "response.completed", response=stored[0])

    async def read() -> list[Any]:
        stream = bodies._response_stream(events)(None, STEERED, None, None, context)
        return [json.loads(one.model_dump_json(warnings=False)) async for one in stream]

    made = asyncio.run(read())
    rest = {**SAID, "features": [3], "hidden": [9]}
    assert [one.get("saesteer") or (one.get("response") or {}).get("saesteer") for one in made] == [
        *(None, None, {"features": [1, 2]}, None, {"features": [None]}, None, rest)
    ]
    assert stored[0].saesteer == {**SAID, "features": [1, 2, None, 3], "hidden": [9]}


def test_a_turn_of_a_response_is_read_anew() -> None:
    """Where tools are called in between, each turn is a request of its own, with an answer of its own."""
    said = unsent({**SAID, "features": [1], "hidden": [2]}, ended=True)
    said.add({**SAID, "features": [3], "hidden": []}, ended=False)
    assert said.take(end=False) == {"features": [1, 3], "hidden": [2]}


async def _outputs(*found: Any) -> AsyncIterator[Any]:
    for one in found:
        yield one


async def _chunks(self: Any, request: Any, outputs: Any, *_: Any) -> AsyncIterator[str]:
    async for _one in outputs:
        yield 'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'


def test_what_is_not_finite_is_null_since_json_has_nothing_else() -> None:
    """A model in float16 overflows; HTTP would answer 400 without a name, and a stream would be no JSON."""
    nan, inf = float("nan"), float("inf")
    report = {
        **SAID,
        "features": [{"rows": [{"position": 1, "top": [[3, inf], [4, 1.5]], "features": {"9": -inf}}]}],
        "probes": [{"positions": [1], "scores": [nan]}],
        "dose": [{"site": "resid_post.3", "max": nan, "mean": 0.5, "tokens": 2}],
    }
    told = {
        **SAID,
        "features": [{"rows": [{"position": 1, "top": [[3, None], [4, 1.5]], "features": {"9": None}}]}],
        "probes": [{"positions": [1], "scores": [None]}],
        "dose": [{"site": "resid_post.3", "max": None, "mean": 0.5, "tokens": 2}],
    }

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    event = bodies.with_report('data: {"choices":[]}\n\n', report)
    assert json.loads(event.removeprefix("data: "), parse_constant=refuse)["saesteer"] == told
    choices = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    body: Any = SimpleNamespace(choices=choices)
    bodies._add_reports(body, {0: report, 1: SAID})
    assert body.saesteer == choices[0].saesteer == told and choices[1].saesteer is SAID

    async def whole(*_: Any) -> Any:
        return SimpleNamespace(output=[])

    made = asyncio.run(bodies._response(whole)(None, STEERED, None, None, SimpleNamespace(saesteer=unsent(report))))
    assert made.saesteer == told
    assert math.isnan(report["probes"][0]["scores"][0]), "in Python it stays what it is"  # type: ignore[index]


@pytest.mark.parametrize("request_", [PLAIN, STEERED], ids=["plain", "steered"])
@pytest.mark.parametrize("reported", [True, False])
def test_what_was_steered_decides_and_not_what_the_request_holds(request_: Any, reported: bool) -> None:
    """A default module steers requests without a spec. Where nothing is reported, vLLM's own passes unchanged."""
    said = {"saesteer": SAID} if reported else {}

    def output() -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason="stop", text="", token_ids=[], **said)])

    async def whole(self: Any, request: Any, outputs: Any, *_: Any) -> Any:
        assert [one async for one in outputs]
        return SimpleNamespace(choices=[SimpleNamespace(index=0)])

    async def pieces(self: Any, request: Any, *given: Any) -> AsyncIterator[str]:
        async for one in given[-1]:
            (choice,) = one.outputs
            if choice.text or not reported:  # vLLM sends no chunk for an empty text
                assert choice.text == ""
                yield 'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'

    async def stream(wrap: Callable[..., Any], *more: Any) -> dict[str, Any]:
        (chunk,) = [chunk async for chunk in wrap(pieces)(None, request_, *more, _outputs(output()))]
        return dict(json.loads(chunk[6:]))

    responses = [
        asyncio.run(bodies._chat(whole)(None, request_, _outputs(output()))),
        bodies._completion(lambda *_: SimpleNamespace(choices=[SimpleNamespace(index=0)]))(None, [output()], request_),
    ]
    for response in responses:
        assert vars(response).keys() - {"choices"} == said.keys() and getattr(response, "saesteer", SAID) == SAID
    for event in (asyncio.run(stream(bodies._chat_stream)), asyncio.run(stream(bodies._completion_stream, []))):
        assert event == {"choices": [{"index": 0, "finish_reason": "stop"}], **said}


def test_each_conversation_of_a_batch_has_its_own() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    other: dict[str, Any] = {"applied": []}
    turns: Any = [{"role": "user", "content": "x"}]
    forward = bodies._batch_request(BatchChatCompletionRequest.to_chat_completion_request)
    fields: list[dict[str, Any]] = [{"saesteer": {"edits": []}}, {"saesteer": None}, {"vllm_xargs": {"saesteer": "{}"}}]
    for more in fields:
        request = BatchChatCompletionRequest(messages=[turns, turns], **more)
        one = forward(request, turns)
        found = {key: value for key, value in one.model_extra.items() if key == "saesteer"}
        assert found | ({"vllm_xargs": one.vllm_xargs} if one.vllm_xargs else {}) == more, "a null is no absence"
        assert bodies.is_steered(request) and bodies.is_steered(one)
    plain = BatchChatCompletionRequest(messages=[turns])
    assert not bodies.is_steered(plain) and not bodies.is_steered(forward(plain, turns))

    async def whole(self: Any, request: Any, generators: Any, *_: Any) -> Any:
        for outputs in generators:
            assert [one async for one in outputs]
        return SimpleNamespace(choices=[SimpleNamespace(index=0), SimpleNamespace(index=1)])

    said = [SimpleNamespace(outputs=[SimpleNamespace(index=0, saesteer=one)]) for one in (SAID, other)]
    for one in (request, plain):  # a default module steers the plain one
        made = asyncio.run(bodies._batch(whole)(None, one, [_outputs(output) for output in said]))
        assert (made.saesteer, [choice.saesteer for choice in made.choices]) == (SAID, [SAID, other])
    silent = [SimpleNamespace(outputs=[SimpleNamespace(index=0)])] * 2
    made = asyncio.run(bodies._batch(whole)(None, request, [_outputs(output) for output in silent]))
    assert vars(made).keys() == {"choices"}


def test_a_stream_that_is_given_up_closes_vllm_s_own() -> None:
    closed = []

    async def chunks(*_: Any) -> AsyncIterator[str]:
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed.append(True)

    async def ask() -> None:
        stream = bodies._chat_stream(chunks)(None, STEERED, _outputs())
        await anext(stream)
        await stream.aclose()
        assert closed

    asyncio.run(ask())


def test_an_error_stays_one() -> None:
    error = SimpleNamespace(error="Client disconnected")

    async def whole(*_: Any) -> Any:
        return error

    assert asyncio.run(bodies._chat(whole)(None, STEERED, _outputs())) is error
    context = SimpleNamespace(saesteer=unsent(SAID))
    assert asyncio.run(bodies._response(whole)(None, STEERED, None, None, context)) is error
    assert vars(error) == {"error": "Client disconnected"}


def test_metrics_are_summed_over_processes(tmp_path: Path) -> None:
    code = (
        "from saesteer.plugin.results import metrics\n"
        "metrics.refused('before')\n"
        "metrics.install(('dose',)); metrics.install(('dose',))\n"
        "metrics.edited([{'tokens_edited': 3}, {'tokens_edited': 4}, {'op': 'given up'}])\n"
        "metrics.refused('unknown_name')\n"
        "metrics.pools({'resid_post.3': (2, 5)})\n"
        "from prometheus_client import generate_latest\n"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry\n"
        "print(generate_latest(get_prometheus_registry()).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for times in (1, 2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("saesteer")]
        zeros = {line.removesuffix(" 0.0") for line in lines if line.endswith(" 0.0")}
        assert {'saesteer_refusals_total{code="dose"}', 'saesteer_rules_total{op="stop"}'} < zeros, "from the start"
        assert sorted(line for line in lines if not line.endswith(" 0.0")) == [
            f"saesteer_edited_tokens_total {7.0 * times}",
            'saesteer_pool_rows_in_use{site="resid_post.3"} 2.0',
            'saesteer_pool_rows{site="resid_post.3"} 5.0',
            f'saesteer_refusals_total{{code="unknown_name"}} {1.0 * times}',
        ]
