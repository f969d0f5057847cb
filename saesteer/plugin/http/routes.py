"""The routes of vLLM that serve the field ``saesteer``, and the guard for all others. Knows bodies, but no spec.

Most of vLLM's routes drop unknown fields, so a spec in their body would be ignored in silence. The guard answers such
a body with 400. It guards every route that is not on the list, including those that a later vLLM adds.
"""

import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.fields import show
from saesteer.plugin.results.failures import SpecRefused

# SageMaker's /invocations passes a body on to chat completions or completions.
SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)
OURS = "/v1/saesteer/"  # the admin routes refuse unknown fields themselves
LIMIT = 16 * 2**20  # bytes of a body that the guard reads: the length of the longest spec

_BODILESS = ("GET", "HEAD", "OPTIONS")
_WORD = KEY.encode()
# A body with the key contains one of these: the word, one of its letters as \u0073, or the zeros of UTF-16.
_MARKS = (_WORD, b"\\u006", b"\\u007", b"\0")
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
NO_FIELDS = ("extra_body", "extra_args", "sampling_params")  # where clients put what vLLM's bodies hold elsewhere
INSIDE = ("vllm_xargs", "extra_args")  # where a spec may stand in these
# Where vLLM's bodies hold what travels to the engine with the prompt, and where clients think that they do.
_PLACES = ((), ("vllm_xargs",), *((name, *more) for name in NO_FIELDS for more in ((), *((one,) for one in INSIDE))))


def path_of(scope: Scope) -> str:
    """A request's path as the routes have it, without what a proxy has put in front (--root-path)."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Guard:
    """ASGI middleware that answers 400 if a body asks for steering on a route that does not serve the field.

    Requests to served routes pass unchanged, and so do those that no route takes. Other bodies are read before the app
    gets them, up to LIMIT, and parsed only if they may contain the key. A longer body is passed on as it arrives, and
    refused once it contains the word.

    Args:
        app: the app behind the guard.
        served: paths of the routes that serve the field; none on a server that cannot steer.
    """

    def __init__(self, app: ASGIApp, served: Collection[str] = SERVED) -> None:
        self.app = app
        self.served = tuple(served)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or passes it on."""
        kind, path = scope["type"], path_of(scope)
        if kind == "websocket":
            receive = _without_specs(receive, send, self._refusal(path))
        elif kind == "http" and scope["method"] not in _BODILESS and not self._passes(path) and _is_routed(scope):
            body = _Body(receive, self._refusal(path))
            whole = await body.begin()
            if await _asks(scope, whole) if body.ended else _WORD in whole:
                await _answer(self._refusal(path))(scope, receive, send)
                return
            receive = body
        await self.app(scope, receive, send)

    def _passes(self, path: str) -> bool:
        return path.rstrip("/") in self.served or path.startswith(OURS)  # vLLM redirects a path with a / at its end

    def _refusal(self, path: str) -> str:
        if not self.served:
            why = "without saesteer's configuration or with SAESTEER_DISABLE=1"
            return f"this server was started {why}, so it cannot steer"
        return unserved(show(path), self.served)


def _is_routed(scope: Scope) -> bool:
    """Whether a route of the app takes the request; nobody looks at the body of another."""
    routes = getattr(scope.get("app"), "routes", None)
    return routes is None or any(route.matches(scope)[0] is Match.FULL for route in routes)


def unserved(where: str, served: Collection[str] = SERVED) -> str:
    """Why a spec is refused where the field is not served."""
    return f"is not served on {where}, expected one of the routes {', '.join(served)}"


def refused(message: str) -> SpecRefused:
    """The refusal of a spec that stands where the field is not served."""
    return SpecRefused(SpecError(message, field=KEY, code="not_served"))


def _answer(message: str) -> JSONResponse:
    """vLLM's error object."""
    error = {"message": str(refused(message)), "type": "BadRequestError", "param": KEY, "code": 400}
    return JSONResponse({"error": error}, 400)


class _Body:
    """Passes a request's body on to the app after its beginning has been read."""

    def __init__(self, receive: Receive, message: str) -> None:
        self.ended = False
        self._receive = receive
        self._message = message
        self._held: deque[Message] = deque()
        self._tail = b""  # to find the word across two messages

    async def begin(self) -> bytes:
        """The body if it ends within LIMIT, or the part read so far if it is longer."""
        parts, size = [], 0
        while not self.ended and size <= LIMIT:
            message = await self._receive()
            if message["type"] != "http.request":  # the client has disconnected
                self._held.append(message)
                break
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self.ended = not message.get("more_body", False)
        whole = b"".join(parts)
        self._held.appendleft({"type": "http.request", "body": whole, "more_body": not self.ended})
        self._tail = whole[-len(_WORD) :]
        return whole

    async def __call__(self) -> Message:
        if self._held:
            return self._held.popleft()
        message = await self._receive()
        if not self.ended and message["type"] == "http.request":
            self.ended = not message.get("more_body", False)
            passing = self._tail + message.get("body", b"")
            if _WORD in passing:
                raise HTTPException(400, str(refused(self._message)))  # vLLM's app turns it into its error object
            self._tail = passing[-len(_WORD) :]
        return message


async def _asks(scope: Scope, body: bytes) -> bool:
    """True if a whole body asks for steering; False if it does not, or vLLM could not read it either."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if content_type.decode("latin-1").partition(";")[0].strip().lower() not in _FORMS:
        return _json_asks(body)
    return _WORD in body and await _form_asks(scope, body)


def _json_asks(text: bytes) -> bool:
    if not any(mark in text for mark in _MARKS):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return any(isinstance(held, Mapping) and KEY in held for held in (_at(found, place) for place in _PLACES))


def _at(found: Any, place: Sequence[str]) -> Any:
    for key in place:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


async def _form_asks(scope: Scope, body: bytes) -> bool:
    """The same for a form, in which clients flatten objects into names such as saesteer[edits][][op]."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(scope, receive).form() as form:
            fields = [(re.findall(r"[^\[\]]+", name), value) for name, value in form.multi_items()]
    except (HTTPException, MultiPartException):
        return False
    return any(
        path[:1] == [KEY]
        or path[:2] == ["vllm_xargs", KEY]
        or (path == ["vllm_xargs"] and isinstance(value, str) and _json_asks(value.encode()))
        for path, value in fields
    )


def _without_specs(receive: Receive, send: Send, message: str) -> Receive:
    """Drops a WebSocket client's events that contain a spec, and sends an error back, in the form of /v1/realtime."""

    async def receive_next() -> Message:
        while True:
            event = await receive()
            sent = (event.get("text") or "").encode() or event.get("bytes") or b""
            if not _json_asks(sent):
                return event
            error = {"type": "error", "error": str(refused(message)), "code": "not_served"}
            await send({"type": "websocket.send", "text": json.dumps(error)})

    return receive_next
