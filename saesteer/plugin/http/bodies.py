"""The field ``saesteer`` of HTTP answers: next to ``usage`` in a body, on the chunk that ends a choice in a stream.

What a request reads comes with each chunk, as far as it is new; in a stream of the responses API with each delta.

Knows vLLM's serving classes, and no more of an answer than ``CompletionOutput.saesteer``. Answers to requests that
nothing steers have no such output, and pass unchanged; what a request's own body holds decides nothing, since a default
module may steer it. In a body with several choices, each has its own field, and the body has the first one's.

A request that is refused while it runs (failures.py) gets a 400, or an error as the last event of its stream; for the
responses API that event is made here. anthropic.py serves Anthropic's form of an answer.
"""

import json
import math
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.fields import step
from saesteer.plugin.http import models
from saesteer.plugin.http.routes import misplaced, near
from saesteer.plugin.results.errors import SpecRefused
from saesteer.plugin.results.kept import one_body
from saesteer.plugin.results.unsent import Unsent
from saesteer.plugin.wrap import Original, around

FIELD = f',"{KEY}":'  # as it stands in a stream; in a text the quotes would be escaped
_FAILED = 'data: {"error":'  # what ends the stream of a chat or completion that fails
_NUMBERS = ("features", "probes", "dose")  # words of a report that hold numbers which the model has made
_ENDS = re.compile(r'"finish_reason":\s*"')  # in a text the quotes would be escaped


def is_steered(request: Any) -> bool:
    """True if a request of the OpenAI API has a spec, in its body, also as a form's fields, in vllm_xargs or model."""
    # Forms: saesteer[edits][][op]
    names = (name.replace("]", "").split("[") for name, one in (request.model_extra or {}).items() if one is not None)
    arguments = getattr(request, "vllm_xargs", None) or ()
    return any(KEY in one for one in names) or KEY in arguments or models.module_of(request) is not None


def failure(event: Any) -> dict[str, Any] | None:
    """The error of an event that ends a stream of a chat or completion with one; None for other events."""
    if not isinstance(event, str) or not event.startswith(_FAILED):
        return None
    error: dict[str, Any] = json.loads(event.removeprefix("data: "))["error"]
    return error


def refuse_misplaced(request: Any, body: Mapping[str, Any] | None = None) -> None:
    """Refuse a spec that would be dropped in silence: under a misspelt key, or where none of vLLM's bodies is read.

    Args:
        request: vLLM's, to a route that serves the field.
        body: its fields, with those that vLLM does not know; None: the request has these as well.

    Raises:
        SpecRefused: it has one.
    """
    body = vars(request) | (request.model_extra or {}) if body is None else body
    refuse_near(body.keys() - vars(request))
    refuse_near(body.get("vllm_xargs"), "vllm_xargs")
    if found := misplaced(body, KEY, "edits"):
        name, key = found
        message = f"stands in {name}, where no spec is read; expected the field {KEY} beside the model"
        raise SpecRefused(SpecError(message, field=key, code="unknown_field"))


def refuse_near(keys: object, where: str = "") -> None:
    """Refuse a key near ``saesteer`` among those of an object, if it is one; ``where`` is its path.

    Raises:
        SpecRefused: it has one.
    """
    if isinstance(keys, Iterable) and (key := near(keys)) is not None:
        message = f"is no field of a request (did you mean {KEY}?)"
        raise SpecRefused(SpecError(message, field=step(where, key).removeprefix("."), code="unknown_field"))


async def recorded(
    outputs: AsyncGenerator[Any, None], request: Any, reports: dict[int, Any], first: int = 0
) -> AsyncGenerator[Any, None]:
    """Passes on the engine's outputs, and records what each choice reports.

    Args:
        outputs: of one prompt, or of several with the prompt's number.
        request: the request that they answer.
        reports: where the reports go, by choice.
        first: the number of the first choice.
    """
    async with aclosing(outputs):  # if one conversation of a batch fails, vLLM closes the others
        async for found in outputs:
            prompt, output = found if isinstance(found, tuple) else (0, found)
            reports |= _reports_of(output, first + prompt * (request.n or 1))
            yield found


