"""Client and AsyncClient: steered requests to an OpenAI server with saesteer. Knows the wire, no engine and no torch.

A request's own fields (temperature, max_tokens, ...) go into the body as they are; ``steer`` is checked before anything
is sent. What the server refuses is a RequestRefused with the field, the code and the message.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx

from saesteer.client.responses import Answer, Events, Piece, Route, answer_of, document_of, model_names
from saesteer.errors import ServerError
from saesteer.language.spec import Edit, InlineVector, Spec, as_spec

__all__ = ["Answer", "AsyncClient", "Client", "Piece", "Steer"]

Steer = Spec | Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None
Messages = str | Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]
NewVector = Sequence[float] | InlineVector | Mapping[str, Any]

Method = Literal["GET", "POST", "DELETE"]

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an answer may be long; a server that is not there is told soon


class Client:
    """A server's OpenAI routes, with ``steer`` beside each request.

    Args:
        base_url: of the server, with or without ``/v1`` at its end.
        api_key: what ``--api-key`` asks for.
        admin_key: what ``--saesteer-admin-key`` asks for, where vectors and modules are registered, listed and deleted.
        model: its name on the server; default the first that the server serves.
        timeout: in seconds, or httpx's own.
        transport: httpx's, for tests and proxies.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float | httpx.Timeout = TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(**_options(base_url, api_key, timeout), transport=transport)
        self._model = model
        self._admin = _bearer(admin_key)

    def chat(self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A chat completion.

        Args:
            messages: the conversation, or one user message as text.
            steer: a spec, its JSON object, one edit or a list of edits; of these a spec and a JSON object,
                ``{"edits": [...], "return": {"dose": True}}``, may ask for doses as well.
            model: default the client's.
            **fields: of the body, as the OpenAI API and vLLM have them.

        Raises:
            SpecError: ``steer`` is wrong; nothing was sent.
            RequestRefused: the server refused the request.
            ServerError: it failed, did not answer, or runs without saesteer and did not steer.
        """
        return self._ask("chat/completions", {"messages": _messages(messages)}, steer, model, fields)

    def complete(self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A completion of a text or of token ids; arguments and errors as ``chat``."""
        return self._ask("completions", {"prompt": prompt}, steer, model, fields)

    def respond(self, input: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """An answer over the responses API; arguments and errors as ``chat``."""
        return self._ask("responses", {"input": input}, steer, model, fields)

    def stream(
        self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A chat completion piece by piece; arguments and errors as ``chat``. What is left unread is given up."""
        return self._stream("chat/completions", {"messages": _messages(messages)}, steer, model, fields)

    def stream_complete(
        self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A completion piece by piece; arguments and errors as ``chat``."""
        return self._stream("completions", {"prompt": prompt}, steer, model, fields)

    def models(self) -> list[str]:
        """The names of the server's models.

        Raises:
            ServerError: it failed, or did not answer.
        """
        with _translated():
            response = self._http.get("models")
        return model_names(document_of(response.status_code, response.content))

    def register_vector(self, name: str, vector: NewVector, *, bias: float = 0.0) -> dict[str, Any]:
        """Register or replace a vector; the entry that ``vectors`` lists from now on, and whether it was ``replaced``.

        Args:
            name: for requests and modules.
            vector: numbers for any site, or an ``InlineVector``, which may have a row for each of some layers.
            bias: of a probe, which reads x · v + bias.

        Raises:
            RequestRefused: no such key (401), the routes are off (403), it is wrong (400) or does not fit (409).
            ServerError: the server failed, or did not answer.
        """
        return self._administer("POST", "vectors", _vector_body(name, vector, bias))

    def register_module(self, name: str, steer: Steer) -> dict[str, Any]:
        """Register or replace a module, a spec as ``chat`` takes it; answer and errors as ``register_vector``.

        Raises:
            SpecError: ``steer`` is wrong; nothing was sent.
        """
        return self._administer("POST", "modules", _module_body(name, steer))

    def delete_vector(self, name: str) -> None:
        """Delete a vector; requests that run keep it. Errors as ``register_vector``, and 404 where there is none."""
        self._administer("DELETE", f"vectors/{quote(name, safe='')}")

    def delete_module(self, name: str) -> None:
        """Delete a module; errors as ``delete_vector``."""
        self._administer("DELETE", f"modules/{quote(name, safe='')}")

    def vectors(self) -> list[dict[str, Any]]:
        """The named vectors, with shape, layers, version and uses; errors as ``register_vector``."""
        return list(self._administer("GET", "vectors")["vectors"])

    def modules(self) -> list[dict[str, Any]]:
        """The modules, with version and uses; errors as ``register_vector``."""
        return list(self._administer("GET", "modules")["modules"])

    def _administer(self, method: Method, path: str, body: Any = None) -> dict[str, Any]:
        with _translated():
            response = self._http.request(method, f"saesteer/{path}", json=body, headers=self._admin)
        return dict(document_of(response.status_code, response.content))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, kind: Route, body: dict[str, Any], steer: Steer, model: str | None, fields: Any) -> Answer:
        body = _body(body, steer, fields)
        body["model"] = model or self._known_model()
        with _translated():
            response = self._http.post(kind, json=body)
        steered = _steered(body, self._http.base_url)
        return answer_of(kind, document_of(response.status_code, response.content), steered)

    def _stream(
        self, kind: Route, body: dict[str, Any], steer: Steer, model: str | None, fields: Any
    ) -> Iterator[Piece]:
        # Checked when it is called, not when the first piece is asked for.
        body = _body(body, steer, {**fields, "stream": True})
        return self._pieces(kind, body, model)

    def _pieces(self, kind: Route, body: dict[str, Any], model: str | None) -> Iterator[Piece]:
        body["model"] = model or self._known_model()
        with _translated(), self._http.stream("POST", kind, json=body) as response:
            if response.status_code != 200:
                document_of(response.status_code, response.read())
            events = Events(kind, _steered(body, self._http.base_url))
            for data in response.iter_bytes():
                yield from events.feed(data)
            events.end()

    def _known_model(self) -> str:
        if self._model is None:
            self._model = self.models()[0]
        return self._model


class AsyncClient:
    """``Client`` for asyncio: the same methods to await; the streams are async iterators.

    Args:
        base_url: of the server, with or without ``/v1`` at its end.
        api_key: what ``--api-key`` asks for.
        admin_key: what ``--saesteer-admin-key`` asks for, where vectors and modules are registered, listed and deleted.
        model: its name on the server; default the first that the server serves.
        timeout: in seconds, or httpx's own.
        transport: httpx's, for tests and proxies.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float | httpx.Timeout = TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout), transport=transport)
        self._model = model
        self._admin = _bearer(admin_key)

    async def chat(self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.chat``."""
        return await self._ask("chat/completions", {"messages": _messages(messages)}, steer, model, fields)

    async def complete(self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.complete``."""
        return await self._ask("completions", {"prompt": prompt}, steer, model, fields)

    async def respond(self, input: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.respond``."""
        return await self._ask("responses", {"input": input}, steer, model, fields)

    def stream(
        self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> AsyncIterator[Piece]:
        """As ``Client.stream``."""
        return self._stream("chat/completions", {"messages": _messages(messages)}, steer, model, fields)

    def stream_complete(
        self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> AsyncIterator[Piece]:
        """As ``Client.stream_complete``."""
        return self._stream("completions", {"prompt": prompt}, steer, model, fields)

    async def models(self) -> list[str]:
        """As ``Client.models``."""
        with _translated():
            response = await self._http.get("models")
        return model_names(document_of(response.status_code, response.content))

    async def register_vector(self, name: str, vector: NewVector, *, bias: float = 0.0) -> dict[str, Any]:
        """As ``Client.register_vector``."""
        return await self._administer("POST", "vectors", _vector_body(name, vector, bias))

    async def register_module(self, name: str, steer: Steer) -> dict[str, Any]:
        """As ``Client.register_module``."""
        return await self._administer("POST", "modules", _module_body(name, steer))

    async def delete_vector(self, name: str) -> None:
        """As ``Client.delete_vector``."""
        await self._administer("DELETE", f"vectors/{quote(name, safe='')}")

    async def delete_module(self, name: str) -> None:
        """As ``Client.delete_module``."""
        await self._administer("DELETE", f"modules/{quote(name, safe='')}")

    async def vectors(self) -> list[dict[str, Any]]:
        """As ``Client.vectors``."""
        return list((await self._administer("GET", "vectors"))["vectors"])

    async def modules(self) -> list[dict[str, Any]]:
        """As ``Client.modules``."""
        return list((await self._administer("GET", "modules"))["modules"])

    async def _administer(self, method: Method, path: str, body: Any = None) -> dict[str, Any]:
        with _translated():
            response = await self._http.request(method, f"saesteer/{path}", json=body, headers=self._admin)
        return dict(document_of(response.status_code, response.content))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, kind: Route, body: dict[str, Any], steer: Steer, model: str | None, fields: Any) -> Answer:
        body = _body(body, steer, fields)
        body["model"] = model or await self._known_model()
        with _translated():
            response = await self._http.post(kind, json=body)
        steered = _steered(body, self._http.base_url)
        return answer_of(kind, document_of(response.status_code, response.content), steered)

    def _stream(
        self, kind: Route, body: dict[str, Any], steer: Steer, model: str | None, fields: Any
    ) -> AsyncIterator[Piece]:
        body = _body(body, steer, {**fields, "stream": True})
        return self._pieces(kind, body, model)

    async def _pieces(self, kind: Route, body: dict[str, Any], model: str | None) -> AsyncIterator[Piece]:
        body["model"] = model or await self._known_model()
        with _translated():
            async with self._http.stream("POST", kind, json=body) as response:
                if response.status_code != 200:
                    document_of(response.status_code, await response.aread())
                events = Events(kind, _steered(body, self._http.base_url))
                async for data in response.aiter_bytes():
                    for piece in events.feed(data):
                        yield piece
                events.end()

    async def _known_model(self) -> str:
        if self._model is None:
            self._model = (await self.models())[0]
        return self._model


def _options(base_url: str, api_key: str | None, timeout: float | httpx.Timeout) -> dict[str, Any]:
    base = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/"
    return {"base_url": base, "headers": _bearer(api_key), "timeout": timeout}


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _vector_body(name: str, vector: NewVector, bias: float) -> dict[str, Any]:
    if isinstance(vector, InlineVector):
        return {"name": name, "vector": vector.to_json(), "bias": bias}
    inline = dict(vector) if isinstance(vector, Mapping) else [float(number) for number in vector]
    return {"name": name, "vector": inline, "bias": bias}


def _module_body(name: str, steer: Steer) -> dict[str, Any]:
    return {"name": name, "spec": (as_spec(steer) or Spec()).to_json()}


def _messages(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [dict(message) for message in messages]


def _body(body: dict[str, Any], steer: Steer, fields: Mapping[str, Any]) -> dict[str, Any]:
    spec = as_spec(steer)
    return {**fields, **body, **({} if spec is None else {"saesteer": spec.to_json()})}


def _steered(body: Mapping[str, Any], url: httpx.URL) -> str | None:
    """Where a body with a spec is sent to; None where the body has none."""
    return str(url) if "saesteer" in body or "saesteer" in (body.get("vllm_xargs") or ()) else None


class _translated:
    """The seam where httpx's errors become ours; a class, since an async generator may be closed inside it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(exc, httpx.HTTPError | httpx.InvalidURL):
            reason = " ".join(str(exc).split()) or type(exc).__name__
            raise ServerError(f"the server did not answer ({reason})", status=None) from exc
