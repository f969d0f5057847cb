"""What both clients have: a connection to a server, its keys and its errors. Knows no route and no body."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import httpx

from saesteer.client.bodies import KEY
from saesteer.errors import ConfigError, ServerError

H = TypeVar("H", httpx.Client, httpx.AsyncClient)

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an answer may be long; an absent server is noticed soon


class Connection(Generic[H]):
    """What both clients have."""

    _KIND: type[H]

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float | httpx.Timeout = TIMEOUT,
        transport: Any = None,
    ) -> None:
        """Opens no connection before the first request.

        Args:
            base_url: the server's URL, with or without ``/v1`` at its end.
            api_key: the key that ``--api-key`` sets.
            admin_key: the key that ``--saesteer-admin-key`` sets, to register, list and delete vectors and modules.
            model: the model's name on the server; by default the first that the server serves.
            timeout: in seconds, or httpx's own.
            transport: httpx's, for tests and proxies.

        Raises:
            ConfigError: the URL is none.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}, expected http://HOST:PORT")
        base = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/"
        self._http: H = self._KIND(base_url=base, headers=_bearer(api_key), timeout=timeout, transport=transport)
        self._model = model
        self._admin = _bearer(admin_key)

    def _steered(self, body: Mapping[str, Any]) -> str | None:
        """The URL that a body with a spec is sent to; None if the body has no spec."""
        return str(self._http.base_url) if KEY in body or KEY in (body.get("vllm_xargs") or ()) else None


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class translated:
    """Turns httpx's errors into ours; a class, since an async generator may be closed inside it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(exc, httpx.HTTPError | httpx.InvalidURL):
            reason = " ".join(str(exc).split()) or type(exc).__name__
            raise ServerError(f"{_server(exc)} did not answer ({reason})", status=None) from exc
        if isinstance(exc, RuntimeError) and "loop" in str(exc):  # asyncio's, of a connection that stayed open
            raise ConfigError("this AsyncClient is of another event loop, expected one for each asyncio.run") from exc


def _server(exc: Exception) -> str:
    try:
        url: httpx.URL = exc.request.url  # type: ignore[attr-defined]  # an InvalidURL has none
    except (AttributeError, RuntimeError):
        return "the server"
    return f"the server {url.scheme}://{url.netloc.decode('ascii')}"
