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


def test_a_stream_says_all_that_was_read_with_its_stop_reason() -> None:
    """Chunks of a chat completion bring what is new; the event that has the field here is the last one."""
    pieces: list[dict[str, Any]] = [
        {"features": [1, 2], "probes": [3]},
        {"features": [4]},
        {**SAID, "features": [], "probes": [5], "hidden": [6]},
    ]

    async def chunks() -> AsyncIterator[str]:
        yield chunk(choices=[{"index": 0, "delta": {"role": "assistant"}}])
        for number, piece in enumerate(pieces):
            said = f',"saesteer":{json.dumps(piece)}'
            yield chunk(
                said, choices=[{"index": 0, "delta": {"content": "x"}, "finish_reason": [None, None, "stop"][number]}]
            )
        yield chunk(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
        yield "data: [DONE]\n\n"

    async def read() -> list[str]:
        serving: Any = SimpleNamespace(stop_reason_map={"stop": "end_turn"})
        convert = anthropic._stream(AnthropicServingMessages.message_stream_converter)
        return [event async for event in convert(serving, chunks())]

    (event,) = (one for one in asyncio.run(read()) if '"saesteer"' in one)
    assert json.loads(event.partition("data: ")[2])["saesteer"] == {
        **SAID,
        "features": [1, 2, 4],
        "probes": [3, 5],
        "hidden": [6],
    }


def test_a_stream_of_objects_has_it_on_the_chunk_that_ends_the_choice() -> None:
    """As from vLLM 0.33 on, with a stand-in for its chunks."""

    async def outputs() -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=None)])
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, saesteer=SAID, finish_reason=None)])

    async def raw(self: Any, request: Any, results: Any) -> AsyncIterator[Any]:
        async for one in results:
            ended = "stop" if hasattr(one.outputs[0], "saesteer") else None
            yield SimpleNamespace(choices=[SimpleNamespace(finish_reason=ended)])

    async def read(extra: Any) -> list[Any]:
        request = SimpleNamespace(model_extra=extra, vllm_xargs=None, n=None)
        chunks = anthropic._objects(raw)(None, request, outputs())
        return [getattr(one, "saesteer", None) async for one in chunks]

    assert asyncio.run(read({"saesteer": {}})) == [None, SAID]
    assert asyncio.run(read({})) == [None, None]
