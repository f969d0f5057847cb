"""Client and AsyncClient: steered requests to an OpenAI server with saesteer. Knows HTTP, but no engine and no torch.

A request's other fields (temperature, max_tokens, ...) go into the body unchanged. ``steer`` is checked before anything
is sent. If the server refuses, RequestRefused has the field, the code and the message.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar
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
H = TypeVar("H", httpx.Client, httpx.AsyncClient)

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an answer may be long; an absent server is noticed soon
KEY = "saesteer"  # the field of bodies that holds the spec


class _Connection(Generic[H]):
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
        """
        self._http: H = self._KIND(**_options(base_url, api_key, timeout), transport=transport)
        self._model = model
        self._admin = _bearer(admin_key)

    def _steered(self, body: Mapping[str, Any]) -> str | None:
        """The URL that a body with a spec is sent to; None if the body has no spec."""
        return str(self._http.base_url) if KEY in body or KEY in (body.get("vllm_xargs") or ()) else None


class Client(_Connection[httpx.Client]):
    """A server's OpenAI routes, each with the argument ``steer``."""

    _KIND = httpx.Client

    def chat(self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A chat completion.

        Args:
            messages: the conversation, or one user message as text.
            steer: a spec, its JSON object, one edit or a list of edits. A spec or a JSON object,
                ``{"edits": [...], "return": {"dose": True}}``, may also ask for doses.
            model: by default the client's.
            **fields: other fields of the body, as in the OpenAI API and vLLM.

        Raises:
            SpecError: ``steer`` is wrong; nothing was sent.
            RequestRefused: the server refused the request.
            ServerError: the server failed, did not answer, or runs without saesteer and did not steer.
        """
        return self._ask("chat/completions", _chat(messages, steer, fields), model)

    def complete(self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A completion of a text or of token ids; arguments and errors as ``chat``."""
        return self._ask("completions", _body({"prompt": prompt}, steer, fields), model)

    def respond(self, input: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """An answer over the responses API; arguments and errors as ``chat``."""
        return self._ask("responses", _body({"input": input}, steer, fields), model)

    def stream(
        self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A chat completion piece by piece; arguments and errors as ``chat``. Closing it early ends the request."""
        return self._stream("chat/completions", _chat(messages, steer, fields), model)

    def stream_complete(
        self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A completion piece by piece; arguments and errors as ``chat``."""
        return self._stream("completions", _body({"prompt": prompt}, steer, fields), model)

    def models(self) -> list[str]:
        """The names of the server's models.

        Raises:
            ServerError: the server failed, or did not answer.
        """
        return model_names(self._send("GET", "models"))

    def features(
        self,
        dictionary: str,
        q: str | None = None,
        *,
        feature: int | None = None,
        layer: int | None = None,
        limit: int = 10,
    ) -> list[dict[str, Any]]:
        """Features by words in their labels and examples, best first, or what is known of one.

        Args:
            dictionary: a dictionary of the server, as in a request.
            q: words.
            feature: a feature's number, in place of words; the list is empty if nothing is known of it.
            layer: of a set.
            limit: how many features at most.

        Raises:
            RequestRefused: the dictionary is unknown (400), has no labels (404), or lacks the feature (400).
            ServerError: the server failed, or did not answer.
        """
        return list(
            self._send("GET", "saesteer/features", params=_query(dictionary, q, feature, layer, limit))["features"]
        )

    def register_vector(self, name: str, vector: NewVector, *, bias: float = 0.0) -> dict[str, Any]:
        """Registers or replaces a vector. Returns its entry in ``vectors``, and whether one was ``replaced``.

        Args:
            name: the vector's name in requests and modules.
            vector: numbers for any site, or an ``InlineVector``, which may have a row for each of several layers.
            bias: a probe's bias: it reads x · v + bias.

        Raises:
            RequestRefused: the key is wrong (401), the routes are off (403), the vector is wrong (400) or does not fit
                (409).
            ServerError: the server failed, or did not answer.
        """
        return self._administer("POST", "vectors", _vector_body(name, vector, bias))

    def register_module(self, name: str, steer: Steer) -> dict[str, Any]:
        """Registers or replaces a module, a spec as for ``chat``; result and errors as ``register_vector``.

        Raises:
            SpecError: ``steer`` is wrong; nothing was sent.
        """
        return self._administer("POST", "modules", _module_body(name, steer))

    def delete_vector(self, name: str) -> None:
        """Deletes a vector; running requests keep it. Errors as ``register_vector``, and 404 if there is none."""
        self._administer("DELETE", f"vectors/{quote(name, safe='')}")

    def delete_module(self, name: str) -> None:
        """Deletes a module; errors as ``delete_vector``."""
        self._administer("DELETE", f"modules/{quote(name, safe='')}")

    def vectors(self) -> list[dict[str, Any]]:
        """The named vectors, with shape, layers, version and uses; errors as ``register_vector``."""
        return list(self._administer("GET", "vectors")["vectors"])

    def modules(self) -> list[dict[str, Any]]:
        """The modules, with version and uses; errors as ``register_vector``."""
        return list(self._administer("GET", "modules")["modules"])

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: Method, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of the response."""
        with _translated():
            response = self._http.request(method, path, json=body, **options)
        return document_of(response.status_code, response.content)

    def _administer(self, method: Method, path: str, body: Any = None) -> dict[str, Any]:
        return dict(self._send(method, f"saesteer/{path}", body, headers=self._admin))

    def _ask(self, kind: Route, body: dict[str, Any], model: str | None) -> Answer:
        body["model"] = model or self._known_model()
        return answer_of(kind, self._send("POST", kind, body), self._steered(body))

    def _stream(self, kind: Route, body: dict[str, Any], model: str | None) -> Iterator[Piece]:
        body |= {"model": model or self._known_model(), "stream": True}
        with _translated(), self._http.stream("POST", kind, json=body) as response:
            if response.status_code != 200:
                document_of(response.status_code, response.read())
            events = Events(kind, self._steered(body))
            for data in response.iter_bytes():
                yield from events.feed(data)
            events.end()

    def _known_model(self) -> str:
        if self._model is None:
            self._model = self.models()[0]
        return self._model


class AsyncClient(_Connection[httpx.AsyncClient]):
    """``Client`` for asyncio: the same methods, to be awaited; the streams are async iterators."""

    _KIND = httpx.AsyncClient

    async def chat(self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.chat``."""
        return await self._ask("chat/completions", _chat(messages, steer, fields), model)

    async def complete(self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.complete``."""
        return await self._ask("completions", _body({"prompt": prompt}, steer, fields), model)

    async def respond(self, input: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """As ``Client.respond``."""
        return await self._ask("responses", _body({"input": input}, steer, fields), model)

    def stream(
        self, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> AsyncIterator[Piece]:
        """As ``Client.stream``."""
        return self._stream("chat/completions", _chat(messages, steer, fields), model)

    def stream_complete(
        self, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> AsyncIterator[Piece]:
        """As ``Client.stream_complete``."""
        return self._stream("completions", _body({"prompt": prompt}, steer, fields), model)

    async def models(self) -> list[str]:
        """As ``Client.models``."""
        return model_names(await self._send("GET", "models"))

    async def features(
        self,
        dictionary: str,
        q: str | None = None,
        *,
        feature: int | None = None,
        layer: int | None = None,
        limit: int = 10,
    ) -> list[dict[str, Any]]:
        """As ``Client.features``."""
        query = _query(dictionary, q, feature, layer, limit)
        return list((await self._send("GET", "saesteer/features", params=query))["features"])

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

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, method: Method, path: str, body: Any = None, **options: Any) -> Any:
        with _translated():
            response = await self._http.request(method, path, json=body, **options)
        return document_of(response.status_code, response.content)

    async def _administer(self, method: Method, path: str, body: Any = None) -> dict[str, Any]:
        return dict(await self._send(method, f"saesteer/{path}", body, headers=self._admin))

    async def _ask(self, kind: Route, body: dict[str, Any], model: str | None) -> Answer:
        body["model"] = model or await self._known_model()
        return answer_of(kind, await self._send("POST", kind, body), self._steered(body))

    async def _stream(self, kind: Route, body: dict[str, Any], model: str | None) -> AsyncIterator[Piece]:
        body |= {"model": model or await self._known_model(), "stream": True}
        with _translated():
            async with self._http.stream("POST", kind, json=body) as response:
                if response.status_code != 200:
                    document_of(response.status_code, await response.aread())
                events = Events(kind, self._steered(body))
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


def _query(dictionary: str, q: str | None, feature: int | None, layer: int | None, limit: int) -> dict[str, Any]:
    query = {"dictionary": dictionary, "q": q, "feature": feature, "layer": layer, "limit": limit}
    return {name: value for name, value in query.items() if value is not None}


def _module_body(name: str, steer: Steer) -> dict[str, Any]:
    return {"name": name, "spec": (as_spec(steer) or Spec()).to_json()}


def _chat(messages: Messages, steer: Steer, fields: Mapping[str, Any]) -> dict[str, Any]:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*map(dict, messages)]
    return _body({"messages": turns}, steer, fields)


def _body(body: dict[str, Any], steer: Steer, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request; made when a method is called, so a wrong spec is an error before a stream is read."""
    spec = as_spec(steer)
    return {**fields, **body, **({} if spec is None else {KEY: spec.to_json()})}


class _translated:
    """Turns httpx's errors into ours; a class, since an async generator may be closed inside it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(exc, httpx.HTTPError | httpx.InvalidURL):
            reason = " ".join(str(exc).split()) or type(exc).__name__
            raise ServerError(f"the server did not answer ({reason})", status=None) from exc
