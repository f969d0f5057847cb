"""Who may send requests, beside vLLM's own check of keys: by the key of some routes, and by the host that is named.

vLLM's check of --api-key covers paths that begin with /v1 and the like, and /invocations serves the field as well. So
every route that serves it needs a key here. A server on a loopback address without a key is open to whatever runs on
its machine, of which a browser may run a stranger's page: under a host name of his that leads to this address, the page
could send requests and read the answers. Such a server answers only who names its machine, or a host of --allow-host.

This stands in front of vLLM's check, so it sees each answer to a wrong key, and knows no spec.
"""

import hmac
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saesteer.language.fields import show
from saesteer.plugin.http.refusals import refuse
from saesteer.plugin.http.routes import SERVED, path_of
from saesteer.plugin.results import metrics
from saesteer.plugin.results.kept import client

MIDDLEWARE = f"{__name__}.Access"  # as --middleware names it: vLLM adds those outside of its own check
WRONG_KEY = "wrong_key"
ADAPTED: list[Callable[[Scope], Scope]] = []  # what a wing makes of a request before its key is looked at
_HOST = re.compile(r"(?:\[([^]]+)\]|([^:]*?)\.?)(?::\d*)?")


def keys_of(args: Any) -> Sequence[str]:
    """The keys of all clients in vLLM's arguments; none: nobody needs one."""
    return [one for one in args.api_key or [os.environ.get("VLLM_API_KEY")] if one]


def hosts_of(args: Any, allowed: Collection[str]) -> Collection[str] | None:
    """The hosts that requests may name, beside loopback addresses; None: any.

    Args:
        args: vLLM's.
        allowed: of --allow-host.
    """
    closed = args.uds or keys_of(args) or not _is_loopback(args.host or "")
    return None if closed else {*map(_name, allowed)}


def sent_key(headers: Headers, keys: Sequence[str]) -> str | None:
    """The key that a request has, if it is one of these."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    right = scheme.lower() == "bearer" and any(hmac.compare_digest(given.encode(), one.encode()) for one in keys)
    return given if right else None


def listens_at(args: Any) -> str:
    """Return the address of a server with these arguments of vLLM's."""
    if args.uds:
        return f"unix:{args.uds}:"
    host = args.host or "localhost"
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}{(args.root_path or '').rstrip('/')}"


def _name(host: str) -> str:
    """A host without its port, as it is compared."""
    found = _HOST.fullmatch(host.lower())
    return found[1] or found[2] if found else host.lower()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """ASGI middleware that refuses who may not send a request, and knows clients apart."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or passes it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        for adapted in ADAPTED:
            scope = adapted(scope)
        keys, hosts = scope["app"].state.saesteer_access
        headers, (address, *_) = Headers(scope=scope), scope.get("client") or ("a local socket",)
        key, app = sent_key(headers, keys), self.app
        client.set(key or address)

        async def watched(message: Message) -> None:
            if message.get("status") == 401:
                metrics.refused(WRONG_KEY)
                _log_once(address)
            await send(message)

        # A request without a host comes from no browser.
        named = {_name(host) for host in headers.getlist("Host")}
        wrong = [] if hosts is None else [host for host in named - hosts if not _is_loopback(host)]
        if wrong:
            found = f"the Host header names {show(wrong[0])}, and without a key this server answers for localhost alone"
            app = refuse(403, f"{found}; start it with --allow-host and this name, or with --api-key", "wrong_host")
        elif keys and key is None and path_of(scope).rstrip("/") in SERVED and scope.get("method") != "OPTIONS":
            app = JSONResponse({"error": "Unauthorized"}, 401)  # as vLLM's
        await app(scope, receive, watched)


@lru_cache(1024)
def _log_once(address: str) -> None:
    logging.getLogger("vllm.saesteer").warning("a request from %s had no key or a wrong one", show(address))
