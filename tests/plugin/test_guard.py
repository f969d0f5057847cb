"""The guard in front of routes that drop the field, on vLLM's real app without an engine and on one that echoes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient

from saesteer.plugin import contract
from saesteer.plugin.http import routes
from saesteer.plugin.http.routes import SERVED, Guard
from tests.plugin.apps import app_of_vllm, ask
from tests.plugin.conftest import BRIDGE
from tests.plugin.vllm_routes import POST

STEERED = {"edits": [BRIDGE]}
ASKING: list[Any] = [
    {"saesteer": STEERED},
    {"vllm_xargs": {"saesteer": json.dumps(STEERED)}},
    {"sampling_params": {"extra_args": {"saesteer": STEERED}}},
    {"extra_body": {"saesteer": STEERED}},
    {"extra_body": {"vllm_xargs": {"saesteer": STEERED}}},
    {"extra_body": {"extra_args": {"saesteer": STEERED}}},
    {"extra_args": {"vllm_xargs": {"saesteer": STEERED}}},
    {"metadata": {"saesteer": json.dumps(STEERED)}},
    *({name: {"saesteer": STEERED}} for name in ("metadata", "chat_template_kwargs", "kv_transfer_params")),
    *({name: {"saesteer": STEERED}} for name in ("options", "parameters")),
]
PLAIN: list[Any] = [
    {"saesteer": None},
    {"prompt": "saesteer"},
    {"messages": [{"role": "user", "content": '{"saesteer": {}}'}]},
    {"vllm_xargs": {"other": "saesteer"}},
    {"vllm_xargs": None, "sampling_params": [1]},
    {"metadata": {"note": "saesteer", "saesteer": "on"}, "options": "saesteer"},
    {"metadata": {"edits": []}, "saester": 1},  # such words are of others here
    {"tools": [{"saesteer": {}}], "response_format": {"saesteer": {}}, "structured_outputs": {"json": {"edits": {}}}},
    ["saesteer"],
    "saesteer",
]


def posts(app: Any) -> list[str]:
    return sorted({route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())})


def assert_refused(response: httpx.Response, *words: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "saesteer", 400)
    assert error["message"].startswith("saesteer: ") and error["message"].endswith(" [not_served]")
    assert all(word in error["message"] for word in words)


def test_every_route_of_the_installed_vllm_is_served_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    app = app_of_vllm(monkeypatch)
    found = [path for path in posts(app) if not path.startswith(routes.OURS)]
    assert set(SERVED) <= set(found)
    if contract.vllm_version().startswith("0.32"):
        known = {"/cohere/v2/chat", "/cohere/v2/chat/render", "/start_profile", "/stop_profile", "/v1/decisions"}
        assert set(POST["0.33.0"]) - set(found) == known, "off here, or not there yet"
    for path in set(found) - set(SERVED):
        for body in ASKING:
            assert_refused(ask(app, path.replace("{response_id}", "r"), json=body), path.split("{")[0], *SERVED)


@pytest.mark.parametrize("version", POST)
def test_every_route_of_other_versions_is_served_or_refuses(version: str) -> None:
    """Their routes are a list, read from the sources of that version; the app behind the guard is a stand-in."""
    app = echo()
    assert set(SERVED) <= set(POST[version])
    for path in POST[version]:
        response = ask(app, path, json={"saesteer": STEERED})
        if path in SERVED:
            assert response.json() == {"saesteer": STEERED}
        else:
            assert_refused(response, path)


def echo(**guard: Any) -> Any:
    """An app that answers with the JSON it is sent, or the size of what is no JSON."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def whole(request: Request) -> Any:
        body = await request.body()
        return len(body) if request.headers.get("content-type") == "audio/wav" else json.loads(body)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    app.add_middleware(Guard, **guard)
    return app


@pytest.mark.parametrize("body", PLAIN, ids=map(str, range(len(PLAIN))))
def test_bodies_that_only_speak_of_it_pass(body: Any) -> None:
    assert ask(echo(), "/tokenize", json=body).json() == body


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"saesteer": STEERED}).encode("utf-16"),
        json.dumps({"saesteer": STEERED}).encode("utf-32-le"),
        json.dumps({"saesteer": STEERED}).encode("utf-8-sig"),
        json.dumps({"saesteer": STEERED}).replace("saesteer", "\\u0073aesteer").encode(),
        json.dumps({"saesteer": STEERED}).replace("saesteer", "sae\\u0073tee\\u0072").encode(),
    ],
)
def test_however_the_key_is_written(content: bytes) -> None:
    assert_refused(ask(echo(), "/tokenize", content=content))


@pytest.mark.parametrize("content", [b'{"saesteer": ', b'{"saesteer":' * 100_000, b"saesteer", b""])
def test_what_is_no_json_is_left_to_vllm(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):  # from the app
        ask(echo(), "/tokenize", content=content)


async def pieces(*found: bytes) -> AsyncIterator[bytes]:
    for one in found:
        yield one


def test_a_body_in_pieces() -> None:
    body = json.dumps({"a": 1, "saesteer": STEERED}).encode()
    cut = body.index(b"steer")
    assert_refused(ask(echo(), "/tokenize", content=pieces(body[:cut], b"", body[cut:])))
    assert ask(echo(), "/tokenize", content=pieces(b'{"a"', b"", b": 1}")).json() == {"a": 1}


def test_a_longer_body_is_neither_held_nor_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LIMIT", 64)
    sent = {"a": "x" * 200, "saesteer": STEERED}
    text = json.dumps(sent).encode()
    assert ask(echo(), "/tokenize", content=text).json() == sent
    assert ask(echo(), "/tokenize", content=pieces(text[:60], text[60:120], text[120:])).json() == sent

    async def run() -> list[int]:
        """How much has been asked for each time the app gets a message."""
        taken, seen = 0, []

        async def receive() -> dict[str, Any]:
            nonlocal taken
            taken += 50
            return {"type": "http.request", "body": b"x" * 50, "more_body": taken < 500}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                seen.append(taken)

        scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
        await Guard(app)(scope, receive, lambda _: asyncio.sleep(0))
        return seen

    assert asyncio.run(run()) == [100, 100, *range(150, 500, 50)]


def test_a_socket_is_told_and_its_event_dropped() -> None:
    with TestClient(echo()) as client, client.websocket_connect("/v1/realtime") as socket:
        for event in ({"type": "session.update", "model": "saesteer"}, {"audio": "AAAA"}):
            socket.send_text(json.dumps(event))
            assert socket.receive_json() == event
        socket.send_text(json.dumps({"type": "session.update", "saesteer": STEERED}))
        socket.send_text('{"after": 1}')
        told = socket.receive_json()
        assert (told["type"], told["code"]) == ("error", "not_served") and "/v1/realtime" in told["error"]
        assert socket.receive_json() == {"after": 1}


@pytest.mark.parametrize("why", ["no configuration", "disabled"])
def test_a_server_that_cannot_steer_refuses_on_every_route(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "disabled":
        monkeypatch.setenv("SAESTEER_DISABLE", "1")
    app = app_of_vllm(monkeypatch, additional=None if why == "disabled" else {})
    assert why == "disabled" or not [path for path in posts(app) if path.startswith(routes.OURS)]
    for path in (*SERVED, "/tokenize"):
        for body in ASKING:
            assert_refused(ask(app, path, json=body), "this server was started without saesteer")
