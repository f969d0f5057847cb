"""The routes of vLLM that serve the field ``saesteer``, the guard for all others, and where a spec may not stand.

Most of vLLM's routes drop unknown fields, so a spec in their body would be ignored in silence. The guard answers such
a body with 400. It guards every route that is not on the list, including those that a later vLLM adds.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from fastapi.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.fields import show
from saesteer.plugin.http.models import with_model
from saesteer.plugin.results.errors import SpecRefused

# SageMaker's /invocations passes a body on to chat completions or completions.
SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)
INVOCATIONS = SERVED[-1]
OURS = "/v1/saesteer/"  # the admin routes refuse unknown fields themselves
LIMIT = 16 * 2**20  # bytes of a body that the guard reads: the length of the longest spec

_BODILESS = ("GET", "HEAD", "OPTIONS")
_NESTED = (  # objects of a body in which clients put what belongs beside them
    "metadata",
    "extra_body",
    "extra_args",
    "sampling_params",
    "chat_template_kwargs",
    "kv_transfer_params",
    "options",
    "parameters",
)
_INSIDE = ("vllm_xargs", "extra_args")  # where a spec may stand in these
_MEANT = ("steer", "steering", "sae")  # besides what difflib finds this much like KEY
_ALIKE = 0.8


def misplaced(body: Mapping[str, Any], *keys: str) -> tuple[str, str] | None:
    """Find a spec one level below the top of a body, where no route reads it.

    Args:
        body: a request's fields.
        keys: under which a spec, or its edits, would stand. Plain text there is none, but a JSON object or list is.

    Returns:
        The name of the object that has it, and the key.
    """
    for name in _NESTED:
        held = body.get(name)
        for inner in (held, *(held.get(one) for one in _INSIDE)) if isinstance(held, Mapping) else ():
            for key in keys:
                if isinstance(inner, Mapping) and key in inner and not _is_plain(inner[key]):
                    return name, key
    return None


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] not in ("{", "[")


def near(keys: Iterable[Any]) -> str | None:
    """Return the first key that is not ``saesteer`` and was probably meant to be; None: there is none."""
    for key in keys:
        word = key.strip().casefold() if isinstance(key, str) else ""
        if key != KEY and (word in _MEANT or get_close_matches(word, (KEY,), cutoff=_ALIKE)):
            return str(key)
    return None


def path_of(scope: Scope) -> str:
    """A request's path as the routes have it, without what a proxy has put in front (--root-path)."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Guard:
    """ASGI middleware that answers 400 if a JSON body asks for steering on a route that does not serve the field.

    Requests to served routes pass, and so do those that no route takes. Other bodies are read before the app gets them,
    up to LIMIT. A longer body passes, and so does what is no JSON object, such as a form. A module that the body of
    /invocations names as its model is put into a header.

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
        if kind == "http" and path.rstrip("/") == INVOCATIONS and INVOCATIONS in self.served:
            body, receive = await _read(receive)
            scope = with_model(scope, _parsed(body))
        if kind == "websocket":
            receive = _without_specs(receive, send, self._refusal(path))
        # vLLM redirects a path with a / at its end.
        passes = path.rstrip("/") in self.served or path.startswith(OURS)
        if kind == "http" and scope["method"] not in _BODILESS and not passes and _is_routed(scope):
            body, receive = await _read(receive)
            if _asks(body):
                await _answer(self._refusal(path))(scope, receive, send)
                return
        await self.app(scope, receive, send)

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


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Read a body, empty if it is longer than LIMIT; return it with what gives the app the same messages."""
    held: deque[Message] = deque()
    size, more = 0, True
    while more and size <= LIMIT:
        held.append(await receive())  # it has no more_body if the client has disconnected
        size, more = size + len(held[-1].get("body", b"")), held[-1].get("more_body", False)
    body = b"".join(one.get("body", b"") for one in held) if size <= LIMIT else b""

    async def receive_again() -> Message:
        return held.popleft() if held else await receive()

    return body, receive_again


def _parsed(text: bytes) -> Any:
    """A body as JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _asks(text: bytes) -> bool:
    """Return whether JSON in any encoding asks for steering. What is no JSON does not; vLLM cannot read it either."""
    body = _parsed(text)
    if not isinstance(body, Mapping):
        return False
    if body.get(KEY) is not None:
        return True
    arguments = body.get("vllm_xargs")
    return (isinstance(arguments, Mapping) and KEY in arguments) or misplaced(body, KEY) is not None


def _without_specs(receive: Receive, send: Send, message: str) -> Receive:
    """Drops a WebSocket client's events that contain a spec, and sends an error back, in the form of /v1/realtime."""

    async def receive_next() -> Message:
        while True:
            event = await receive()
            sent = (event.get("text") or "").encode() or event.get("bytes") or b""
            if not _asks(sent):
                return event
            error = {"type": "error", "error": str(refused(message)), "code": "not_served"}
            await send({"type": "websocket.send", "text": json.dumps(error)})

    return receive_next
