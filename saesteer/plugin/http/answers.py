"""What HTTP answers to steered requests have of ours: the field ``saesteer``, a header, and the status of a refusal.

The field stands at the end of a body and on the event that ends a choice; what a request reads comes with each event of
a stream, as far as it is new. In a body with several choices, each has its own field, and the body has the first one's.
The stream of a request with a spec begins once the engine has admitted it, so that a wrong request gets a 400: vLLM
admits its requests when a stream is first read, after HTTP has sent 200. Where the server refuses doses above a limit,
or what is not finite, the stream begins with the first token, since then the prompt has been computed.

Knows the texts of vLLM's answers, and none of its serving classes. What stands in them comes from the engine's outputs
of the same context (``Exchange``). An answer to a request that nothing steers passes unchanged.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from operator import setitem
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.plugin.http.exchange import STATUS, Exchange, begin, in_json
from saesteer.plugin.http.routes import SERVED, path_of
from saesteer.plugin.results.unsent import Unsent

APPLIED = b"x-saesteer-applied"
_ENDS = re.compile(r'"finish_reason":\s*"')  # in a text the quotes would be escaped
_SEQUENCE = re.compile(r'"sequence_number":\s*(\d+)')
_WRONG = ('data: {"error":', "event: error\n")  # how an event begins that ends a stream for an error
_EARLY = ("event: response.created\n", "event: response.in_progress\n")  # every response begins with these
_LAST = ("event: response.completed\n", "event: response.incomplete\n")


class Answers:
    """ASGI middleware that puts what is ours into answers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http" or path_of(scope).rstrip("/") not in SERVED:
            await self.app(scope, receive, send)
            return
        found = begin(path_of(scope).rstrip("/"))
        answer = _Answer(found, send)
        try:
            await self.app(scope, receive, answer)
        except Exception:
            if found.refused is None or not answer.streams:  # of responses, an error that is none of vLLM's own
                raise
            await answer({"type": "http.response.body", "body": _error_event(found.refused, answer.sequence).encode()})
        finally:
            answer.close()


