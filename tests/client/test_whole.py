"""An answer is whole or an error: streams that break off, requests with several answers, loops that have ended."""

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import httpx
import numpy as np
import pytest

from saesteer.client import AsyncClient
from saesteer.client.client import Client
from saesteer.errors import ConfigError, ServerError, SpecError
from tests.client.both import both_clients, call

CLAMP = {"op": "clamp", "dictionary": "demo", "feature": 3, "value": 2.0}
EVENTS: list[Any] = [
    {"choices": [{"index": 0, "text": "Half an"}]},
    {"choices": [{"index": 0, "text": " answer", "finish_reason": "stop"}]},
    {"choices": [], "saesteer": {"applied": [{"edit": 0}]}},
]
STREAM = "".join(f"data: {json.dumps(one)}\n\n" for one in EVENTS).encode()
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"  # the chunk that ends a body


class Handler(socketserver.StreamRequestHandler):
    """Reads requests, and sends what the server holds; then it ends the connection, if the server is to."""

    def handle(self) -> None:
        server: Any = self.server
        while size := self.size():
            self.rfile.read(size)
            self.wfile.write(server.sent)
            if server.closes:
                return

    def size(self) -> int:
        """The bytes of the next request's body; 0 behind the last request."""
        size = 0
        with suppress(ConnectionError):
            while line := self.rfile.readline().lower():
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
                if line == b"\r\n":
                    return size
        return 0


@pytest.fixture
def server() -> Iterator[Any]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def url_of(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def chunked(content: bytes, last: bytes) -> bytes:
    chunk = b"%x\r\n%s\r\n" % (len(content), content) if content else b""
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + last


def texts(url: str, steer: Any, *, asynchronous: bool) -> list[str]:
    """The texts of a stream."""
    if not asynchronous:
        with Client(url, model="m") as client:
            return [piece.text for piece in client.stream_complete("x", steer=steer)]

    async def wait() -> list[str]:
        async with AsyncClient(url, model="m") as client:
            return [piece.text async for piece in client.stream_complete("x", steer=steer)]

    return asyncio.run(wait())


@both_clients
@pytest.mark.parametrize("steer", [None, CLAMP], ids=["plain", "steered"])
@pytest.mark.parametrize("ends", [True, False], ids=["proxy", "server"])
@pytest.mark.parametrize("kept", [0, 40, STREAM.index(b"data", 9), len(STREAM), len(STREAM) + 5])
def test_a_stream_that_breaks_off_is_an_error(
    server: Any, kept: int, ends: bool, steer: Any, asynchronous: bool
) -> None:
    """Whatever breaks it: a proxy that ends the response cleanly, or a server that dies."""
    server.closes, server.sent = True, chunked((STREAM + DONE)[:kept], LAST if ends else b"")
    told = r"^the stream broke off, expected \[DONE\]" if ends else "^the server http://.* did not answer"
    with pytest.raises(ServerError, match=told):
        texts(url_of(server), steer, asynchronous=asynchronous)
    server.sent = chunked(STREAM + DONE, LAST)
    assert texts(url_of(server), steer, asynchronous=asynchronous) == ["Half an", " answer", ""]


@both_clients
def test_a_stream_may_be_given_up(server: Any, asynchronous: bool) -> None:
    server.closes = False
    stream, answer = chunked(STREAM + DONE, LAST), chunked(json.dumps(EVENTS[1]).encode(), LAST)

    async def give_up() -> str:
        async with AsyncClient(url_of(server), model="m") as client:
            server.sent = stream
            pieces = client.stream_complete("x")
            assert (await anext(pieces)).text == "Half an"
            await pieces.aclose()  # type: ignore[attr-defined]  # every stream here is a generator
            server.sent = answer
            return (await client.complete("x")).text

    if asynchronous:
        assert asyncio.run(give_up()) == " answer"
        return
    with Client(url_of(server), model="m") as client:
        server.sent = stream
        assert next(iter(client.stream_complete("x"))).text == "Half an"
        server.sent = answer
        assert client.complete("x").text == " answer"


@both_clients
@pytest.mark.parametrize(
    ("method", "text", "fields", "told"),
    [
        ("complete", ["a", "b"], {}, "prompt: got 2, expected 1"),
        ("complete", [[1, 2], [3]], {}, "prompt: got 2, expected 1"),
        ("complete", np.ones((3, 2), dtype=int), {}, "prompt: got 3, expected 1"),
        ("complete", "", {"prompt_embeds": ["x", "y"]}, "prompt_embeds: got 2, expected 1"),
        ("complete", "a", {"n": 2}, "n: got 2, expected 1"),
        ("chat", "a", {"n": np.int64(3)}, "n: got 3, expected 1"),
    ],
)
def test_what_would_have_several_answers_is_refused(
    method: str, text: Any, fields: dict[str, Any], told: str, asynchronous: bool
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise AssertionError("nothing is sent")

    with pytest.raises(SpecError, match=f"^{told}: call it for each, or stream, where pieces have an index$"):
        call(answer, method, text, model="m", asynchronous=asynchronous, **fields)


@both_clients
@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]], [], ""])
@pytest.mark.parametrize("n", [None, 1])
def test_one_answer_may_be_spelled_as_one_of_several(prompt: Any, n: int | None, asynchronous: bool) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"text": "x"}]})

    assert call(answer, "complete", prompt, model="m", n=n, asynchronous=asynchronous).text == "x"


def in_several_loops(url: str) -> None:
    client = AsyncClient(url, model="m")

    async def twice() -> list[str]:
        return [(await client.complete("x")).text for _ in range(2)]

    assert asyncio.run(twice()) == [" answer"] * 2
    told = "^this AsyncClient is of another event loop, expected one for each asyncio.run$"
    with pytest.raises(ConfigError, match=told):
        asyncio.run(twice())
    with suppress(ConfigError):
        assert asyncio.run(twice()) == [" answer"] * 2
    with suppress(ConfigError):
        asyncio.run(client.close())


def test_an_async_client_in_another_event_loop_works_or_raises_our_error(server: Any) -> None:
    """In a process of its own: sockets of loops that have ended warn whenever they are collected."""
    server.closes, server.sent = False, chunked(json.dumps(EVENTS[1]).encode(), LAST)
    process = get_context("spawn").Process(target=in_several_loops, args=(url_of(server),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
