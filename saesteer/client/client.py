"""Client and AsyncClient: steered requests to an OpenAI server with saesteer. Knows HTTP, but no engine and no torch.

A request's other fields (temperature, max_tokens, ...) go into the body unchanged. ``steer`` is checked before anything
is sent. If the server refuses, RequestRefused has the field, the code and the message.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar
from urllib.parse import quote

import httpx

from saesteer.client.bodies import (
    Messages,
    NewVector,
    body_of,
    chat_body,
    refuse_several,
    vector_body,
)
from saesteer.client.connection import Connection, translated
from saesteer.client.responses import Answer, Events, Piece, Route, answer_of, document_of, model_names, read_of
from saesteer.client.results import Capture, handles_of, result_of
from saesteer.language.fields import Json
from saesteer.language.spec import Spec, Steer, as_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Answer", "AsyncClient", "Client", "Piece", "Steer"]

Prompt = str | Sequence[int]
Method = Literal["GET", "POST", "PUT", "DELETE"]
P = ParamSpec("P")
T = TypeVar("T")


def _nothing(_: Any) -> None:
    """The result where a response's JSON adds nothing to its status."""


class Client(Connection[httpx.Client]):
    """A server's OpenAI routes, each with the argument ``steer``."""

    _KIND = httpx.Client

    def chat(self, /, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A chat completion.

        Args:
            messages: the conversation, or one user message as text.
            steer: a spec, its JSON object, one edit or a list of edits. A spec or a JSON object,
                ``{"edits": [...], "return": {"dose": True}}``, may also ask for doses.
            model: by default the client's.
            **fields: other fields of the body, as in the OpenAI API and vLLM.

        Raises:
            SpecError: ``steer`` is wrong, or there are several texts or ``n`` above 1, which ``stream`` and
                ``stream_complete`` take; nothing was sent.
            RequestRefused: the server refused the request.
            ServerError: the server failed, did not answer, or runs without saesteer and did not steer.
        """
        return self._ask("chat/completions", chat_body(messages, steer, fields), model)

    def complete(self, /, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """A completion of a text or of token ids; arguments and errors as ``chat``."""
        return self._ask("completions", body_of({"prompt": prompt}, steer, fields), model)

    def respond(self, /, input: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any) -> Answer:
        """An answer over the responses API; arguments and errors as ``chat``."""
        return self._ask("responses", body_of({"input": input}, steer, fields), model)

    def stream(
        self, /, messages: Messages, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A chat completion piece by piece; arguments and errors as ``chat``. Closing it early ends the request."""
        return self._stream("chat/completions", chat_body(messages, steer, fields), model)

    def stream_complete(
        self, /, prompt: Prompt, *, steer: Steer = None, model: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """A completion piece by piece; arguments and errors as ``chat``."""
        return self._stream("completions", body_of({"prompt": prompt}, steer, fields), model)

    def models(self) -> list[str]:
        """The names of the server's models.

        Raises:
            ServerError: the server failed, or did not answer.
        """
        return self._send("GET", "models", then=model_names)

    def describe(self) -> Json:
        """What the server is and has: version, models, dictionaries, sites, limits, routes.

        Raises:
            ServerError: the server failed, or did not answer.
        """
        return self._send("GET", "saesteer", then=dict)

    def features(
        self,
        dictionary: str | None = None,
        q: str | None = None,
        *,
        feature: int | None = None,
        layer: int | None = None,
        limit: int = 10,
    ) -> list[Json]:
        """Features by words in their labels and examples, best first, or what is known of one.

        Args:
            dictionary: a dictionary of the server, as in a request; None: words are looked for in all of them.
            q: words.
            feature: a feature's number, in place of words; the list is empty if nothing is known of it.
            layer: of a set.
            limit: how many features at most.

        Raises:
            RequestRefused: the dictionary is unknown (400), has no labels (404), or lacks the feature (400).
            ServerError: the server failed, or did not answer.
        """
        query = {"dictionary": dictionary, "q": q, "feature": feature, "layer": layer, "limit": limit}
        given = {name: value for name, value in query.items() if value is not None}
        return self._send("GET", "saesteer/features", params=given, then=itemgetter("features"))

    def fetch(self, handles: Iterable[str]) -> "list[NDArray[np.float32]]":
        """The numbers of results that a request has read with ``"as": "handle"``, float32 [rows, width] each.

        They can be fetched as often as wanted, until ``delete_result`` or until they expire.

        Raises:
            RequestRefused: a result was deleted, or has expired (404).
            ServerError: the server failed, or did not answer.
        """
        return [self._fetched(handle) for handle in handles]

    def capture(self, told: Answer | Iterable[Piece]) -> Capture:
        """What an answer, or all pieces of one choice, have read of activations; fetches what has handles.

        Raises:
            SpecError: the pieces are of several choices.
            RequestRefused, ServerError: as ``fetch``.
        """
        report = read_of(told)
        handles = handles_of(report["activations"])
        return Capture.of(report, dict(zip(handles, self.fetch(handles), strict=True)))

    def delete_result(self, handle: str) -> None:
        """Deletes a result, which makes room for others; errors as ``fetch``."""
        return self._send("DELETE", f"saesteer/results/{quote(handle, safe='')}", then=_nothing)

    def register_vector(self, name: str, vector: NewVector, *, bias: float = 0.0, function: str = "linear") -> Json:
        """Registers or replaces a vector. Returns its entry in ``vectors``, and whether one was ``replaced``.

        Args:
            name: the vector's name in requests and modules.
            vector: numbers for any site, or an ``InlineVector``, which may have a row for each of several layers.
            bias: a probe's bias: it reads x · v + bias.
            function: what a probe makes of that: ``linear``, ``sigmoid`` or ``tanh``.

        Raises:
            SpecError: the vector is not a flat list of finite numbers; nothing was sent.
            RequestRefused: the key is wrong (401), the routes are off (403), the vector is wrong (400) or does not fit
                (409).
            ServerError: the server failed, or did not answer.
        """
        return self._administer("POST", "vectors", vector_body(name, vector, bias, function), then=dict)

    def register_module(self, name: str, steer: Steer) -> Json:
        """Registers or replaces a module, a spec as for ``chat``; result and errors as ``register_vector``.

        Raises:
            SpecError: ``steer`` is wrong; nothing was sent.
        """
        spec = as_spec(steer) or Spec()
        return self._administer("POST", "modules", {"name": name, "spec": spec.to_json()}, then=dict)

    def delete_vector(self, name: str) -> None:
        """Deletes a vector; running requests keep it. Errors as ``register_vector``, and 404 if there is none."""
        return self._administer("DELETE", f"vectors/{quote(name, safe='')}", then=_nothing)

    def delete_module(self, name: str) -> None:
        """Deletes a module; errors as ``delete_vector``."""
        return self._administer("DELETE", f"modules/{quote(name, safe='')}", then=_nothing)

    def set_default(self, module: str) -> None:
        """Lets a module steer every request from now on; errors as ``register_vector``."""
        return self._administer("PUT", "default", {"module": module}, then=_nothing)

    def clear_default(self) -> None:
        """Lets no module steer every request; errors as ``register_vector``, and 409 if the server requires one."""
        return self._administer("DELETE", "default", then=_nothing)

    def vectors(self) -> list[Json]:
        """The named vectors, with shape, layers, version and uses; errors as ``register_vector``."""
        return self._administer("GET", "vectors", then=itemgetter("vectors"))

    def modules(self) -> list[Json]:
        """The modules, with version and uses; errors as ``register_vector``."""
        return self._administer("GET", "modules", then=itemgetter("modules"))

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: Method, path: str, body: Any = None, *, then: Callable[[Any], T], **options: Any) -> T:
        """What ``then`` makes of the response's JSON."""
        with translated():
            response = self._http.request(method, path, json=body, **options)
        return then(document_of(response.status_code, response.content))

    def _administer(self, method: Method, path: str, body: Any = None, *, then: Callable[[Any], T]) -> T:
        return self._send(method, f"saesteer/{path}", body, then=then, headers=self._admin)

    def _fetched(self, handle: str) -> "NDArray[np.float32]":
        with translated():
            response = self._http.get(f"saesteer/results/{quote(handle, safe='')}")
        return result_of(response.status_code, response.content)

    def _ask(self, kind: Route, body: Json, model: str | None) -> Answer:
        refuse_several(body)
        body["model"] = model or self._known_model()
        return self._send("POST", kind, body, then=partial(answer_of, kind, steered=self._steered(body)))

    def _stream(self, kind: Route, body: Json, model: str | None) -> Iterator[Piece]:
        body |= {"model": model or self._known_model(), "stream": True}
        with translated(), self._http.stream("POST", kind, json=body) as response:
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


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Type a method of ``Client`` for ``AsyncClient``, whose private methods return coroutines where its own wait."""
    return method  # type: ignore[return-value]


def _iterated(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate["AsyncClient", P], AsyncIterator[T]]:
    """Type a stream of ``Client`` for ``AsyncClient``."""
    return method  # type: ignore[return-value]


class AsyncClient(Connection[httpx.AsyncClient]):
    """``Client`` for asyncio: the same methods, to be awaited; the streams are async iterators.

    Its connections belong to one event loop. Where another one meets them it raises ConfigError, so make a client in
    each ``asyncio.run``.
    """

    _KIND = httpx.AsyncClient

    chat = _awaited(Client.chat)
    complete = _awaited(Client.complete)
    respond = _awaited(Client.respond)
    stream = _iterated(Client.stream)
    stream_complete = _iterated(Client.stream_complete)
    models = _awaited(Client.models)
    describe = _awaited(Client.describe)
    features = _awaited(Client.features)
    delete_result = _awaited(Client.delete_result)
    register_vector = _awaited(Client.register_vector)
    register_module = _awaited(Client.register_module)
    delete_vector = _awaited(Client.delete_vector)
    delete_module = _awaited(Client.delete_module)
    set_default = _awaited(Client.set_default)
    clear_default = _awaited(Client.clear_default)
    vectors = _awaited(Client.vectors)
    modules = _awaited(Client.modules)
    _administer = Client._administer

    async def fetch(self, handles: Iterable[str]) -> "list[NDArray[np.float32]]":
        """As ``Client.fetch``."""
        return [await self._fetched(handle) for handle in handles]

    async def capture(self, told: Answer | Iterable[Piece]) -> Capture:
        """As ``Client.capture``."""
        report = read_of(told)
        handles = handles_of(report["activations"])
        return Capture.of(report, dict(zip(handles, await self.fetch(handles), strict=True)))

    async def close(self) -> None:
        """Closes the connections."""
        with translated():
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(
        self, method: Method, path: str, body: Any = None, *, then: Callable[[Any], T], **options: Any
    ) -> T:
        with translated():
            response = await self._http.request(method, path, json=body, **options)
        return then(document_of(response.status_code, response.content))

    async def _fetched(self, handle: str) -> "NDArray[np.float32]":
        with translated():
            response = await self._http.get(f"saesteer/results/{quote(handle, safe='')}")
        return result_of(response.status_code, response.content)

    async def _ask(self, kind: Route, body: Json, model: str | None) -> Answer:
        refuse_several(body)
        body["model"] = model or await self._known_model()
        return await self._send("POST", kind, body, then=partial(answer_of, kind, steered=self._steered(body)))

    async def _stream(self, kind: Route, body: Json, model: str | None) -> AsyncIterator[Piece]:
        body |= {"model": model or await self._known_model(), "stream": True}
        with translated():
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
