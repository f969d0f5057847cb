"""The clients against a stand-in that answers as vLLM does and keeps what it was sent.

test_whole.py has sockets, and test_real.py the real server.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

import saesteer
from saesteer.client.client import Answer, AsyncClient, Client, Piece
from saesteer.errors import RequestRefused, SaesteerError, ServerError, SpecError
from tests.client.both import both_clients, call

URL = "http://host"
CLAMP = {"op": "clamp", "dictionary": "demo", "feature": 3, "value": 2.0}
APPLIED = [{"edit": 0, "site": "resid_post.15"}]
DOSE = [{"site": "resid_post.15", "max": 0.31, "mean": 0.22, "tokens": 80}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
ANSWERS: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": "small"}, {"id": "other"}]},
    "/v1/chat/completions": {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "The Bridge."}, "finish_reason": "stop"}],
        "usage": USAGE,
        "saesteer": {"applied": APPLIED, "dose": DOSE},
    },
    "/v1/completions": {"choices": [{"index": 0, "text": " a bridge", "finish_reason": "length"}], "usage": USAGE},
    "/v1/responses": {
        "status": "completed",
        "output": [
            {"type": "reasoning", "content": None},
            {"type": "message", "content": [{"type": "output_text", "text": "The "}, {"text": "Bridge."}]},
        ],
        "usage": USAGE,
        "saesteer": {"applied": []},
    },
}
CHUNKS: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "delta": {"content": "The "}}]},
        {"choices": [{"index": 0, "delta": {"content": "Bridge."}, "finish_reason": "stop"}]},
        {"choices": [], "usage": USAGE, "saesteer": {"applied": APPLIED, "dose": DOSE}},
    ],
    "/v1/completions": [
        {"choices": [{"index": 1, "text": " a"}]},
        {"choices": [{"index": 1, "text": " ü\u2028", "finish_reason": "length"}], "saesteer": {"applied": APPLIED}},
    ],
}
REFUSAL = {
    "error": {
        "message": "saesteer.edits[0].feature: got 9216, expected 0 to 9215 [out_of_range]",
        "type": "BadRequestError",
        "param": "saesteer.edits[0].feature",
        "code": 400,
    }
}


@dataclass
class StandIn:
    """What the server does next, and what it was sent."""

    status: int = 200
    answer: bytes | None = None  # in place of the usual one
    stream: bytes | None = None  # in place of the usual one
    seen: list[tuple[str, httpx.Headers, Any]] = field(default_factory=list)  # path, headers, body

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body: Any = json.loads(request.content) if request.content else None
        self.seen.append((path, request.headers, body))
        if path == "/v1/models":
            return httpx.Response(200, json=ANSWERS[path])
        if body.get("stream") and self.status == 200:
            events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in CHUNKS[path]]
            content = self.stream or "".join([": ping\n\n", *events, "data: [DONE]\n\n"]).encode()
            return httpx.Response(200, content=content, headers={"Content-Type": "text/event-stream"})
        content = json.dumps(ANSWERS[path]).encode() if self.answer is None else self.answer
        return httpx.Response(self.status, content=content)

    def client(self, url: str = URL, **options: Any) -> Client:
        return Client(url, transport=httpx.MockTransport(self), **options)


@pytest.fixture
def server() -> StandIn:
    return StandIn()


@both_clients
def test_chat(server: StandIn, asynchronous: bool) -> None:
    answer = call(server, "chat", "Who are you?", steer=CLAMP, temperature=0, asynchronous=asynchronous)
    raw = ANSWERS["/v1/chat/completions"]
    assert answer == Answer("The Bridge.", "stop", USAGE, raw, applied=tuple(APPLIED), dose=tuple(DOSE))
    assert [path for path, _, _ in server.seen] == ["/v1/models", "/v1/chat/completions"]
    assert server.seen[-1][2] == {
        "model": "small",
        "messages": [{"role": "user", "content": "Who are you?"}],
        "temperature": 0,
        "saesteer": {"edits": [CLAMP]},
    }


@both_clients
def test_complete_and_respond(server: StandIn, asynchronous: bool) -> None:
    answer = call(server, "complete", [1, 2, 3], model="other", max_tokens=2, asynchronous=asynchronous)
    assert (answer.text, answer.finish_reason, answer.usage) == (" a bridge", "length", USAGE)
    assert (answer.applied, answer.dose) == (None, None)
    assert server.seen == [
        ("/v1/completions", server.seen[0][1], {"model": "other", "prompt": [1, 2, 3], "max_tokens": 2})
    ]
    answer = call(server, "respond", "Who?", steer=[], asynchronous=asynchronous)
    assert (answer.text, answer.finish_reason) == ("The Bridge.", "completed")
    assert server.seen[-1][2] == {"model": "small", "input": "Who?", "saesteer": {}}
    assert call(server, "models", asynchronous=asynchronous) == ["small", "other"]


@both_clients
def test_streams(server: StandIn, asynchronous: bool) -> None:
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    pieces = call(server, "stream", turns, steer=saesteer.clamp("demo", 3, 2.0), asynchronous=asynchronous)
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [
        ("", None), ("The ", None), ("Bridge.", "stop"), ("", None)
    ]  # fmt: skip
    assert [piece.applied for piece in pieces] == [None, None, None, tuple(APPLIED)]
    assert [piece.dose for piece in pieces] == [None, None, None, tuple(DOSE)]
    assert server.seen[-1][2]["stream"] is True
    assert server.seen[-1][2]["messages"] == turns
    pieces = call(server, "stream_complete", "x", asynchronous=asynchronous)
    raw = CHUNKS["/v1/completions"]
    # A line separator inside a text is no end of a line.
    assert pieces == [Piece(" a", None, raw[0], 1), Piece(" ü\u2028", "length", raw[1], 1, applied=tuple(APPLIED))]


@pytest.mark.parametrize("whole", [True, False], ids=["answer", "piece"])
def test_what_a_server_reports_stands_under_its_name(whole: bool) -> None:
    lists = ("applied", "dose", "features", "probes", "activations", "hidden", "messages", "flags")
    report = {name: [{"about": name}] for name in lists} | {"consumers": {"logging": None}}
    choice = {"finish_reason": "stop", "message": {"content": "a"}, "delta": {"content": "a"}}
    document = {"choices": [choice], "saesteer": report}
    content = json.dumps(document).encode() if whole else f"data: {json.dumps(document)}\n\n".encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
    with Client("http://host", model="m", transport=transport) as client:
        told = client.chat("x", steer=CLAMP) if whole else next(iter(client.stream("x", steer=CLAMP)))
    assert {name: getattr(told, name) for name in lists} == {name: ({"about": name},) for name in lists}
    assert told.consumers == {"logging": None}


def test_a_stream_may_come_in_any_parts() -> None:
    class Parts(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for byte in "".join(f"data: {one}\r\n\r\n" for one in events).encode():
                yield bytes([byte])

    events = [*(json.dumps(one, ensure_ascii=False) for one in CHUNKS["/v1/completions"]), "[DONE]"]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Parts()))
    with Client("http://host", model="m", transport=transport) as client:
        assert [piece.text for piece in client.stream_complete("x")] == [" a", " ü\u2028"]


@both_clients
@pytest.mark.parametrize("method", ["chat", "stream"])
def test_a_refusal_names_field_and_code(server: StandIn, method: str, asynchronous: bool) -> None:
    server.status, server.answer = 400, json.dumps(REFUSAL).encode()
    with pytest.raises(RequestRefused) as caught:
        call(server, method, "x", steer=CLAMP, asynchronous=asynchronous)
    error = caught.value
    assert (error.status, error.field, error.code) == (400, "saesteer.edits[0].feature", "out_of_range")
    assert "expected 0 to 9215" in str(error)
    assert isinstance(error, ServerError | SaesteerError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status, again.field, again.code) == (str(error), 400, error.field, error.code)


@both_clients
@pytest.mark.parametrize("method", ["chat", "stream"])
@pytest.mark.parametrize("steer", [{"edits": [{"op": "clam"}]}, "{", 3])
def test_a_wrong_spec_is_not_sent(server: StandIn, method: str, steer: Any, asynchronous: bool) -> None:
    with pytest.raises(SpecError):
        call(server, method, "x", steer=steer, asynchronous=asynchronous)
    assert server.seen == []


FAILURES: list[tuple[int, bytes, type[ServerError], str]] = [
    (404, b'{"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}', RequestRefused, "no such"),
    (401, b'{"error": "Unauthorized"}', RequestRefused, "Unauthorized"),
    (400, b'{"error": {"message": "x", "code": "too_many", "param": 3}}', RequestRefused, "x"),
    (422, b'{"detail": "x"}', RequestRefused, "x"),
    (413, b"", RequestRefused, "no message"),
    (500, b"<html>", ServerError, "answered with 500: <html>"),
    (302, b"", ServerError, "302"),
    (200, b"<html>", ServerError, "not JSON"),
    (200, b"{}", ServerError, "no chat/completions in it"),
    (200, b"[]", ServerError, "no chat/completions in it"),
    (200, b'{"choices": []}', ServerError, "no chat/completions in it"),
]


@pytest.mark.parametrize(("status", "content", "kind", "words"), FAILURES)
def test_failures(server: StandIn, status: int, content: bytes, kind: type[ServerError], words: str) -> None:
    server.status, server.answer = status, content
    with pytest.raises(ServerError) as caught:
        call(server, "chat", "x", asynchronous=False)
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert words in str(caught.value)


STREAM_FAILURES: list[tuple[bytes, type[ServerError], str]] = [
    (b'data: {"error": {"message": "engine died", "code": 500}}\n\n', ServerError, "engine died"),
    (b'data: {"error": {"message": "too long", "code": 400}}\n\n', RequestRefused, "too long"),
    (b'data: {"error": "x"}\n\n', ServerError, "x"),
    (b"data: {\n\n", ServerError, "no chat/completions in it: {"),
    (b"data: 3\n\n", ServerError, "no chat/completions in it: 3"),
]


@both_clients
@pytest.mark.parametrize(("stream", "kind", "words"), STREAM_FAILURES)
def test_failures_in_a_stream(
    server: StandIn, stream: bytes, kind: type[ServerError], words: str, asynchronous: bool
) -> None:
    server.stream = stream
    with pytest.raises(ServerError) as caught:
        call(server, "stream", "x", asynchronous=asynchronous)
    assert type(caught.value) is kind
    assert words in str(caught.value)


SILENT: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {"steer": CLAMP}),
    ("chat", "/v1/chat/completions", {"steer": []}),
    ("complete", "/v1/completions", {"vllm_xargs": {"saesteer": "{}"}}),
    ("respond", "/v1/responses", {"steer": CLAMP}),
    ("stream", "/v1/chat/completions", {"steer": CLAMP}),
    ("stream_complete", "/v1/completions", {"steer": CLAMP}),
]


@both_clients
@pytest.mark.parametrize(("method", "path", "asked"), SILENT)
def test_a_server_that_does_not_say_what_was_applied(
    server: StandIn, method: str, path: str, asked: dict[str, Any], asynchronous: bool
) -> None:
    def without(document: Any) -> Any:
        return {key: value for key, value in document.items() if key != "saesteer"}

    server.answer = json.dumps(without(ANSWERS[path])).encode()
    events = [json.dumps(without(one)) for one in CHUNKS.get(path, [])]
    server.stream = "".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]).encode()
    with pytest.raises(ServerError) as caught:
        call(server, method, "x", asynchronous=asynchronous, **asked)
    assert str(caught.value) == (
        f"the server at {URL}/v1/ answered without saying what was applied: "
        "it runs without saesteer, so nothing was steered"
    )
    assert type(caught.value) is ServerError and caught.value.status == 200
    assert call(server, method, "x", asynchronous=asynchronous), "unsteered requests get what there is"


@both_clients
@pytest.mark.parametrize("method", ["chat", "stream", "models"])
def test_no_server(method: str, asynchronous: bool) -> None:
    def nobody(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    words = [] if method == "models" else ["x"]
    with pytest.raises(ServerError, match=r"the server http://host did not answer") as caught:
        call(nobody, method, *words, asynchronous=asynchronous)
    assert caught.value.status is None


@pytest.mark.parametrize("of", [Client, AsyncClient])
def test_an_address_without_http(of: Any) -> None:
    with pytest.raises(SaesteerError, match="base_url is 'localhost:8000', expected http://HOST:PORT"):
        of("localhost:8000")


def test_address_key_and_model_are_heeded(server: StandIn) -> None:
    for url in (URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"):
        with server.client(url, api_key="secret", model="mine") as client:
            client.chat("x")
            client.chat("x", model="yours")
    assert {path for path, _, _ in server.seen} == {"/v1/chat/completions"}
    assert {headers["Authorization"] for _, headers, _ in server.seen} == {"Bearer secret"}
    assert [body["model"] for _, _, body in server.seen] == ["mine", "yours"] * 4


def test_the_client_needs_no_torch() -> None:
    code = "import sys; import saesteer.client; assert not {'torch', 'numpy', 'vllm'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
