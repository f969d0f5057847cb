"""Who may send requests to vLLM's app: by key, by the host that is named, and what is logged of others. No engine."""

import asyncio
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.plugin.http import access
from saesteer.plugin.http.routes import SERVED
from saesteer.plugin.results import metrics
from saesteer.plugin.results.kept import client as client_of
from tests.plugin.apps import app_of_vllm

KEYS = {"none": {}, "a wrong one": {"Authorization": "Bearer x"}, "another scheme": {"Authorization": "Basic k1"}}
SPEC = {"model": "m", "prompt": "x", "saesteer": {"return": {"features": [{"dictionary": "demo"}]}}}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(metrics, "refused", found.append)
    return found


def open_client(app: Any) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("by", ["flag", "environment"])
@pytest.mark.parametrize("path", [*SERVED, "/invocations/"])
def test_each_route_that_serves_the_field_needs_a_key_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, path: str, by: str, counted: list[str]
) -> None:
    """Whether vLLM's own check covers it or not, and whatever the body has."""
    if by == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "k1")
    flags = ["--api-key", "k2", "k1"] if by == "flag" else []
    client = open_client(app_of_vllm(monkeypatch, *flags, key="admin"))
    for headers in KEYS.values():
        for body in (SPEC, {}):
            found = client.post(path, json=body, headers=headers)
            assert (found.status_code, found.json()) == (401, {"error": "Unauthorized"})
    assert counted == ["wrong_key"] * 2 * len(KEYS)
    for key in ("k1", "admin"):
        assert client.post(path, json={}, headers={"Authorization": f"Bearer {key}"}).status_code in (400, 500)
    assert client.options(path).status_code != 401


@pytest.mark.parametrize("root", ["", "/llm"])
def test_other_routes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    client = open_client(app_at(monkeypatch, "--api-key", "k1", "--root-path", root))
    for path in ("/metrics", "/version", "/saesteer/"):
        assert client.get(root + path).status_code == 200, path
    assert client.post(f"{root}/invocations", json=SPEC).status_code == 401
    assert client.post(f"{root}/tokenize", json={}).status_code not in (401, 403)


def test_a_server_that_cannot_steer_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    client = open_client(app_of_vllm(monkeypatch, "--api-key", "k1", "--host", "127.0.0.1"))
    assert client.post("/invocations", json={}).status_code == 500, "without an engine"


HOME = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000"]
AWAY = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[::2]",
    "",
]
AWAY += ["localhost@evil.example", "evil.example#localhost", "[::1].evil.example", "0.0.0.0", "box.example.evil"]
ROUTES = [("GET", "/saesteer/"), ("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("GET", "/v1/saesteer/vectors")]


def app_at(monkeypatch: pytest.MonkeyPatch, *flags: str, allow: Any = ()) -> Any:
    return app_of_vllm(monkeypatch, *flags, additional={"saesteer": {"allow_hosts": [*allow], "playground": True}})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_server_of_this_machine_alone_answers_no_other_host(
    monkeypatch: pytest.MonkeyPatch, host: str, counted: list[str]
) -> None:
    client = TestClient(app_at(monkeypatch, "--host", host))
    for method, path in ROUTES:
        for name in AWAY:
            found = client.request(method, path, headers={"Host": name})
            error = found.json()["error"]
            assert (found.status_code, error["code"], error["type"]) == (403, "wrong_host", "PermissionDeniedError")
            assert "--allow-host" in error["message"] and "--api-key" in error["message"]
        for name in HOME:
            status = client.request(method, path, headers={"Host": name}).status_code
            assert status != 403 or path == "/v1/saesteer/vectors", "the admin routes are off"
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers={"Host": "evil.example"}):
        pass


@pytest.mark.parametrize(
    "flags",
    [[], ["--host", "0.0.0.0"], ["--host", "box.example"], ["--host", "127.0.0.1", "--api-key", "k"], ["--uds", "/x"]],
    ids=["all addresses", "all", "another", "a key", "a socket"],
)
def test_other_servers_answer_any(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    assert TestClient(app_at(monkeypatch, *flags)).get("/metrics", headers={"Host": "evil.example"}).status_code == 200


def test_the_operator_may_allow_others(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(app_at(monkeypatch, "--host", "127.0.0.1", allow=["Box.Example", "[fd00::1]", "fd00::2"]))
    for name in ("box.example", "BOX.example.:80", "[fd00::1]:80", "[fd00::2]", "localhost"):
        assert client.get("/metrics", headers={"Host": name}).status_code == 200, name
    for name in ("a.box.example", "[fd00::3]"):
        assert client.get("/metrics", headers={"Host": name}).status_code == 403


def test_a_request_without_a_host_comes_from_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at(monkeypatch, "--host", "127.0.0.1")

    async def status() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
            request = client.build_request("GET", "/metrics")
            assert (await client.send(request)).status_code == 403
            del request.headers["host"]
            return (await client.send(request)).status_code

    assert asyncio.run(status()) == 200


def test_what_is_no_host_is_no_setting() -> None:
    for wrong in ("https://box.example", "", 7):
        with pytest.raises(ConfigError, match=r"saesteer.allow_hosts\[0\]: got"):
            SaesteerConfig.from_json({"allow_hosts": [wrong]})


@pytest.mark.parametrize("flags", [[], ["--api-key", "k1"]], ids=["no other key", "a key of clients"])
def test_wrong_keys_are_counted_and_logged_once_for_each_address(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], counted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the admin as well, also where vLLM's own check refuses them before."""
    access._log_once.cache_clear()
    app = app_of_vllm(monkeypatch, *flags, key="admin")
    app.state.saesteer_admin = type("Admin", (), {"key": "admin"})()
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        client = TestClient(app, client=(address, 5))
        for _ in range(2):
            assert client.get("/v1/saesteer/vectors", headers={"Authorization": "Bearer guess"}).status_code == 401
    assert counted == ["wrong_key"] * 6
    said = [record.message for record in caplog.records if record.name == "vllm.saesteer"]
    assert said == [f"a request from {one!r} had no key or a wrong one" for one in ("10.0.0.1", "10.0.0.2")]


def test_clients_are_known_by_their_key_or_else_by_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(*flags: str, key: str) -> str:
        app, found = app_of_vllm(monkeypatch, *flags), list[str]()

        async def look() -> None:
            found.append(client_of.get())

        app.add_api_route("/v1/look", look)
        TestClient(app, client=("10.0.0.1", 5)).get("/v1/look", headers={"Authorization": f"Bearer {key}"})
        return found[0]

    assert [seen("--api-key", "k1", "k2", key=key) for key in ("k1", "k2")] == ["k1", "k2"]
    assert [seen(key=key) for key in ("made up", "another")] == ["10.0.0.1"] * 2, "nobody has given these keys out"
