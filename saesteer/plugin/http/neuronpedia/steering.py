"""What Neuronpedia's steering routes answer: the texts so far, steered and not. Knows no route."""

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np

from saesteer.config.decoders import site_of_hook
from saesteer.language.fields import fail, show
from saesteer.plugin.http.neuronpedia import shapes
from saesteer.plugin.http.neuronpedia.host import Host
from saesteer.plugin.http.neuronpedia.meaning import (
    EVERYWHERE,
    Json,
    Place,
    Prompt,
    Steered,
    but_special,
    check_finite,
    edits_of,
    place_of,
    sampling,
    spec_of,
)

_LEAST = -9999.0  # JSON has no number for the logarithm of 0


class Said(NamedTuple):
    """What the model has said so far."""

    text: str = ""
    ids: Sequence[int] = ()
    logprobs: list[shapes.Logprob] | None = None


Answer = Callable[[Mapping[shapes.Type, Said]], shapes.Shape]
Answers = AsyncGenerator[shapes.Shape, None]


async def completion(host: Host, asked: shapes.SteerCompletionRequest) -> Answers:
    """The continuations of a text, each time all of them so far."""
    prompt = await host.prompt(asked.prompt)

    def answer(said: Mapping[shapes.Type, Said]) -> shapes.SteerCompletionResponse:
        found = [(kind, said.get(kind, Said())) for kind in asked.types]
        outputs = [shapes.SteerOutput(type=kind, output=one.text, logprobs=one.logprobs) for kind, one in found]
        return shapes.SteerCompletionResponse(outputs=outputs)

    return _answers(host, asked, prompt, EVERYWHERE, answer, plain=True)


async def chat(host: Host, asked: shapes.SteerCompletionChatRequest) -> Answers:
    """The answers in a chat, each time all of them so far."""
    if asked.is_assistant_axis:
        fail("isAssistantAxis", "not_served", "needs persona vectors, which this server has not; expected false")
    prompt = await host.chat([one.model_dump() for one in asked.prompt])
    given = shapes.ChatResult(chat_template=asked.prompt, raw=prompt.text)

    def answer(said: Mapping[shapes.Type, Said]) -> shapes.SteerCompletionChatResponse:
        outputs = []
        for kind in asked.types:
            one = said.get(kind, Said())
            message = shapes.ChatMessage(role="assistant", content=host.plain(one.ids))
            outputs.append(
                shapes.ChatResult(
                    chat_template=[*asked.prompt, message],
                    raw=prompt.text + one.text,
                    type=kind,
                    logprobs=one.logprobs,
                )
            )
        return shapes.SteerCompletionChatResponse(outputs=outputs, input=given)

    scope = EVERYWHERE if asked.steer_special_tokens else but_special(prompt)
    return _answers(host, asked, prompt, scope, answer, plain=False)


async def _answers(
    host: Host, asked: shapes.Steer, prompt: Prompt, scope: Json, answer: Answer, *, plain: bool
) -> Answers:
    """One answer after the other; those that have not begun are empty.

    Args:
        host: the server.
        asked: the request.
        prompt: as tokens.
        scope: the tokens that are steered.
        answer: the shape of what was said.
        plain: whether the text is without special tokens.

    Raises:
        SpecError: the request is wrong, refused, or fails.
    """
    if (asked.features is None) == (asked.vectors is None):
        fail("features", "conflict", "stands next to vectors, or both are missing, expected one of the two")
    edits: list[Json] = []
    if "STEERED" in asked.types:
        given = await _features(host, asked.features or ())
        given += [_vector(one, f"vectors[{i}]") for i, one in enumerate(asked.vectors or ())]
        edits = edits_of(given, asked, scope)
    options = sampling(asked, host.longest - len(prompt.ids)) | {"skip_special_tokens": plain}
    said: dict[shapes.Type, Said] = {}
    for kind in asked.types:
        # A client that disconnects frees its request at once.
        async with aclosing(
            host.generate(prompt, spec_of(kind, edits), stream=bool(asked.stream), **options)
        ) as choices:
            async for one in choices:
                before = said.get(kind, Said()).logprobs or []
                logprobs = _logprobs(host, one, asked.n_logprobs or 0, before)
                said[kind] = Said(one.text, one.token_ids, logprobs)
                yield answer(said)


def _vector(one: shapes.SteerVector, at: str) -> Steered:
    site = site_of_hook(one.hook)
    if site is None:
        fail(f"{at}.hook", "unknown_name", f"got {show(one.hook)}, expected a hook such as blocks.20.hook_resid_post")
    with np.errstate(over="ignore"):  # what float32 does not hold is refused as infinite
        return Steered(site, one.strength, np.array(one.steering_vector, np.float32), at)


async def _features(host: Host, asked: Sequence[shapes.SteerFeature]) -> list[Steered]:
    """Those of a dictionary are read together."""
    found: dict[int, Steered] = {}
    places: dict[str, tuple[Place, list[int]]] = {}
    for number, one in enumerate(asked):
        place = place_of(host.catalog, one.source, one.model, f"features[{number}].source")
        if place.info.site_out is None:
            fail(f"features[{number}]", "not_served", "is of a dictionary whose files name no site, expected another")
        places.setdefault(place.key, (place, []))[1].append(number)
    for place, numbers in places.values():
        rows = await host.rows_of(place, {f"features[{number}]": asked[number].index for number in numbers})
        for number, row in zip(numbers, rows, strict=True):
            found[number] = Steered(str(place.info.site_out), asked[number].strength, row, f"features[{number}]")
    return [found[number] for number in range(len(asked))]


def _logprobs(host: Host, choice: Any, most: int, before: Sequence[shapes.Logprob]) -> list[shapes.Logprob] | None:
    """The most likely tokens at each position, and the one that was sampled.

    Args:
        host: the server.
        choice: what the model has said so far.
        most: tokens at each position.
        before: of the first positions, as they were in an earlier event.
    """
    if not most or not choice.logprobs:
        return None
    found, start = [*before], len(before)
    for token, held in zip(choice.token_ids[start:], choice.logprobs[start:], strict=False):
        best = sorted(held.items(), key=lambda one: -one[1].logprob)[:most]
        tops = [shapes.LogprobTop(token=_word(host, one, held), logprob=_logprob(of)) for one, of in best]
        own = _logprob(held[token])
        found.append(shapes.Logprob(token=_word(host, token, held), logprob=own, top_logprobs=tops))
    return found


def _logprob(of: Any) -> float:
    if of.logprob == -math.inf:
        return _LEAST
    check_finite([of.logprob], "logprobs")
    return max(of.logprob, _LEAST)


def _word(host: Host, token: int, held: Mapping[int, Any]) -> str:
    told: str | None = held[token].decoded_token
    return host.engine.get_tokenizer().decode([token]) if told is None else told
