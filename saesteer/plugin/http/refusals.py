"""How saesteer's own routes refuse: one body for all of them. Knows no route."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import reduce
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from saesteer.language.fields import step

Handler = Callable[[Request], Coroutine[Any, Any, Any]]


class Refusal(BaseModel):
    """Why nothing was done."""

    message: str = Field(description="One sentence: the field, the value, what was expected.")
    type: str
    param: str | None = Field(description="The field of the body or of the query that is wrong.")
    code: str = Field(description="Stable and machine-readable.", examples=["no_room"])


class Refused(BaseModel):
    """The body of every refusal."""

    error: Refusal


def refuse(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    """The answer of a refusal."""
    kind = {401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 409: "ConflictError"}
    refusal = Refusal(message=message, type=kind.get(status, "BadRequestError"), param=param, code=code)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(Refused(error=refusal).model_dump(), status, headers)


def first_of(error: RequestValidationError, where: str) -> tuple[str, str, str]:
    """What FastAPI found first: its message, our code, and the field.

    Args:
        error: of a body or of a query.
        where: which of them; it is no part of the field.
    """
    first = error.errors()[0]
    parts = first["loc"][first["loc"][:1] == (where,) :]
    if first["type"] == "string_unicode":  # a name with half a surrogate pair, which no field has
        return "Extra inputs are not permitted", "unknown_field", _path([*parts, first["input"]])
    codes = {"missing": "missing_field", "extra_forbidden": "unknown_field", "json_invalid": "bad_json"}
    ranges = ("greater_than_equal", "less_than_equal", "string_too_long")
    code = "out_of_range" if first["type"] in ranges else codes.get(first["type"], "wrong_type")
    return str(first["msg"]), code, _path(parts)


def _path(parts: Sequence[object]) -> str:
    return reduce(step, parts, "").removeprefix(".")


def refusing(
    answer: Callable[[Exception], JSONResponse | None],
    handled: Callable[[Handler, Request], Awaitable[Any]] = lambda handle, request: handle(request),
) -> type[APIRoute]:
    """The class of routes whose errors are answered as refusals.

    Args:
        answer: a function: an error → its answer; None: it is a fault, which is raised.
        handled: what handles a request, with FastAPI's handler.
    """

    class Route(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def told(request: Request) -> Any:
                try:
                    return await handled(handle, request)
                except Exception as error:
                    refusal = answer(error)
                    if refusal is None:
                        raise
                    return refusal

            return told

    return Route