class _Nothing(str):
    """An empty text that counts as one: vLLM's streams leave out an output without text and tokens, even a last one."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True


async def streamed(
    outputs: AsyncGenerator[Any, None], request: Any, unsent: dict[int, Unsent]
) -> AsyncGenerator[Any, None]:
    """Passes on the outputs of a stream as ``recorded``, and takes down what each choice has to say.

    The end of a choice that a rule has stopped in its prompt is an event as well.
    """
    async with aclosing(outputs):
        async for found in outputs:
            prompt, output = found if isinstance(found, tuple) else (0, found)
            for choice in output.outputs:
                ended = choice.finish_reason is not None
                if hasattr(choice, KEY):
                    number = prompt * (request.n or 1) + choice.index
                    unsent.setdefault(number, Unsent()).add(choice.saesteer, ended=ended)
                    if ended and not choice.text and not choice.token_ids:
                        choice.text = _Nothing()
            yield found


def _reports_of(output: Any, first: int) -> dict[int, Any]:
    return {first + one.index: one.saesteer for one in output.outputs if hasattr(one, KEY)}


def _add_reports(response: Any, reports: Mapping[int, Any]) -> None:
    """Adds the reports to a body; an error has no choices, and beam search no reports."""
    choices = getattr(response, "choices", None)
    if not choices or not reports:
        return
    response.saesteer = in_json(reports.get(choices[0].index))
    if len(choices) > 1:
        for choice in choices:
            choice.saesteer = in_json(reports.get(choice.index))


def in_json(report: Any) -> Any:
    """A report as JSON has it, which knows neither NaN nor infinity: null stands in their place."""
    numbers = {} if report is None else {word: report[word] for word in _NUMBERS if word in report}
    try:
        json.dumps(numbers, allow_nan=False)
    except ValueError:
        return report | {word: _finite(found) for word, found in numbers.items()}
    return report


def _finite(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {name: _finite(one) for name, one in found.items()}
    if isinstance(found, list):
        return [_finite(one) for one in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _with_answer(chunk: str, unsent: Mapping[int, Unsent]) -> str:
    """A chunk with what its choice has not said yet: what it has read, and at its end all that it reports.

    Args:
        chunk: the text of an event.
        unsent: of each choice.
    """
    if not (_ENDS.search(chunk) or any(one.waits for one in unsent.values())) or not chunk.startswith("data: {"):
        return chunk
    for one in json.loads(chunk.removeprefix("data: ")).get("choices", ()):
        own = unsent.get(one["index"])
        if own is not None and (said := own.take(end=bool(one.get("finish_reason")))):
            return with_report(chunk, said)
    return chunk


def with_report(event: str, report: Any) -> str:
    """The text of a stream's event, with the field at the end of its object; vLLM's own bytes do not change."""
    return f"{event.rstrip().removesuffix('}')}{FIELD}{json.dumps(in_json(report), separators=(',', ':'))}}}\n\n"


async def _chunks(chunks: AsyncGenerator[str, None], unsent: Mapping[int, Unsent]) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):  # a client that disconnects frees its request at once
        async for chunk in chunks:
            yield _with_answer(chunk, unsent)


@around
async def _chat(original: Original, self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
    reports: dict[int, Any] = {}
    response = await original(self, request, recorded(result_generator, request, reports), *args, **kwargs)
    _add_reports(response, reports)
    return response


@around
def _chat_stream(original: Original, self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
    unsent: dict[int, Unsent] = {}
    outputs = streamed(result_generator, request, unsent)
    return _chunks(original(self, request, outputs, *args, **kwargs), unsent)


@around
def _batch_request(original: Original, self: Any, messages: Any) -> Any:
    """Gives the request of each conversation the batch's field, even a null, which vLLM drops."""
    refuse_misplaced(self)
    request = original(self, messages)
    models.put(request, models.module_of(self))
    if KEY in (self.model_extra or ()):
        request.saesteer = self.model_extra[KEY]
    return request


@around
async def _batch(original: Original, self: Any, request: Any, generators: Any, *args: Any, **kwargs: Any) -> Any:
    """Each conversation is a choice with its own stream of outputs."""
    one_body()
    reports: dict[int, Any] = {}
    own = [recorded(outputs, request, reports, number) for number, outputs in enumerate(generators)]
    response = await original(self, request, own, *args, **kwargs)
    _add_reports(response, reports)
    return response


@around
def _completion(original: Original, self: Any, final_res_batch: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    response = original(self, final_res_batch, request, *args, **kwargs)
    reports: dict[int, Any] = {}
    for number, output in enumerate(final_res_batch):
        reports |= _reports_of(output, number * (request.n or 1))
    _add_reports(response, reports)
    return response


@around
def _completion_stream(
    original: Original, self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
) -> Any:
    unsent: dict[int, Unsent] = {}
    outputs = streamed(result_generator, request, unsent)
    return _chunks(original(self, request, engine_inputs, outputs, *args, **kwargs), unsent)


@around
async def _response(
    original: Original,
    self: Any,
    request: Any,
    sampling_params: Any,
    result_generator: Any,
    context: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Serves streams as well: their last event holds the body."""
    try:
        response = await original(self, request, sampling_params, result_generator, context, *args, **kwargs)
    except SpecRefused as error:
        return self.create_error_response(error)  # a response that runs in the background shows it as well
    told: Unsent | None = getattr(context, KEY, None)
    if told is not None and hasattr(response, "output"):
        response.saesteer = in_json(told.fields)
    return response


@around
def _response_stream(
    original: Original,
    self: Any,
    request: Any,
    sampling_params: Any,
    result_generator: Any,
    context: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Adds what is read to events, and sends a refusal as one: an error not of vLLM's own breaks the connection.

    Requests without a spec may be refused as well: for what --fail-fast finds, or for what the default module does.
    """
    return _events(original(self, request, sampling_params, result_generator, context, *args, **kwargs), context)


async def _events(events: AsyncGenerator[Any, None], context: Any) -> AsyncGenerator[Any, None]:
    from openai.types.responses import ResponseErrorEvent

    last = -1
    async with aclosing(events):
        try:
            async for event in events:
                last = getattr(event, "sequence_number", last)
                _add_unsent(event, getattr(context, KEY, None))
                yield event
        except SpecRefused as error:
            yield ResponseErrorEvent(
                type="error", code=error.code, message=str(error), param=error.field, sequence_number=last + 1
            )


def _add_unsent(event: Any, unsent: Unsent | None) -> None:
    """Adds to a delta what was read, and to the last event, which holds the body, the rest in place of all."""
    if unsent is None:
        return
    if str(getattr(event, "type", "")).endswith(".delta"):
        if said := unsent.take(end=False):
            event.saesteer = in_json(said)
    elif hasattr(getattr(event, "response", None), KEY):
        # A copy, since the body is also what can be retrieved later: that has all.
        event.response = event.response.model_copy(update={KEY: in_json(unsent.take(end=True))})


@around
def _remembering(original: Original, self: Any, output: Any) -> Any:
    """Keeps what the last turn reports; with tool calls, each turn is a request of its own."""
    choice = output.outputs[0]
    if hasattr(choice, KEY):
        if not hasattr(self, KEY):
            self.saesteer = Unsent()
        self.saesteer.add(choice.saesteer, ended=choice.finish_reason is not None)
    return original(self, output)
