"""A client of Neuronpedia's routes that disconnects frees the engine at once, before a stream's first piece as well."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from threading import Event, Semaphore, Thread
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import uvicorn
from fastapi.testclient import TestClient

from saesteer.plugin.http.neuronpedia.host import Turns
from tests.plugin.neuronpedia.asking import ALL, CHAT, COMPLETION, SINGLE, TEXT, ask
from tests.plugin.neuronpedia.stand_in import StandIn

SOURCE = {"prompts": [TEXT, "Who?"], "model": "m", "source": "demo"}


@pytest.fixture(scope="module")
def address(client: TestClient) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(client.app, lifespan="off", log_level="warning"))
        thread = Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield listening.getsockname()
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    ("path", "body", "requests"),
    [
        ("steer/completion", COMPLETION, 1),
        ("steer/completion", {**COMPLETION, "stream": True}, 1),
        ("steer/completion-chat", CHAT, 1),
        ("activation/single", SINGLE, 1),
        ("activation/all", ALL, 1),
        ("activation/source", SOURCE, 2),
    ],
)
def test_what_has_not_said_anything_yet_ends(
    address: tuple[str, int],
    engine: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    requests: int,
) -> None:
    begun, closed = Semaphore(0), Semaphore(0)

    async def generate(*_: Any) -> AsyncIterator[Any]:
        begun.release()
        try:
            await asyncio.sleep(60)
            yield None
        finally:
            closed.release()

    monkeypatch.setattr(engine, "generate", generate)
    sent = json.dumps(body).encode()
    with socket.create_connection(address) as connection:
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nX-SECRET-KEY: usual\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        assert all(begun.acquire(timeout=20) for _ in range(requests))
    assert all(closed.acquire(timeout=20) for _ in range(requests))


def test_a_file_that_is_read_for_nobody_is_still_the_only_one() -> None:
    """A thread goes on when its request is cancelled, and each file takes memory."""
    go, reading = Event(), 0

    def read() -> int:
        nonlocal reading
        reading += 1
        assert go.wait(20)
        reading -= 1
        return reading

    async def run() -> None:
        turns = Turns()
        first, second = (asyncio.create_task(turns.alone(read)) for _ in range(2))
        start = time.monotonic()
        while not reading and time.monotonic() < start + 20:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([second], timeout=0.2)
        assert reading == 1
        go.set()
        assert await second == 0 and first.cancelled()

    asyncio.run(run())


def test_who_would_have_to_wait_too_long_is_told_so(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saesteer.plugin.http.neuronpedia.host._MOST_WAITING", 0)
    body = {"model": "m", "source": "demo", "feature": {"model": "m", "source": "demo", "index": 7}, "numResults": 1}
    assert "whole file" in ask(client, "util/sae-topk-by-decoder-cossim", body, 429)["error"]
