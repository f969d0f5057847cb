"""Fetched results and the rows of chat messages, from made-up answers. Starts no server."""

import json
from base64 import b64encode
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.client import Answer, Capture, Client, numbers
from saesteer.client.client import Piece
from saesteer.errors import RequestRefused
from tests.client.both import both_clients, call

SITE = "resid_post.3"
NAMES = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2")}


def rows(positions: list[int]) -> Any:
    """The tensor of these positions: whole numbers, exact in every dtype."""
    return np.array([[at, -at] for at in positions], dtype=np.float32).reshape(len(positions), 2)


def file(numbers: Any, dtype: str = "float32") -> bytes:
    """A safetensors file, written once more."""
    name, code = NAMES.get(dtype, ("BF16", ""))
    data = numbers.astype(code).tobytes() if code else (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    about = {"dtype": name, "shape": numbers.shape, "data_offsets": [8, 8 + len(data)]}
    other = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    head = json.dumps({"__metadata__": {"site": SITE}, "positions": other, "activations": about}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(8) + data


def inline(positions: list[int], **more: Any) -> dict[str, Any]:
    found = rows(positions)
    entry = {"site": SITE, "at": "before", "positions": positions, "dtype": "float32", "shape": [*found.shape]}
    return {**entry, "data": b64encode(found.tobytes()).decode(), **more}


def handled(positions: list[int], handle: str, **more: Any) -> dict[str, Any]:
    found = inline(positions, **more)
    del found["data"]
    return {**found, "handle": handle}


def answer(entries: list[Any], messages: list[Any]) -> Answer:
    return Answer("", "stop", {}, {}, activations=tuple(entries), messages=tuple(messages))


class Server:
    """Keeps results."""

    def __init__(self, **kept: bytes) -> None:
        self.kept = kept
        self.transport = httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        handle = request.url.path.removeprefix("/v1/saesteer/results/")
        assert handle != request.url.path
        if handle not in self.kept:
            return httpx.Response(404, json={"error": {"message": "no", "code": "unknown_name", "param": "handle"}})
        content = self.kept[handle]
        if request.method == "DELETE":
            del self.kept[handle]
            return httpx.Response(200, json={"handle": handle, "deleted": True})
        return httpx.Response(200, content=content)


@both_clients
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fetched_numbers_are_those_of_an_inline_answer(dtype: str, asynchronous: bool) -> None:
    server = Server(a=file(rows([1, 2]), dtype), b=file(rows([7]), dtype))
    for _ in range(2):
        found = call(server.answer, "fetch", ["b", "a"], asynchronous=asynchronous)
        assert [one.tolist() for one in found] == [numbers(inline(at)).tolist() for at in ([7], [1, 2])]
        assert {one.dtype for one in found} == {np.dtype(np.float32)}
    assert call(server.answer, "delete_result", "a", asynchronous=asynchronous) is None
    for method, words in (("fetch", ["a"]), ("delete_result", "a")):
        with pytest.raises(RequestRefused) as caught:
            call(server.answer, method, words, asynchronous=asynchronous)
        assert (caught.value.status, caught.value.code) == (404, "unknown_name")


def conversation(sizes: list[int]) -> list[dict[str, Any]]:
    edges = np.cumsum([0, *sizes]).tolist()
    roles = [*("user" for _ in sizes[1:]), None]
    return [{"role": role, "index": n, "start": edges[n], "end": edges[n + 1]} for n, role in enumerate(roles)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    generated=st.integers(0, 5),
    cuts=st.sets(st.integers(0, 30), max_size=4),
)
def test_the_slices_of_all_messages_concatenate_to_the_prompt(sizes: list[int], generated: int, cuts: set[int]) -> None:
    """In however many pieces of a stream the rows come."""
    messages, prompt = conversation(sizes), sum(sizes)
    end = prompt + generated
    edges = [0, *sorted(cut for cut in cuts if cut < end), end]
    entries = [inline([*range(lo, hi)]) for lo, hi in pairwise(edges)]
    pieces = [Piece("", None, {}, activations=(entry,)) for entry in entries]
    pieces.append(Piece("", "stop", {}, messages=tuple(messages)))
    with Client("http://host", transport=Server().transport) as client:
        captures = [client.capture(told) for told in (answer(entries, messages), pieces)]
    for found in (*captures, Capture.of({"activations": entries, "messages": messages})):
        slices = [found.message(i, SITE) for i in range(len(sizes))]
        assert [len(one) for one in slices] == sizes
        assert np.concatenate(slices).tolist() == rows([*range(prompt)]).tolist()
        *others, last = (found.message(i, "resid_pre.4", include_generated=True) for i in range(len(sizes)))
        assert np.concatenate([*others, last]).tolist() == rows([*range(end)]).tolist()


@both_clients
def test_a_capture_fetches_what_has_handles(asynchronous: bool) -> None:
    entries = [
        handled([0, 1, 2], "a"),
        inline([2], at="after"),
        handled([0, 3], "b", reduce="mean"),
    ]
    server = Server(a=file(rows([0, 1, 2])))
    found = call(server.answer, "capture", answer(entries, conversation([2, 1])), asynchronous=asynchronous)
    assert found.message(0, SITE).tolist() == rows([0, 1]).tolist()
    assert found.message(1, SITE, at="after").tolist() == rows([2]).tolist()
    assert found.message(0, SITE, at="after").shape == (0, 2)
    positions, numbers = found.at(SITE)
    assert positions.tolist() == [0, 1, 2] and numbers.tolist() == rows([0, 1, 2]).tolist()


def test_what_was_not_read_is_said() -> None:
    found = Capture.of({"activations": [inline([0])], "messages": conversation([1])})
    with pytest.raises(KeyError, match=r"nothing was read at resid_post.4 \(before\), expected one of: resid_post.3"):
        found.message(0, "resid_post.4")
    for i in (1, -1):
        with pytest.raises(IndexError, match=f"got message {i}, but the answer names 1"):
            found.message(i, SITE)
    with pytest.raises(KeyError, match=r"nothing was read'$"):
        Capture.of({}).at(SITE)
