"""The field to and from Anthropic's form of a chat, with the installed vLLM's converters and no engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse, AnthropicUsage
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from saesteer.errors import SpecError
from saesteer.plugin.http import anthropic
from saesteer.plugin.results.failures import SpecRefused

SAID = {"applied": [{"op": "clamp", "positions": [[1, None]], "tokens_edited": 3}]}


class Raw:
    """Of a request what is read."""

    def __init__(self, **body: Any) -> None:
        self.body = body

    async def json(self) -> Any:
        return self.body


@pytest.mark.parametrize(
    ("body", "kept", "expected"),
    [
        ({"saesteer": {"edits": []}}, None, ({"edits": []}, None)),
        ({"saesteer": None}, None, (None, None)),
        ({"vllm_xargs": {"saesteer": "{}", "other": 1}}, None, (..., {"saesteer": "{}"})),  # vLLM 0.26 drops them
        ({"vllm_xargs": {"saesteer": "{}"}}, {"saesteer": "{}", "kept": 1}, (..., {"saesteer": "{}", "kept": 1})),
        ({"vllm_xargs": {"other": 1}}, None, (..., None)),
        ({"vllm_xargs": [1]}, None, (..., None)),
        ({}, None, (..., None)),
    ],
)
def test_the_chat_completion_gets_the_field(body: Any, kept: Any, expected: Any) -> None:
    async def original(self: Any, request: Any, raw_request: Any) -> Any:
        return getattr(request, "saesteer", ...), request.vllm_xargs

    request = SimpleNamespace(vllm_xargs=kept)
    assert asyncio.run(anthropic._forwarding(original)(None, request, Raw(**body))) == expected


def test_a_refusal_is_an_answer() -> None:
    async def refuse(*_: Any) -> Any:
        raise SpecRefused(SpecError("no", field="saesteer", code="conflict"))

    serving = SimpleNamespace(create_error_response=lambda error: str(error))
    assert asyncio.run(anthropic._answering(refuse)(serving, None)) == "saesteer: no [conflict]"


def test_an_answer_says_it_beside_its_usage() -> None:
    made = AnthropicMessagesResponse(
        id="a", content=[], model="m", usage=AnthropicUsage(input_tokens=1, output_tokens=1), stop_reason="end_turn"
    )
    whole = anthropic._whole(lambda *_: made)
    assert whole(None, SimpleNamespace()) is made
    told = whole(None, SimpleNamespace(saesteer=SAID))
    assert isinstance(told, AnthropicMessagesResponse)
    assert told.model_dump(exclude_none=True) == made.model_dump(exclude_none=True) | {"saesteer": SAID}


def chunk(more: str = "", **fields: Any) -> str:
    found = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk", **fields}
    return f"data: {json.dumps(found, separators=(',', ':'))[:-1]}{more}}}\n\n"


def test_a_stream_says_it_with_its_stop_reason() -> None:
    text = {"content": '","saesteer":{"applied":"no"}'}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    own = f',"saesteer":{json.dumps(SAID)}'

    async def chunks(said: str) -> AsyncIterator[str]:
        yield chunk(choices=[{"index": 0, "delta": {"role": "assistant"}}])
        yield chunk(choices=[{"index": 0, "delta": text}])
        yield chunk(said, choices=[end])
        yield chunk(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
        yield "data: [DONE]\n\n"

    convert = anthropic._stream(AnthropicServingMessages.message_stream_converter)
    serving: Any = SimpleNamespace(stop_reason_map={"stop": "end_turn"})

    async def read(said: str) -> list[str]:
        return [event async for event in convert(serving, chunks(said))]

    plain, steered = asyncio.run(read("")), asyncio.run(read(own))
    assert [one.startswith("event: message_delta") for one in plain] == [False] * (len(plain) - 2) + [True, False]
    assert [one for one in steered if one not in plain] == [steered[-2]]
    event = json.loads(steered[-2].partition("data: ")[2])
    assert event == json.loads(plain[-2].partition("data: ")[2]) | {"saesteer": SAID}
    assert event["delta"]["stop_reason"] == "end_turn"


def test_deltas_say_what_was_read_and_the_stop_reason_the_rest() -> None:
    pieces: list[Any] = [
        {"features": [1, 2], "probes": [3]},  # with the role, which is no delta
        {"features": [4]},  # with no text
        None,
        {"probes": [5]},
        {"features": [6]},
        {**SAID, "features": [], "probes": [7], "hidden": [8]},
    ]
    deltas = [{"role": "assistant"}, {"content": ""}, {"reasoning": "r"}, {"content": "x"}, {}, {"content": "y"}]

    async def chunks() -> AsyncIterator[str]:
        for piece, delta in zip(pieces, deltas, strict=True):
            said = "" if piece is None else f',"saesteer":{json.dumps(piece)}'
            ends = "stop" if piece is pieces[-1] else None
            yield chunk(said, choices=[{"index": 0, "delta": delta, "finish_reason": ends}])
        yield chunk(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
        yield "data: [DONE]\n\n"

    async def read() -> list[str]:
        serving: Any = SimpleNamespace(stop_reason_map={"stop": "end_turn"})
        convert = anthropic._stream(AnthropicServingMessages.message_stream_converter)
        return [event async for event in convert(serving, chunks())]

    events = [json.loads(one.partition("data: ")[2]) for one in asyncio.run(read())]
    told = [(one["type"], one["delta"].get("type"), one["saesteer"]) for one in events if "saesteer" in one]
    assert told == [
        ("content_block_delta", "thinking_delta", {"features": [1, 2, 4], "probes": [3]}),
        ("content_block_delta", "signature_delta", {"probes": [5]}),
        ("message_delta", None, {**SAID, "features": [6], "probes": [7], "hidden": [8]}),
    ]


@pytest.mark.parametrize("extra", [{"saesteer": {}}, {}], ids=["a spec", "a default module"])
def test_a_stream_of_objects_has_it_on_its_chunks(extra: Any) -> None:
    """As from vLLM 0.33 on, with a stand-in for its chunks: what is new, and the rest where the choice ends."""
    report: dict[str, Any] = {**SAID, "features": [1]}

    async def outputs() -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=None)])
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, saesteer=report, finish_reason=None)])
        report["features"].append(2)
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, saesteer=report, finish_reason="stop", text="x")])

    async def raw(self: Any, request: Any, results: Any) -> AsyncIterator[Any]:
        async for one in results:
            yield SimpleNamespace(choices=[SimpleNamespace(finish_reason=one.outputs[0].finish_reason)])
        yield SimpleNamespace(choices=[])

    async def read() -> list[Any]:
        request = SimpleNamespace(model_extra=extra, vllm_xargs=None, n=None)
        chunks = anthropic._objects(raw)(None, request, outputs())
        return [getattr(one, "saesteer", None) async for one in chunks]

    assert asyncio.run(read()) == [None, {"features": [1]}, {**SAID, "features": [2]}, None]


@pytest.mark.parametrize(("code", "kind"), [(400, "invalid_request_error"), (503, "api_error"), (507, "api_error")])
def test_a_stream_that_fails_ends_with_what_is_wrong(code: int, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither as vLLM's complaint that an error is no chunk, nor with its traceback."""
    deltas = ({"role": "assistant", "content": ""}, {"content": "hi"})
    said = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": usage}
    wrong = {"message": "saesteer.edits: too much [dose]", "type": "BadRequestError", "param": None, "code": code}

    async def chunks() -> AsyncIterator[str]:
        for one in (*(head | part for part in said), {"error": wrong}):
            yield f"data: {json.dumps(one)}\n\n"
        yield "data: [DONE]\n\n"

    async def events() -> list[str]:
        serving = object.__new__(AnthropicServingMessages)
        converted = anthropic._stream(AnthropicServingMessages.message_stream_converter)(serving, chunks())
        return [event async for event in converted]

    *before, last = asyncio.run(events())
    assert any("hi" in event for event in before) and not any("event: error" in event for event in before)
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2]) == {
        "type": "error",
        "error": {"type": kind, "message": wrong["message"]},
    }
    assert not caplog.records
