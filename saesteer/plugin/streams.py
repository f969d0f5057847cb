"""How a stream to a steered request begins: with its first token, so that what is refused before is a 400.

vLLM makes a stream first and admits its request with the first look at it, when HTTP has said 200 already. Here that
look is taken before. Knows vLLM's serving classes; a request without a spec is streamed as ever.
"""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cache, wraps
from http import HTTPStatus
from typing import Any

from saesteer.plugin import hooks
from saesteer.plugin.bodies import is_steered

_EARLY = ("response.created", "response.in_progress")  # events that responses begin with, whatever comes


@cache
def install() -> None:
    """Put the wraps in place, in a process that answers HTTP; safe to call again."""
    hooks.wrap("OpenAIServingChat.create_chat_completion", _looking)
    hooks.wrap("OpenAIServingCompletion.create_completion", _looking)
    hooks.wrap("OpenAIServingResponses.create_responses", _looking)


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        made = await original(self, request, *args, **kwargs)
        if not isinstance(made, AsyncGenerator) or not is_steered(request):
            return made
        first: list[Any] = []
        try:
            async for one in made:
                first.append(one)
                if getattr(one, "type", None) not in _EARLY:
                    break
        except BaseException:
            await made.aclose()  # a client that has gone meanwhile frees its request
            raise
        refusal = _refusal(first[-1]) if first else None
        if refusal is None:
            return _whole(first, made)
        await made.aclose()
        return self.create_error_response(**refusal)

    return create


async def _whole(first: list[Any], rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(rest):
        for one in first:
            yield one
        async for one in rest:
            yield one


def _refusal(event: Any) -> dict[str, Any] | None:
    """What an error says that a stream begins with; None for anything else."""
    if not isinstance(event, str):
        error = getattr(event, "type", None) == "error"
        return {"message": event.message, "param": event.param} if error else None
    if not event.startswith('data: {"error":'):
        return None
    told = json.loads(event.removeprefix("data: "))["error"]
    return {
        "message": told["message"],
        "err_type": told["type"],
        "status_code": HTTPStatus(told["code"]),
        "param": told["param"],
    }
