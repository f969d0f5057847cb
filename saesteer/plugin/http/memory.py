"""--memory-guard: new requests get 503 while too much memory is in use. Knows paths, but no request.

Every API server looks for itself. What it reads is the machine's or the container's, so all of them find the same. It
looks when something is asked of it, GET /metrics included, and uses what it has seen for PERIOD.
"""

import logging
import time
from contextlib import suppress
from pathlib import Path

import psutil
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from saesteer.plugin.http.routes import OURS, path_of
from saesteer.plugin.results import metrics

_log = logging.getLogger("vllm.saesteer")
PERIOD = 0.5  # seconds
RETRY_AFTER = 5  # seconds; answers that run meanwhile end and free what they hold
CODE = "memory"

# Where work is asked for. Routes elsewhere operate the server, which may be what helps it now.
_WORK = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
_NO_WORK = (OURS, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests")
_LIGHT = ("/cancel", "/render", "/derender", "/count_tokens")
GROUP = Path("/sys/fs/cgroup")  # where a container finds its own control group, of version 2


def used() -> float:
    """The share of memory in use: of the machine, or of the container, if that has less of its own limit left.

    The cache of files counts as free, since the kernel gives it back.
    """
    machine = psutil.virtual_memory()
    shares = [1 - machine.available / machine.total]
    with suppress(OSError, ArithmeticError, LookupError, ValueError):  # no such group, or its limit is "max"
        most, now = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        shares.append((now - int(facts["inactive_file"]) - int(facts["active_file"])) / most)
    return max(shares)


class MemoryGuard:
    """ASGI middleware that refuses new work while more memory is in use than the operator allows.

    Args:
        app: the app behind it.
        limit: share of the memory.
    """

    def __init__(self, app: ASGIApp, limit: float) -> None:
        self.app = app
        self.limit = limit
        self._seen = 0.0
        self._until = 0.0  # when it is too old
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or passes it on."""
        app = self.app
        if scope["type"] in ("http", "websocket"):
            now = time.monotonic()
            if now >= self._until:
                self._until = now + PERIOD
                self._look()
            if self._over and _is_work(scope):
                metrics.refused(CODE)
                app = _refusal(self._message(), str(scope["path"]))
        await app(scope, receive, send)

    def _look(self) -> None:
        self._seen = seen = used()
        metrics.memory(seen)
        if (seen > self.limit) != self._over:
            self._over = not self._over
            found = f"{seen:.1%} of the memory are in use, --memory-guard is {self.limit:.1%}"
            _log.warning("%s: %s", found, "new requests are refused" if self._over else "requests are taken again")

    def _message(self) -> str:
        found = f"{self._seen:.1%} of the server's memory are in use, expected {self.limit:.1%} at most"
        return f"{found} (--memory-guard); send it again in {RETRY_AFTER} seconds [{CODE}]"


def _is_work(scope: Scope) -> bool:
    if scope["type"] == "websocket":
        return True
    path = path_of(scope).rstrip("/")
    operates = path.startswith(_NO_WORK) or path.endswith(_LIGHT)
    return scope["method"] == "POST" and path.startswith(_WORK) and not operates


def _refusal(message: str, path: str) -> JSONResponse:
    """vLLM's error object, or Anthropic's."""
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    body: dict[str, object] = {"error": error}
    if path.rstrip("/").endswith("/v1/messages"):
        body = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
    return JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER)})
