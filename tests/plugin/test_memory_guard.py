"""The memory guard, on made-up files of Linux and on an app that echoes. Starts no engine."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def machine(root: Path, total: int, free: int) -> Path:
    write(root / "proc/meminfo", f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {free >> 10} kB\nX:\n")
    return root


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(text))


def group(folder: Path, most: object, now: int, files: int) -> None:
    write(folder / "memory.max", most)
    write(folder / "memory.current", now)
    write(folder / "memory.stat", f"anon 5\ninactive_file {files // 4}\nactive_file {files - files // 4}\n")


def test_a_machine(tmp_path: Path) -> None:
    assert used(machine(tmp_path, 8 * GIB, 2 * GIB)) == 0.75


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert used(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal: many kB\n")
    assert used(tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_this_machine() -> None:
    assert 0 < (used() or 0) < 1


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64)), max_size=4), st.integers(0, 8))
def test_the_fullest_group_counts(tmp_path_factory: Any, groups: list[tuple[int, int, int]], free: int) -> None:
    """Each group of the path may have a limit, and the machine has one."""
    root = machine(tmp_path_factory.mktemp("root"), 8 * GIB, free * GIB)
    folder, shares = root / "sys/fs/cgroup", [1 - free / 8]
    for most, now, files in groups:
        folder /= "inner"
        group(folder, most * GIB, now * GIB, files * GIB)
        shares.append(max(0, now - files) / most)
    write(root / "proc/self/cgroup", f"0::/{folder.relative_to(root / 'sys/fs/cgroup')}\n")
    assert used(root) == pytest.approx(max(shares))


def test_a_container_sees_its_group_at_the_top(tmp_path: Path) -> None:
    machine(tmp_path, 64 * GIB, 60 * GIB)
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/docker-12.scope\n")
    group(tmp_path / "sys/fs/cgroup", 2 * GIB, GIB, 0)
    assert used(tmp_path) == 0.5
    group(tmp_path / "sys/fs/cgroup", "max", GIB, 0)
    assert used(tmp_path) == 0.0625


def test_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/memory/docker/12"
    write(tmp_path / "proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/docker/12\n")
    for name, number in (("limit_in_bytes", 4 * GIB), ("usage_in_bytes", 3 * GIB)):
        write(folder / f"memory.{name}", number)
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}\n")
    assert used(tmp_path) == 0.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
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

    app.add_middleware(MemoryGuard, limit=0.9, root=machine(tmp_path, 100 * GIB, 50 * GIB))
    return TestClient(app)


def test_new_work_is_refused_and_taken_again(
    client: TestClient,
    tmp_path: Path,
    clock: list[float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    refused: list[str] = []
    monkeypatch.setattr(metrics, "memory", seen.append)
    monkeypatch.setattr(metrics, "refused", refused.append)
    assert client.post("/v1/chat/completions").status_code == 200
    machine(tmp_path, 100 * GIB, 5 * GIB)
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
    machine(tmp_path, 100 * GIB, 50 * GIB)
    clock[0] += 0.5
    assert client.post("/v1/chat/completions").status_code == 200
    with client.websocket_connect("/v1/realtime") as socket:
        assert socket.receive_text() == "served"
    assert seen == pytest.approx([0.5, 0.95, 0.95, 0.5]) and refused == ["memory"] * 4
    said = [record.message for record in caplog.records]
    assert [words.rpartition(": ")[2] for words in said] == ["new requests are refused", "requests are taken again"]


def test_one_warning_where_memory_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    app = FastAPI()
    app.post("/v1/completions")(lambda: "served")
    app.add_middleware(MemoryGuard, limit=0.1, root=tmp_path)
    client = TestClient(app)
    for _ in range(3):
        assert client.post("/v1/completions").status_code == 200
        clock[0] += 1
    assert [record.message for record in caplog.records] == [
        "--memory-guard has no effect: the memory in use cannot be read on this system"
    ]


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(("limit", "status"), [(1e-9, 503), (1.0, 400), (None, 400)])
def test_vllms_own_app_has_it_if_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, status: int
) -> None:
    app = app_of_vllm(monkeypatch, additional={"saesteer": {"memory_guard": limit}})
    assert ask(app, "/v1/completions", json={"model": 7}).status_code == status
