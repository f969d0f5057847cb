"""Delays the stream of a steered request until the engine has admitted it, so that a wrong request gets a 400.

vLLM returns the stream first and admits its request when the stream is first read, after HTTP has sent 200. Here the
stream is read first, and HTTP sends 200 while the first token is computed. If the server refuses doses above a limit,
or what is not finite, HTTP waits for that token, since then the prompt has been computed. Knows vLLM's serving classes;
requests without a spec are streamed as in stock vLLM.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from saesteer.plugin.http.bodies import failure, is_steered
from saesteer.plugin.http.models import has_default
from saesteer.plugin.results.kept import one_body
from saesteer.plugin.wrap import Original, around

_EARLY = ("response.created", "response.in_progress")  # events that every response begins with


# A future for each prompt of the streamed request that the engine has not admitted yet.
_waiting: ContextVar[list[asyncio.Future[None]] | None] = ContextVar("saesteer_waiting", default=None)


def admitted() -> None:
    """Records that the engine has admitted a prompt; called in the context of the request."""
    waiting = _waiting.get()
    if waiting:
        waiting.pop().set_result(None)


@around
async def _looking(original: Original, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    one_body()
    made = await original(self, request, *args, **kwargs)
    if not isinstance(made, AsyncGenerator) or not (is_steered(request) or has_default()):
        return made
    prompts = [asyncio.get_running_loop().create_future() for _ in range(_prompts(request))]
    before = _waiting.set([*prompts])
    begun = asyncio.create_task(_begun(made))  # with the present context
    _waiting.reset(before)
    awaited = {begun} if _may_fail(self) else {begun, asyncio.gather(*prompts)}
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        first = begun.result() if begun.done() else []
    except BaseException:
        begun.cancel()
        await asyncio.wait({begun})
        await made.aclose()  # a client that has disconnected frees its request
        raise
    refusal = _refusal(first[-1]) if first else None
    if refusal is None:
        return _whole(begun, made)
    await made.aclose()
    return self.create_error_response(**refusal)


def _prompts(request: Any) -> int:
    """The number of prompts in a request; a list of numbers is one prompt of tokens."""
    found = getattr(request, "prompt", None)
    return len(found) if isinstance(found, list) and found and not isinstance(found[0], int) else 1


def _may_fail(serving: Any) -> bool:
    """Whether a request may be ended for what its prompt's pass computes."""
    config = serving.engine_client.input_processor.saesteer_door.config
    return config is not None and (config.max_dose_action == "refuse" or config.fail_fast)


async def _begun(made: AsyncGenerator[Any, None]) -> list[Any]:
    """The beginning of a stream, up to the first event that needed the engine."""
    first = []
    async for one in made:
        first.append(one)
        if getattr(one, "type", None) not in _EARLY:
            break
    return first


async def _whole(begun: asyncio.Task[list[Any]], rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(rest):
        for one in await begun:
            yield one
        async for one in rest:
            yield one


def _refusal(event: Any) -> dict[str, Any] | None:
    """The arguments of vLLM's error for a stream that begins with one; None for other streams."""
    if not isinstance(event, str):
        failed = getattr(event, "type", None) == "error"
        return {"message": event.message, "param": event.param} if failed else None
    if event.startswith("event: error\n"):  # of /v1/messages, from vLLM 0.33 on
        error = json.loads(event.partition("data: ")[2])["error"]
        wrong = error["type"] == "invalid_request_error"
        return {"message": error["message"]} if wrong else None
    if (error := failure(event)) is None:
        return None
    return {
        "message": error["message"],
        "err_type": error["type"],
        "status_code": HTTPStatus(error["code"]),
        "param": error["param"],
    }
