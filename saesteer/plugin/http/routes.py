"""Which of vLLM's routes serve the field ``saesteer``, and the guard in front of all others. Knows bodies, and no spec.

Most of vLLM's routes drop fields that they do not know, so a spec in their body would run unsteered in silence. The
guard answers such a body with 400. What is not on the list of served routes is guarded, also what a later vLLM adds.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.fields import show
from saesteer.plugin.results.failures import SpecRefused

# /invocations, SageMaker's, hands a body on to chat completions or completions.
SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)
OURS = "/v1/saesteer/"  # the admin routes refuse fields that they do not know
LIMIT = 16 * 2**20  # bytes of a body that the guard holds: as many as the longest spec

_BODILESS = ("GET", "HEAD", "OPTIONS")
_WORD = KEY.encode()
# What a body with the key has in it: the word, a letter of it as \u0073, or UTF-16's zeros.
_MARKS = (_WORD, b"\\u006", b"\\u007", b"\0")
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
# Where vLLM's bodies hold what travels to the engine beside the prompt.
_PLACES: tuple[tuple[str, ...], ...] = (
    (),
    ("vllm_xargs",),
    ("extra_args",),
    ("sampling_params",),
    ("sampling_params", "vllm_xargs"),
    ("sampling_params", "extra_args"),
)


class Guard:
    """ASGI middleware: a body that asks for steering is a 400 on every route that is not served.

    Requests to served routes pass untouched. The body of any other is read before the app sees it, up to LIMIT, and
    parsed only if it may hold the key. What is longer is passed on as it comes, and refused at the word itself.

    Args:
        app: behind it.
        served: paths of the routes that serve the field; none on a server that cannot steer.
    """

    def __init__(self, app: ASGIApp, served: Collection[str] = SERVED) -> None:
        self.app = app
        self.served = tuple(served)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the refusal, or hand the request on."""
        kind = scope["type"]
        path, root = str(scope.get("path", "")), str(scope.get("root_path", "")).rstrip("/")
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        if kind == "websocket":
            receive = _without_specs(receive, send, self._refusal(path))
        elif kind == "http" and scope["method"] not in _BODILESS and not self._passes(path):
            body = _Body(receive, self._refusal(path))
            whole = await body.begin()
            if await _asks(scope, whole) if body.ended else _WORD in whole:
                await _answer(self._refusal(path))(scope, receive, send)
                return
            receive = body
        await self.app(scope, receive, send)

    def _passes(self, path: str) -> bool:
        return path.rstrip("/") in self.served or path.startswith(OURS)  # vLLM redirects a / at the end

    def _refusal(self, path: str) -> str:
        if not self.served:
            why = "without saesteer's configuration or with SAESTEER_DISABLE=1"
            return f"this server was started {why}, so it cannot steer"
        return f"is not served on {show(path)}, expected one of the routes {', '.join(self.served)}"


def _refused(message: str) -> SpecRefused:
    return SpecRefused(SpecError(message, field=KEY, code="not_served"))


def _answer(message: str) -> JSONResponse:
    """vLLM's error object."""
    told = {"message": str(_refused(message)), "type": "BadRequestError", "param": KEY, "code": 400}
    return JSONResponse({"error": told}, 400)


class _Body:
    """The body of one request, of which the beginning has been looked at, as the app receives it."""

    def __init__(self, receive: Receive, message: str) -> None:
        self.ended = False
        self._receive = receive
        self._message = message
        self._held: deque[Message] = deque()
        self._tail = b""  # so that the word is found across the borders of messages

    async def begin(self) -> bytes:
        """The body if it ends within LIMIT, or what has come when it is longer."""
        parts, size = [], 0
        while not self.ended and size <= LIMIT:
            message = await self._receive()
            if message["type"] != "http.request":  # the client has gone
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
                raise HTTPException(400, str(_refused(self._message)))  # vLLM's app makes its error object of it
            self._tail = passing[-len(_WORD) :]
        return message


async def _asks(scope: Scope, body: bytes) -> bool:
    """Whether a whole body asks for steering; one that vLLM could not read either does not."""
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
    """The same of a form, where clients flatten objects into names such as saesteer[edits][][op]."""

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
    """What a WebSocket's client sends; in the place of an event with a spec goes an error back, as of /v1/realtime."""

    async def receive_next() -> Message:
        while True:
            event = await receive()
            sent = (event.get("text") or "").encode() or event.get("bytes") or b""
            if not _json_asks(sent):
                return event
            told = {"type": "error", "error": str(_refused(message)), "code": "not_served"}
            await send({"type": "websocket.send", "text": json.dumps(told)})

    return receive_next
