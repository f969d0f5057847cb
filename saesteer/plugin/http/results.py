"""The routes of kept results: what an answer names by a handle. Knows files, but not what is in them.

They are open to whoever may send requests: --api-key guards them like all of /v1, and nobody can guess a handle.
"""

from asyncio import wait_for
from collections import Counter
from contextlib import suppress
from functools import partial
from os import SEEK_END
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from saesteer.errors import SpecError
from saesteer.plugin.http.refusals import Refused, refuse, refusing
from saesteer.plugin.results.kept import Results, client
from saesteer.plugin.results.spools import View

PIECE = 1 << 18  # bytes
SECONDS = 60.0  # that a client may take to receive a piece
MOST = 32  # results that an API server sends at a time; a client gets half of what others leave
_MEDIA = "application/octet-stream"


class DeletedResult(BaseModel):
    """A result that nobody can fetch any more."""

    handle: str
    deleted: bool = True


def _refusal(error: Exception) -> JSONResponse | None:
    return refuse(404, str(error), error.code, error.field) if isinstance(error, SpecError) else None


def _results(request: Request) -> Any:
    return request.app.state.saesteer_results


router = APIRouter(prefix="/v1/saesteer", route_class=refusing(_refusal), tags=["saesteer"])
_Kept = Annotated[Results, Depends(_results)]
_MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": Refused, "description": "It was deleted, has expired, or never was."}
}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A file in the form of safetensors, with the tensors `activations` and `positions`.",
        "content": {_MEDIA: {"schema": {"type": "string", "format": "binary"}}},
    }
}


_ERRORS = _MISSING | {429: {"model": Refused, "description": "Too many are being fetched."}}


class _Fetch(StreamingResponse):
    """A result on its way to a client."""

    def __init__(self, file: BinaryIO | View, now: Counter[str]) -> None:
        size = file.seek(0, SEEK_END)
        file.seek(0)
        super().__init__(iter(partial(file.read, PIECE), b""), media_type=_MEDIA, headers={"Content-Length": str(size)})
        self._file, self._now = file, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; from a client that receives nothing more, the server disconnects."""

        async def soon(message: Message) -> None:
            await wait_for(send(message), SECONDS)

        whose, now = client.get(), self._now
        with self._file:
            if now.total() + now[whose] + 2 > MOST:
                found = f"{now[whose]} results are being sent to this client, and {now.total()} in all"
                await refuse(429, f"{found}; fetch it again later", "too_many", "handle")(scope, receive, send)
                return
            now[whose] += 1
            try:
                with suppress(TimeoutError):
                    await super().__call__(scope, receive, soon)
            finally:
                now[whose] -= 1


@router.get("/results/{handle}", responses=_FILE | _ERRORS, summary="Fetch a result", response_class=StreamingResponse)
def get_result(results: _Kept, handle: str) -> _Fetch:
    """What a request has read with `"as": "handle"`, as often as wanted. In a thread: it reads a file."""
    return _Fetch(results.open(handle), results.fetches)


@router.delete("/results/{handle}", responses=_MISSING, summary="Delete a result")
def delete_result(results: _Kept, handle: str) -> DeletedResult:
    """Makes room for others. Without it a result expires."""
    results.delete(handle)
    return DeletedResult(handle=handle)
