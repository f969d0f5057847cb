"""The memory guard, on made-up numbers and on an app that echoes. Starts no engine."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from saesteer.plugin.http.memory import MemoryGuard, _is_work, used
from saesteer.plugin.http.routes import SERVED
from saesteer.plugin.results import metrics
from tests.plugin.apps import app_of_vllm, ask
from tests.plugin.vllm_routes import POST

GIB = 1 << 30


def machine(patch: pytest.MonkeyPatch, total: int, free: int) -> None:
    patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=total, available=free))


def group(folder: Path, most: object, now: int, files: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{now}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files // 4}\nactive_file {files - files // 4}\n")


@pytest.fixture(autouse=True)
def group_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("saesteer.plugin.http.memory.GROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("most", "now", "files", "share"),
    [
        (2 * GIB, GIB, 0, 0.5),
        (4 * GIB, 4 * GIB, GIB, 0.75),
        (8 * GIB, GIB // 4, 0, 0.0625),
        ("max", GIB, 0, 0.0625),
        (0, GIB, 0, 0.0625),
    ],
    ids=["full", "its files count as free", "the machine is fuller", "no limit", "a limit of 0"],
)
def test_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: object, now: int, files: int, share: float
) -> None:
    machine(monkeypatch, 64 * GIB, 60 * GIB)
    group(tmp_path, most, now, files)
    assert used() == share
    (tmp_path / "memory.stat").unlink()
    assert used() == 0.0625, "without its files, nobody knows"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    machine(monkeypatch, 100 * GIB, 50 * GIB)
    app = FastAPI()

    async def echo() -> str:
        return "served"

    for path in ("/v1/chat/completions", "/v1/messages", "/v1/saesteer/vectors", "/sleep", "/v1/new"):
        app.post(path)(echo)
    app.post("/v1/responses/7/cancel")(echo)
    app.get("/metrics")(echo)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("served")

    app.add_middleware(MemoryGuard, limit=0.9)
    return TestClient(app)


def test_new_work_is_refused_and_taken_again(
    client: TestClient,
    clock: list[float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    refused: list[str] = []
    monkeypatch.setattr(metrics, "memory", seen.append)
    monkeypatch.setattr(metrics, "refused", refused.append)
    assert client.post("/v1/chat/completions").status_code == 200
    machine(monkeypatch, 100 * GIB, 5 * GIB)
    clock[0] += 0.4
    assert client.post("/v1/chat/completions").status_code == 200, "what was seen is half a second old at most"
    clock[0] += 0.1
    answer = client.post("/v1/chat/completions")
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["retry-after"], error["code"]) == (503, "5", 503)
    assert error["message"].startswith("95.0% of the server's memory are in use, expected 90.0% at most")
    assert error["message"].endswith("[memory]")
    assert client.post("/v1/new/").status_code == 503, "a route that is not known"
    inner = client.post("/v1/messages")
    assert (inner.status_code, inner.json()["type"], inner.json()["error"]["type"]) == (
        503,
        "error",
        "overloaded_error",
    )
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    for path in ("/v1/saesteer/vectors", "/sleep", "/v1/responses/7/cancel"):
        assert client.post(path).status_code == 200, "what operates the server may be what helps it"
    clock[0] += 0.5
    assert client.get("/metrics").status_code == 200
    machine(monkeypatch, 100 * GIB, 50 * GIB)
    clock[0] += 0.5
    assert client.post("/v1/chat/completions").status_code == 200
    with client.websocket_connect("/v1/realtime") as socket:
        assert socket.receive_text() == "served"
    assert seen == pytest.approx([0.5, 0.95, 0.95, 0.5]) and refused == ["memory"] * 4
    said = [record.message for record in caplog.records]
    assert [words.rpartition(": ")[2] for words in said] == ["new requests are refused", "requests are taken again"]


WORK = """
    /cohere/v2/chat /generative_scoring /inference/v1/generate /invocations /v1/audio/transcriptions
    /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch /v1/completions /v1/decisions /v1/embeddings
    /v1/messages /v1/rerank /v1/responses /v1/score /v1/systemone /v2/embed /v2/rerank
"""


@pytest.mark.parametrize("version", POST)
def test_what_computes_is_work_and_what_operates_the_server_is_not(version: str) -> None:
    found = {path for path in POST[version] if _is_work({"type": "http", "method": "POST", "path": path})}
    assert found == set(WORK.split()).intersection(POST[version])
    assert set(SERVED) <= found


@pytest.mark.parametrize(("limit", "status"), [(1e-9, 503), (1.0, 400), (None, 400)])
def test_vllms_own_app_has_it_if_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, status: int
) -> None:
    app = app_of_vllm(monkeypatch, additional={"saesteer": {"memory_guard": limit}})
    assert ask(app, "/v1/completions", json={"model": 7}).status_code == status
