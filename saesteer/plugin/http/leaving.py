"""Ends what is done for a request as soon as its client disconnects. Knows no route.

vLLM's own with_cancellation answers None then, which is no answer of routes whose shape is declared.
"""

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from saesteer.plugin.http.refusals import Handler

_GONE = 499  # nobody gets it; access logs and metrics have it


async def while_there(handle: Handler, request: Request) -> Any:
    """The answer to a request; its handler is cancelled if the client disconnects before.

    A stream that has begun listens itself.

    Args:
        handle: FastAPI's handler.
        request: the request.
    """
    try:
        await request.body()  # all of it, so the next message says that the client has left
    except ClientDisconnect:
        return Response(status_code=_GONE)
    work, gone = asyncio.create_task(handle(request)), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=_GONE)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
