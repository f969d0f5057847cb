"""The routes of kept results: what an answer names by a handle. Knows files, but not what is in them.

They are open to whoever may send requests: --api-key guards them like all of /v1, and nobody can guess a handle.
"""

from collections.abc import Iterator
from os import SEEK_END
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from saesteer.errors import SpecError
from saesteer.plugin.http.refusals import Refused, refuse, refusing
from saesteer.plugin.results.kept import Results
from saesteer.plugin.results.spools import View

_PIECE = 1 << 20  # bytes
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


@router.get("/results/{handle}", responses=_FILE | _MISSING, summary="Fetch a result", response_class=StreamingResponse)
def get_result(results: _Kept, handle: str) -> StreamingResponse:
    """What a request has read with `"as": "handle"`, as often as wanted. In a thread: it reads a file."""
    file = results.open(handle)
    size = file.seek(0, SEEK_END)
    file.seek(0)
    return StreamingResponse(_pieces(file), media_type=_MEDIA, headers={"Content-Length": str(size)})


@router.delete("/results/{handle}", responses=_MISSING, summary="Delete a result")
def delete_result(results: _Kept, handle: str) -> DeletedResult:
    """Makes room for others. Without it a result expires."""
    results.delete(handle)
    return DeletedResult(handle=handle)


def _pieces(file: BinaryIO | View) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
