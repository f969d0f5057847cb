"""--memory-guard: new requests get 503 while too much memory is in use. Knows paths and files of Linux, but no request.

Every API server looks for itself. What it reads is the machine's or the container's, so all of them find the same. It
looks when something is asked of it, GET /metrics included, and uses what it has seen for PERIOD.
"""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from saesteer.plugin.http.routes import OURS
from saesteer.plugin.results import metrics

_log = logging.getLogger("vllm.saesteer")
PERIOD = 0.5  # seconds
RETRY_AFTER = 5  # seconds; answers that run meanwhile end and free what they hold
CODE = "memory"
_AGAIN = 1013  # of a WebSocket: try again later

# Where work is asked for. Routes elsewhere operate the server, which may be what helps it now.
_WORK = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
_NO_WORK = (OURS, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests")
_LIGHT = ("/cancel", "/render", "/derender", "/count_tokens")


def used(root: Path = Path("/")) -> float | None:
    """The share of memory in use: of the machine, or of a control group that has less of its own left.

    The cache of files counts as free, since the kernel gives it back.

    Args:
        root: where /proc and /sys are.

    Returns:
        None where it cannot be read: on systems that are not Linux.
    """
    shares = [*_machine(root), *_groups(root)]
    return max(shares) if shares else None


def _machine(root: Path) -> Iterator[float]:
    facts = _facts(root / "proc/meminfo")
    if "MemTotal" in facts and "MemAvailable" in facts:
        yield 1 - facts["MemAvailable"] / facts["MemTotal"]


def _groups(root: Path) -> Iterator[float]:
    """Of each control group with a limit that this process is in; version 2, then 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, prefix = root / "sys/fs/cgroup/memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = top / path.lstrip("/")
        # In a container the path may be the host's; what it sees of that is its own group, at the top.
        for folder in (here, *here.parents):
            if folder.is_relative_to(top):
                most, now = _text(folder / limit).strip(), _text(folder / usage).strip()
                if most.isdigit() and now.isdigit() and int(most) > 0:  # "max" is none
                    facts = _facts(folder / "memory.stat")
                    # The system gives back what lies on these lists; shared memory lies on others.
                    cached = facts.get(f"{prefix}inactive_file", 0) + facts.get(f"{prefix}active_file", 0)
                    yield max(0, int(now) - cached) / int(most)


def _facts(file: Path) -> dict[str, int]:
    """Lines such as ``MemTotal: 16 kB`` or ``file 4096``."""
    words = (line.replace(":", " ").split() for line in _text(file).splitlines())
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


class MemoryGuard:
    """ASGI middleware that refuses new work while more memory is in use than the operator allows.

    Args:
        app: the app behind it.
        limit: share of the memory.
        root: where /proc and /sys are.
    """

    def __init__(self, app: ASGIApp, limit: float, root: Path = Path("/")) -> None:
        self.app = app
        self.limit = limit
        self._root = root
        self._seen = 0.0
        self._until = 0.0  # when it is too old
        self._over = False
        if used(root) is None:
            _log.warning("--memory-guard has no effect: the memory in use cannot be read on this system")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or passes it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        now = time.monotonic()
        if now >= self._until:
            self._until = now + PERIOD
            self._look()
        if not (self._over and _is_work(scope)):
            await self.app(scope, receive, send)
            return
        metrics.refused(CODE)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _AGAIN, "reason": self._message()[:120]})
            return
        await _refuse(self._message(), str(scope["path"]).rstrip("/").endswith("/v1/messages"), send)

    def _look(self) -> None:
        seen = used(self._root)
        if seen is None:
            self._over = False
            return
        self._seen = seen
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
    path, root = str(scope.get("path", "")), str(scope.get("root_path", "")).rstrip("/")
    path = (path.removeprefix(root) if path.startswith(f"{root}/") else path).rstrip("/")
    operates = path.startswith(_NO_WORK) or path.endswith(_LIGHT)
    return scope["method"] == "POST" and path.startswith(_WORK) and not operates


async def _refuse(message: str, anthropic: bool, send: Send) -> None:
    """vLLM's error object, or Anthropic's."""
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    body: dict[str, object] = {"error": error}
    if anthropic:
        body = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
    text = json.dumps(body).encode()
    headers = {b"content-type": b"application/json", b"content-length": str(len(text)).encode()}
    headers[b"retry-after"] = str(RETRY_AFTER).encode()
    await send({"type": "http.response.start", "status": 503, "headers": [*headers.items()]})
    await send({"type": "http.response.body", "body": text})
