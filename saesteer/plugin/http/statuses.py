"""The HTTP status of refusals that are no 400, and the header of answers that are steered. Knows codes and bodies,
neither routes nor why anything was refused.

vLLM answers every refusal of a request with 400. The code at the end of the message says where another status belongs,
and here it takes the place of the 400, in the body as well. Where the fault is the server's, so does the error's type.
Only messages that saesteer has made count: at the end of another one, a client's words may look like a code.
"""

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

refusals = deque[str](maxlen=1024)  # our last messages: of others a client may have chosen the words
# Of the codes of refused requests; those of the admin routes choose their own.
STATUS: Mapping[str, int] = {
    "too_large": 413,
    "non_finite": 422,
    "collapsed": 422,
    "results_full": 429,
    "consumer": 500,
    "no_space": 507,
}
_CODE = re.compile(r"\[([a-z_]+)\]$")
APPLIED = b"x-saesteer-applied"
_mark: ContextVar[list[str]] = ContextVar("saesteer_mark")  # of this context's HTTP request; empty: it has none
_LONGEST = 1 << 16  # bytes of a refusal; every other body passes as it comes


def mark(text: str) -> None:
    """Put into the header what is applied to the present HTTP request, if there is one; its last prompt counts."""
    if (found := _mark.get(None)) is not None:
        found[:] = [text]


class Statuses:
    """ASGI middleware that gives a refusal the status of its code; whatever is no 400 passes at once, marked."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        marks: list[str] = []
        _mark.set(marks)
        await self.app(scope, receive, send if scope["type"] != "http" else _Answer(send, marks))


class _Answer:
    """Passes a response on, a refusal after all of it has come."""

    def __init__(self, send: Send, marks: Sequence[str]) -> None:
        self._send = send
        self._marks = marks
        self._held: list[Message] = []

    async def __call__(self, message: Message) -> None:
        if not self._held and not _begins_refusal(message):
            if message["type"] == "http.response.start" and message["status"] == 200:
                message["headers"] = [*message["headers"], *((APPLIED, one.encode()) for one in self._marks)]
            await self._send(message)
            return
        self._held.append(message)
        if len(self._held) < 2 or message.get("more_body"):
            return
        start, *parts = self._held
        self._held = []
        body = b"".join(part.get("body", b"") for part in parts)
        status, body = _with_status(body)
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _begins_refusal(message: Message) -> bool:
    if message["type"] != "http.response.start" or message["status"] != 400:
        return False
    length = dict(message["headers"]).get(b"content-length", b"")
    return length.isdigit() and int(length) <= _LONGEST  # JSON of one piece


def _with_status(body: bytes) -> tuple[int, bytes]:
    """The status of a refusal, and its body with that status."""
    try:
        found = json.loads(body)
        error: Any = found["error"]
        code = _CODE.search(error["message"])
    except (ValueError, TypeError, KeyError):
        return 400, body
    status = STATUS.get(code[1], 400) if code and error["message"] in refusals else 400
    if status == 400:
        return 400, body
    anthropic = "code" not in error
    if not anthropic:
        error["code"] = status
    if status >= 500:
        error["type"] = "api_error" if anthropic else "InternalServerError"
    return status, json.dumps(found, separators=(",", ":")).encode()
