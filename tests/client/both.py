"""Both clients, the one that waits and the one that does not, in front of made-up answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from saesteer.client import AsyncClient, Client

both_clients = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def call(
    answer: Callable[[httpx.Request], httpx.Response], method: str, *words: Any, asynchronous: bool, **fields: Any
) -> Any:
    """What a method of a client with both keys returns, where requests are answered like this; a stream as a list."""
    options: dict[str, Any] = {"transport": httpx.MockTransport(answer), "api_key": "usual", "admin_key": "admin"}
    if not asynchronous:
        with Client("http://host", **options) as client:
            found = getattr(client, method)(*words, **fields)
            return list(found) if method.startswith("stream") else found

    async def wait() -> Any:
        async with AsyncClient("http://host", **options) as client:
            found = getattr(client, method)(*words, **fields)
            return [piece async for piece in found] if method.startswith("stream") else await found

    return asyncio.run(wait())
