"""The field ``saesteer`` of /v1/messages, Anthropic's form of a chat: into the chat completion, and back.

vLLM turns such a request into a chat completion field by field, which drops ours, and converts the answer back in the
same way. Knows both forms, and no more of an answer than the chat completion says (bodies.py). What chunks of a chat
completion bring stands on events that follow them: what is read on the next delta, the rest on the last one.

    create_messages           a refusal becomes vLLM's error; vLLM would log an exception with its traceback
    create_chat_completion    the request gets the body's field, and its vllm_xargs if vLLM (0.26) drops them
    messages_full_converter   the answer gets what the chat completion says
    message_stream_converter  the same in a stream, on content_block_delta and message_delta; and what ends it early
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cache
from http import HTTPStatus
from typing import Any

from pydantic import create_model

from saesteer.config.config import KEY
from saesteer.plugin.http.bodies import FIELD, failure, refuse_misplaced, streamed, with_report
from saesteer.plugin.results.errors import SpecRefused
from saesteer.plugin.results.unsent import Unsent, joined
from saesteer.plugin.wrap import Original, around

_DELTA = "event: content_block_delta\n"
_END = "event: message_delta\n"  # the one with stop_reason


@around
async def _answering(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
    try:
        return await original(self, request, raw_request)
    except SpecRefused as error:
        return self.create_error_response(error)


@around
async def _forwarding(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
    body = {} if raw_request is None else await raw_request.json()
    refuse_misplaced(request, body)
    if body.get(KEY) is not None:
        request.saesteer = body[KEY]
    arguments = body.get("vllm_xargs")
    if isinstance(arguments, Mapping) and KEY in arguments and request.vllm_xargs is None:
        request.vllm_xargs = {KEY: arguments[KEY]}
    return await original(self, request, raw_request)


@cache
def _with_field(model: Any) -> Any:
    """Anthropic's model with our field, since it accepts no others."""
    return create_model(model.__name__, __base__=model, saesteer=(dict[str, Any], ...))


@around
def _whole(original: Original, self: Any, generator: Any) -> Any:
    made = original(self, generator)
    report = getattr(generator, KEY, None)
    return made if report is None else _with_field(made.__class__)(**dict(made), saesteer=report)


@around
async def _stream(original: Original, self: Any, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    unsent: dict[str, Any] = {}
    ended = False
    failed: dict[str, Any] | None = None

    async def recorded_chunks() -> AsyncGenerator[Any, None]:
        nonlocal unsent, ended, failed
        async for chunk in generator:
            if (failed := failure(chunk)) is not None:
                return  # up to 0.32, vLLM takes it for a chunk, and logs that it is none
            piece: Any = getattr(chunk, KEY, None)
            if isinstance(chunk, str) and FIELD in chunk:
                piece = json.loads(chunk.removeprefix("data: "))[KEY]
            if piece is not None:
                # A delta follows not every chunk, and the end of a message is not that of its last chunk.
                unsent, ended = joined(unsent, piece), "applied" in piece
            yield chunk

    async with aclosing(generator), aclosing(original(self, recorded_chunks())) as events:
        async for event in events:
            if unsent and event.startswith(_END if ended else _DELTA):
                event, unsent = with_report(event, unsent), {}
            yield event
    if failed is not None:
        kind = "invalid_request_error" if failed["code"] < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        said = {"type": "error", "error": {"type": kind, "message": failed["message"]}}
        yield f"event: error\ndata: {json.dumps(said)}\n\n"


@around
async def _objects(
    original: Original, self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, None]:
    """From 0.33 on, a stream's chunks become events before they are text."""
    unsent: dict[int, Unsent] = {}
    outputs = streamed(result_generator, request, unsent)
    async with aclosing(original(self, request, outputs, *args, **kwargs)) as chunks:
        async for chunk in chunks:
            for choice in getattr(chunk, "choices", ()):  # one at most
                if 0 in unsent and (said := unsent[0].take(end=bool(choice.finish_reason))):
                    chunk.saesteer = said
            yield chunk
