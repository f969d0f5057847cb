"""The field ``saesteer`` of HTTP answers: in bodies beside ``usage``, in streams on the chunk that ends a choice.

Knows vLLM's serving classes, and of an answer only what ``CompletionOutput.saesteer`` says. An answer to a request
without a spec passes through untouched. A body with several choices has the first one's on top, and each its own.

What is refused while it runs (failures.py) is a 400, or the last event of a stream; of responses it is made here.
Anthropic's form of an answer is in anthropic.py.
"""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any

from saesteer.config.config import KEY
from saesteer.plugin.results.failures import SpecRefused

_ENDS = re.compile(r'"finish_reason":\s*"')  # what a text says stands in it with escaped quotes


def is_steered(request: Any) -> bool:
    """Whether a request of the OpenAI API brings a spec, in its body or in vllm_xargs."""
    return KEY in (request.model_extra or ()) or KEY in (getattr(request, "vllm_xargs", None) or ())


class Watched:
    """The engine's outputs as they pass, and what they say by choice."""

    def __init__(self, outputs: AsyncIterator[Any], choices: int) -> None:
        self.said: dict[int, Any] = {}
        self._outputs = outputs
        self._choices = choices  # of each prompt

    def __aiter__(self) -> "Watched":
        return self

    async def __anext__(self) -> Any:
        found = await self._outputs.__anext__()
        prompt, output = found if isinstance(found, tuple) else (0, found)
        self.said |= _said(output, prompt * self._choices)
        return found


def _said(output: Any, first: int) -> dict[int, Any]:
    return {first + one.index: one.saesteer for one in output.outputs if hasattr(one, KEY)}


def _tell(response: Any, said: Mapping[int, Any]) -> None:
    """Put it into a body; an error has no choices, and beam search says nothing."""
    choices = getattr(response, "choices", None)
    if not choices or not said:
        return
    response.saesteer = said.get(choices[0].index)
    if len(choices) > 1:
        for choice in choices:
            choice.saesteer = said.get(choice.index)


def _with_answer(chunk: str, said: Mapping[int, Any]) -> str:
    """The chunk that ends a choice, with what was applied for it; any other as it is."""
    if not _ENDS.search(chunk):
        return chunk
    event = json.loads(chunk.removeprefix("data: "))
    found = [
        said[one["index"]] for one in event.get("choices", ()) if one.get("finish_reason") and one["index"] in said
    ]
    if not found:
        return chunk
    own = json.dumps(found[0], separators=(",", ":"))
    return f'{chunk.rstrip().removesuffix("}")},"{KEY}":{own}}}\n\n'  # vLLM's own bytes stay as they are


async def _chunks(chunks: AsyncGenerator[str, None], said: Mapping[int, Any]) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):  # a client that is gone frees its request at once
        async for chunk in chunks:
            yield _with_answer(chunk, said)


def _chat(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_steered(request):
            return await original(self, request, result_generator, *args, **kwargs)
        watched = Watched(result_generator, request.n or 1)
        response = await original(self, request, watched, *args, **kwargs)
        _tell(response, watched.said)
        return response

    return chat_completion_full_generator


def _chat_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def chat_completion_stream_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_steered(request):
            return original(self, request, result_generator, *args, **kwargs)
        watched = Watched(result_generator, request.n or 1)
        return _chunks(original(self, request, watched, *args, **kwargs), watched.said)

    return chat_completion_stream_generator


def _batch_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """The request of one conversation has what the batch's has, also a null, which vLLM leaves out."""

    @wraps(original)
    def to_chat_completion_request(self: Any, messages: Any) -> Any:
        request = original(self, messages)
        if KEY in (self.model_extra or ()):
            request.saesteer = self.model_extra[KEY]
        return request

    return to_chat_completion_request


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A choice for each conversation, in its own stream of outputs."""

    @wraps(original)
    async def chat_completion_full_generator_batch(
        self: Any, request: Any, generators: Sequence[AsyncGenerator[Any, None]], *args: Any, **kwargs: Any
    ) -> Any:
        if not is_steered(request):
            return await original(self, request, generators, *args, **kwargs)
        said: dict[int, Any] = {}
        heard = [_heard(outputs, number, said) for number, outputs in enumerate(generators)]
        response = await original(self, request, heard, *args, **kwargs)
        _tell(response, said)
        return response

    return chat_completion_full_generator_batch


async def _heard(outputs: AsyncGenerator[Any, None], choice: int, said: dict[int, Any]) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):  # where another conversation fails, vLLM closes the rest
        async for output in outputs:
            said |= _said(output, choice)
            yield output


def _completion(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def request_output_to_completion_response(
        self: Any, final_res_batch: Sequence[Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        response = original(self, final_res_batch, request, *args, **kwargs)
        if is_steered(request):
            said: dict[int, Any] = {}
            for number, output in enumerate(final_res_batch):
                said |= _said(output, number * (request.n or 1))
            _tell(response, said)
        return response

    return request_output_to_completion_response


def _completion_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def completion_stream_generator(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_steered(request):
            return original(self, request, engine_inputs, result_generator, *args, **kwargs)
        watched = Watched(result_generator, request.n or 1)
        return _chunks(original(self, request, engine_inputs, watched, *args, **kwargs), watched.said)

    return completion_stream_generator


def _response(original: Callable[..., Any]) -> Callable[..., Any]:
    """Also what ends a stream: its last event holds the body."""

    @wraps(original)
    async def responses_full_generator(
        self: Any, request: Any, sampling_params: Any, result_generator: Any, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            response = await original(self, request, sampling_params, result_generator, context, *args, **kwargs)
        except SpecRefused as error:
            return self.create_error_response(error)  # also known to one that runs in the background
        said = getattr(context, KEY, None)
        if said is not None and hasattr(response, "output"):
            response.saesteer = said
        return response

    return responses_full_generator


def _response_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """An error that is not vLLM's own would break the connection."""

    @wraps(original)
    def responses_stream_generator(self: Any, request: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        events = original(self, request, sampling_params, *args, **kwargs)
        return _ending(events) if is_steered(request) else events

    return responses_stream_generator


async def _ending(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    from openai.types.responses import ResponseErrorEvent

    last = -1
    async with aclosing(events):
        try:
            async for event in events:
                last = getattr(event, "sequence_number", last)
                yield event
        except SpecRefused as error:
            yield ResponseErrorEvent(
                type="error", code=error.code, message=str(error), param=error.field, sequence_number=last + 1
            )


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where tools are called between, each turn is a request of its own; the last one's stays."""

    @wraps(original)
    def append_output(self: Any, output: Any) -> Any:
        said = getattr(output.outputs[0], KEY, None)
        if said is not None:
            self.saesteer = said
        return original(self, output)

    return append_output
