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
