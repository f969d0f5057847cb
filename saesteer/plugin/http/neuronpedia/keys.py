"""The header in which Neuronpedia's clients send their key. Knows no key: vLLM compares it, in constant time.

vLLM's own check of --api-key reads ``Authorization: Bearer KEY`` alone, and stands in front of the routes. This stands
in front of the check, and writes a Bearer where a client of Neuronpedia's routes sends X-SECRET-KEY instead. No other
route accepts that header.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from saesteer.plugin.http.routes import path_of

MIDDLEWARE = f"{__name__}.SecretKey"  # as --middleware names it: vLLM adds those outside of its own check
PATHS = (
    "/v1/activation/",
    "/v1/apply-chat-template",
    "/v1/capabilities",
    "/v1/lens/prompt",
    "/v1/steer/",
    "/v1/tokenize",
    "/v1/util/",
)
_HEADER, _AUTHORIZATION = b"x-secret-key", b"authorization"


class SecretKey:
    """ASGI middleware that passes X-SECRET-KEY on as a Bearer, to Neuronpedia's routes alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] == "http" and _is_ours(path_of(scope)):
            headers = dict(scope["headers"])
            if _HEADER in headers and _AUTHORIZATION not in headers:
                bearer = (_AUTHORIZATION, b"Bearer " + headers[_HEADER])
                scope = {**scope, "headers": [*scope["headers"], bearer]}
        await self.app(scope, receive, send)


def _is_ours(path: str) -> bool:
    return any(path == one or (one.endswith("/") and path.startswith(one)) for one in PATHS)
