"""The field to and from Anthropic's form of a chat, with the installed vLLM's converters and no engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from saesteer.plugin.http import anthropic

SAID = {"applied": [{"op": "clamp", "positions": [[1, None]], "tokens_edited": 3}]}


def chunk(more: str = "", **fields: Any) -> str:
    found = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk", **fields}
    return f"data: {json.dumps(found, separators=(',', ':'))[:-1]}{more}}}\n\n"


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
