"""How a stream to a steered request begins: once the engine has taken it, so that what is wrong with it is a 400.

vLLM makes a stream first and admits its request with the first look at it, when HTTP has said 200 already. Here that
look is taken before, and HTTP says 200 while the first token is computed. Where doses above a limit are refused, it
waits for that token, as the prompt's are known then. Knows vLLM's serving classes; a request without a spec is streamed
as ever.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from typing import Any

from saesteer.plugin.http.bodies import is_steered

_EARLY = ("response.created", "response.in_progress")  # events that responses begin with, whatever comes


class _Admission:
    """Whether the engine has taken all prompts of a streamed request."""

    def __init__(self, prompts: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._left = prompts

    def one(self) -> None:
        """It has taken one."""
        self._left -= 1
        if self._left == 0:
            self.done.set_result(None)


_admission: ContextVar[_Admission | None] = ContextVar("saesteer_admission", default=None)


def admitted() -> None:
    """The engine has taken a prompt; to be called where that happens, in the context in which it was asked."""
    waiting = _admission.get()
    if waiting is not None:
        waiting.one()


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        made = await original(self, request, *args, **kwargs)
        if not isinstance(made, AsyncGenerator) or not is_steered(request):
            return made
        admission = _Admission(_prompts(request))
        before = _admission.set(admission)
        begun = asyncio.create_task(_begun(made))  # with the context as it is now
        _admission.reset(before)
        awaited = {begun} if _refuses_doses(self) else {begun, admission.done}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            first = begun.result() if begun.done() else []
        except BaseException:
            begun.cancel()
            await asyncio.wait({begun})
            await made.aclose()  # a client that has gone meanwhile frees its request
            raise
        refusal = _refusal(first[-1]) if first else None
        if refusal is None:
            return _whole(begun, made)
        await made.aclose()
        return self.create_error_response(**refusal)

    return create


def _prompts(request: Any) -> int:
    """How many there are in one request; a list of numbers is one of tokens."""
    found = getattr(request, "prompt", None)
    return len(found) if isinstance(found, list) and found and not isinstance(found[0], int) else 1


def _refuses_doses(serving: Any) -> bool:
    config = serving.engine_client.input_processor.saesteer_config
    return config is not None and config.max_dose_action == "refuse"


async def _begun(made: AsyncGenerator[Any, None]) -> list[Any]:
    """What a stream begins with, up to the first event that the engine was needed for."""
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
    """What an error says that a stream begins with; None for anything else."""
    if not isinstance(event, str):
        error = getattr(event, "type", None) == "error"
        return {"message": event.message, "param": event.param} if error else None
    if event.startswith("event: error\n"):  # of /v1/messages, which is made so from 0.33 on
        told = json.loads(event.partition("data: ")[2])["error"]
        wrong = told["type"] == "invalid_request_error"
        return {"message": told["message"]} if wrong else None
    if not event.startswith('data: {"error":'):
        return None
    told = json.loads(event.removeprefix("data: "))["error"]
    return {
        "message": told["message"],
        "err_type": told["type"],
        "status_code": HTTPStatus(told["code"]),
        "param": told["param"],
    }
