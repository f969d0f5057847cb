"""The header in which Neuronpedia's clients send their key. Knows no key: vLLM compares it, in constant time.

vLLM's own check of --api-key reads ``Authorization: Bearer KEY`` alone, and stands in front of the routes. In front of
the check (access.py) a Bearer takes the place of X-SECRET-KEY. No other route accepts that header.
"""

from starlette.types import Scope

from saesteer.plugin.http.routes import path_of

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


def with_bearer(scope: Scope) -> Scope:
    """A request in which X-SECRET-KEY is a Bearer, if it is for one of Neuronpedia's routes."""
    path, headers = path_of(scope), dict(scope["headers"])
    if not path.startswith(PATHS) or _HEADER not in headers or _AUTHORIZATION in headers:
        return scope
    return {**scope, "headers": [*scope["headers"], (_AUTHORIZATION, b"Bearer " + headers[_HEADER])]}
