"""A client that keeps so many streamed completions going over HTTP, and takes their times. Knows no server's insides.

It speaks HTTP/1.1 over bare sockets, with bodies that are bytes before the clock runs: 16 chunks come within a
millisecond, every 4, and each costs 11 µs of this process, with httpx 60 (measured on two busy cores).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from time import perf_counter

import httpx

from bench import offline
from bench.asks import Load, Shape, Spec, answers, prompts, specs
from bench.offline import Times

MODEL = "dummy"  # --served-model-name
# Seconds at most, by chance, between an answer and the next request. A client that sends it at once is in step with the
# engine: a request that comes later by a hair may wait for a whole step more, 3.7 ms of 18 on the 4B.
PAUSE = 0.04
_HANDLE = re.compile(rb'"handle": ?"([0-9a-f]{32})"')
_END = b"0\r\n\r\n"  # the last piece of a chunked body

Prepared = tuple[bytes, int]  # a whole request, and the tokens of its answer


def prepared(ids: Sequence[int], tokens: int, spec: Spec | None) -> Prepared:
    """One request, head and body."""
    asked = {
        "model": MODEL,
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(asked if spec is None else {**asked, "saesteer": spec}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content, tokens


def prepare(load: Load, shape: Shape) -> list[Prepared]:
    """The requests of a run."""
    asked = zip(prompts(load, shape), answers(load), specs(load, shape), strict=True)
    return [prepared(ids, tokens, spec) for ids, tokens, spec in asked]


def drive(port: int, requests: Sequence[Prepared], at_once: int, run_in: int = 0) -> Times:
    """Send them to a server on this machine; one begins soon after another has ended, and the first few take no times.

    Raises:
        RuntimeError: an answer is no whole stream of its tokens; the message holds its beginning and end.
    """
    times, kept = asyncio.run(_drive(port, requests, at_once, run_in))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/saesteer/results/") as client:
        for handle in kept:
            client.delete(handle).raise_for_status()
    return times


class _Stream(asyncio.Protocol):
    """A connection that is kept, with one request at a time."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.begun = self.first = self.ended = 0.0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        self.came += data
        if not self.first and b"data: " in data:
            self.first = now
        if self.came.endswith(_END) or not self.came.startswith(b"HTTP/1.1 200"):
            self.ended = now
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def close(self) -> None:
        self._transport.close()

    async def answer(self, request: bytes) -> None:
        """Send it; when this returns its answer is whole, or none will come."""
        self.came.clear()
        self.first = self.ended = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self.begun = perf_counter()
        self._transport.write(request)
        await self._done

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


async def _connected(port: int) -> _Stream:
    _, stream = await asyncio.get_running_loop().create_connection(_Stream, "127.0.0.1", port)
    return stream


async def _drive(port: int, requests: Sequence[Prepared], at_once: int, run_in: int) -> tuple[Times, list[str]]:
    draw = random.Random(len(requests))  # the same for every engine
    waiting = enumerate((draw.uniform(0, PAUSE), *request) for request in requests)
    first: list[float] = []
    whole: list[float] = []
    ends: list[bytes] = []
    kept: list[str] = []

    async def place(stream: _Stream) -> None:
        for number, (pause, request, tokens) in waiting:
            await asyncio.sleep(pause)
            await stream.answer(request)
            end = bytes(stream.came[-65536:])
            if not stream.first or not stream.ended or b'"completion_tokens":%d' % tokens not in end:
                raise RuntimeError(
                    f"expected {tokens} tokens in a stream, got {bytes(stream.came[:600])!r}...{end[-600:]!r}"
                )
            kept.extend(match.decode() for match in _HANDLE.findall(end))
            if number >= run_in:
                first.append(stream.first - stream.begun)
                whole.append(stream.ended - stream.begun)
                ends.append(end)

    streams = [await _connected(port) for _ in range(min(at_once, len(requests)))]
    try:
        await asyncio.gather(*map(place, streams))
    finally:
        for stream in streams:
            stream.close()
        await asyncio.sleep(0)  # or the loop would end before they have closed
    return Times(first, whole, sum(map(is_served, ends))), kept


def is_served(answer: bytes) -> bool:
    """Whether the end of an answer says that all its edits have changed tokens, and has what it reads."""
    events = [line for line in answer.splitlines() if line.startswith(b"data: {") and b'"saesteer"' in line]
    return bool(events) and offline.is_served(json.loads(events[-1].removeprefix(b"data: "))["saesteer"])