class _Answer:
    """Sends a response on."""

    def __init__(self, of: Exchange, send: Send) -> None:
        self._of, self._send = of, send
        self.streams = False
        self.sequence = -1  # of the last event of a response
        self._start: Message | None = None  # held: until its body has come, or its stream begins
        self._body: list[bytes] = []  # behind it
        self._lock = asyncio.Lock()
        self._waiting: asyncio.Task[None] | None = None
        self._over = False

    async def __call__(self, message: Message) -> None:
        async with self._lock:
            if message["type"] == "http.response.start":
                await self._starts(message)
            elif not self._over:
                await (self._event if self.streams else self._part)(message)

    def close(self) -> None:
        """The app has returned."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _starts(self, message: Message) -> None:
        of, kind = self._of, dict(message["headers"]).get(b"content-type", b"")
        self.streams = message["status"] == 200 and kind.startswith(b"text/event-stream")
        if message["status"] == 200 and of.mark:
            message["headers"] = [*message["headers"], (APPLIED, of.mark.encode())]
        if self.streams and of.asked:
            self._start, self._waiting = message, asyncio.create_task(self._begins())
        elif kind.startswith(b"application/json") and (of.refused or (message["status"] == 200 and of.unsent)):
            self._start = message
        else:
            await self._send(message)

    async def _begins(self) -> None:
        await self._of.begins.wait()
        async with self._lock:
            await self._begin()

    async def _begin(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            if self._of.mark and APPLIED not in dict(start["headers"]):
                start["headers"] = [*start["headers"], (APPLIED, self._of.mark.encode())]
            await self._send(start)
            for one in self._body:
                await self._send({"type": "http.response.body", "body": one, "more_body": True})
            self._body = []

    async def _event(self, message: Message) -> None:
        text = message.get("body", b"").decode()
        if self._start is not None and text.startswith(_WRONG):
            self._over = True
            await self._whole(*self._refusal(text))
            return
        if text.startswith(_WRONG[1]) and self._of.path == "/v1/messages" and self._of.refused is not None:
            _, body = self._refusal(text)  # up to 0.32, vLLM takes a refusal for a chunk, and says that it is none
            text = f"{_WRONG[1]}data: {body.decode()}\n\n"
        text = self._with_report(text)
        if self._start is not None and text.startswith(_EARLY) and not self._of.begins.is_set():
            self._body.append(text.encode())
            return
        await self._begin()
        await self._send({**message, "body": text.encode()})

    async def _part(self, message: Message) -> None:
        if self._start is None:
            await self._send(message)
            return
        self._body.append(message.get("body", b""))
        if not message.get("more_body"):
            body, status = b"".join(self._body), self._start["status"]
            if status == 200:
                await self._whole(status, self._with_reports(body))
            else:
                await self._whole(*self._refusal(body.decode()))

    async def _whole(self, status: int, body: bytes) -> None:
        start = self._start
        assert start is not None, "it is held"
        headers = [
            (name, value) for name, value in start["headers"] if name not in (b"content-length", b"content-type")
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _refusal(self, text: str) -> tuple[int, bytes]:
        """The status and the body of an error, given as a body or as an event."""
        refused, status = self._of.refused, 400
        found = json.loads(text.partition("data: ")[2] if text.startswith(_WRONG) else text)
        error = found.get("error") if isinstance(found, Mapping) else None
        if not isinstance(error, dict):  # an event of a response
            error = {
                "message": found.get("message"),
                "type": "BadRequestError",
                "param": found.get("param"),
                "code": 400,
            }
            found = {"error": error}
        if refused is not None:
            status = STATUS.get(refused.code, 400)
            anthropic, error["message"] = "code" not in error, str(refused)
            if not anthropic:
                error |= {"code": status, "param": refused.field}
            if status >= 500:
                error["type"] = "api_error" if anthropic else "InternalServerError"
        elif "code" in error or error.get("type") != "invalid_request_error":
            status = error.get("code") or 500
        return status, json.dumps(found, separators=(",", ":")).encode()

    def _with_reports(self, body: bytes) -> bytes:
        """A body with the reports of its choices."""
        if len(self._of.unsent) == 1:
            return with_report(body.decode(), next(iter(self._of.unsent.values())).fields).encode()
        found = json.loads(body)
        self._of.report(found, found["choices"], setitem)
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()

    def _with_report(self, event: str) -> str:
        """An event of a stream with what its choice has not said yet."""
        unsent = self._of.unsent
        if number := _SEQUENCE.search(event) if self._of.path == "/v1/responses" else None:
            self.sequence = int(number[1])
        if not unsent:
            return event
        if event.startswith("data: {"):
            return _with_answer(event, unsent)
        kind, one = event.partition("\n")[0], unsent[0]
        if kind.endswith(("_delta", ".delta")) and (said := one.take(end=kind == "event: message_delta")):
            return with_report(event, said)
        if event.startswith(_LAST):
            head, data, text = event.partition("data: ")
            found = json.loads(text)
            found["response"][KEY] = in_json(one.take(end=True))
            return f"{head}{data}{json.dumps(found, ensure_ascii=False, separators=(',', ':'))}\n\n"
        return event


def _error_event(refused: SpecError, sequence: int) -> str:
    """The event that ends a stream of /v1/responses with an error."""
    found = {"code": refused.code, "message": str(refused), "param": refused.field, "sequence_number": sequence + 1}
    return f"event: error\ndata: {json.dumps({'type': 'error', **found})}\n\n"


def _with_answer(chunk: str, unsent: Mapping[int, Unsent]) -> str:
    """A chunk with what its choice has not said yet: what it has read, and at its end all that it reports."""
    if not (_ENDS.search(chunk) or any(one.waits for one in unsent.values())):
        return chunk
    for one in json.loads(chunk.removeprefix("data: ")).get("choices", ()):
        own = unsent.get(one["index"])
        if own is not None and (said := own.take(end=bool(one.get("finish_reason")))):
            return with_report(chunk, said)
    return chunk


def with_report(text: str, report: Any) -> str:
    """A body's text, or an event's, with the field at the end of its object; vLLM's own letters do not change."""
    end = text[len(text.rstrip()) :]
    found = json.dumps(in_json(report), separators=(",", ":"))
    return f'{text.rstrip().removesuffix("}")},"{KEY}":{found}}}{end}'
