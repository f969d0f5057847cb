"""The field ``saesteer`` of /v1/messages, Anthropic's form of a chat: to the chat completion it becomes, and back.

vLLM makes a chat completion of such a request, field by field, which drops ours, and converts the answer back in the
same way. Knows both forms, and of an answer only what the chat completion says (bodies.py).

    create_messages           a refusal becomes vLLM's error; as an exception it would be logged with its traceback
    create_chat_completion    the request gets the field of the body, also from vllm_xargs where vLLM (0.26) drops them
    messages_full_converter   the answer gets what the chat completion says
    message_stream_converter  the same in a stream, on the message_delta that brings stop_reason
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import cache, wraps
from typing import Any

from pydantic import create_model

from saesteer.config.config import KEY
from saesteer.plugin.http.bodies import Watched, is_steered
from saesteer.plugin.results.failures import SpecRefused

_FIELD = f',"{KEY}":'  # as bodies.py writes it; in a text its quotes would be escaped
_ENDS = "event: message_delta\n"


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create_messages(self: Any, request: Any, raw_request: Any = None) -> Any:
        try:
            return await original(self, request, raw_request)
        except SpecRefused as error:
            return self.create_error_response(error)

    return create_messages


def _forwarding(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create_chat_completion(self: Any, request: Any, raw_request: Any = None) -> Any:
        body = {} if raw_request is None else await raw_request.json()
        if KEY in body:
            request.saesteer = body[KEY]
        arguments = body.get("vllm_xargs")
        if isinstance(arguments, Mapping) and KEY in arguments and request.vllm_xargs is None:
            request.vllm_xargs = {KEY: arguments[KEY]}
        return await original(self, request, raw_request)

    return create_chat_completion


@cache
def _with_field(model: Any) -> Any:
    """Anthropic's models take no field that they do not know."""
    return create_model(model.__name__, __base__=model, saesteer=(dict[str, Any], ...))


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def messages_full_converter(self: Any, generator: Any) -> Any:
        made = original(self, generator)
        said = getattr(generator, KEY, None)
        return made if said is None else _with_field(made.__class__)(**dict(made), saesteer=said)

    return messages_full_converter


class _Heard:
    """The chunks of a chat completion as they pass, and what they say was applied."""

    def __init__(self, chunks: AsyncGenerator[Any, None]) -> None:
        self.said: Any = None
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        chunk = await anext(self._chunks)
        if not isinstance(chunk, str):
            self.said = getattr(chunk, KEY, self.said)
        elif _FIELD in chunk:
            self.said = json.loads(chunk.removeprefix("data: "))[KEY]
        return chunk


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def message_stream_converter(self: Any, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        heard = _Heard(generator)
        async with aclosing(generator), aclosing(original(self, heard)) as events:
            async for event in events:
                if heard.said is not None and event.startswith(_ENDS):
                    own = json.dumps(heard.said, separators=(",", ":"))
                    event = f"{event.rstrip().removesuffix('}')}{_FIELD}{own}}}\n\n"
                yield event

    return message_stream_converter


def _objects(original: Callable[..., Any]) -> Callable[..., Any]:
    """From 0.33 on, a stream's chunks become events before they become text."""

    @wraps(original)
    async def chat_completion_stream_generator_raw(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        steered = is_steered(request)
        watched = Watched(result_generator, request.n or 1) if steered else result_generator
        async with aclosing(original(self, request, watched, *args, **kwargs)) as chunks:
            async for chunk in chunks:
                ended = steered and any(choice.finish_reason for choice in getattr(chunk, "choices", ()))
                if ended and 0 in watched.said:
                    chunk.saesteer = watched.said[0]
                yield chunk

    return chat_completion_stream_generator_raw
