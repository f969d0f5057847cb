"""Refusals with a status of their own, on an app that refuses as vLLM does. Starts no engine."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.testclient import TestClient

from saesteer.plugin.http import statuses
from saesteer.plugin.http.statuses import Statuses

LARGE = "saesteer.return: may read 9 bytes, expected at most 8 [too_large]"
BODIES: list[tuple[Any, int]] = [
    ({"error": {"message": LARGE, "type": "BadRequestError", "param": "saesteer.return", "code": 400}}, 413),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": LARGE}}, 413),
    ({"error": {"message": "saesteer: no [not_served]", "code": 400}}, 400),
    ({"error": {"message": "too_large", "code": 400}}, 400),
    ({"error": "Unauthorized"}, 400),
    ({"error": {"code": 400}}, 400),
    ([LARGE], 400),
]


FULL = "saesteer.return.consumers.filesystem: a shard could not be written [no_space]"
ILL = "saesteer.return.consumers.judge: consumer 'judge' failed for this request (RuntimeError: ill) [consumer]"


@pytest.mark.parametrize(("message", "status"), [(FULL, 507), (ILL, 500)])
def test_a_fault_of_the_server_is_not_said_to_be_the_clients(message: str, status: int) -> None:
    wrong = {"message": message, "type": "BadRequestError", "param": "x", "code": 400}
    found = client(JSONResponse({"error": wrong}, 400)).get("/")
    assert found.status_code == status
    assert found.json()["error"] == {**wrong, "type": "InternalServerError", "code": status}
    found = client(JSONResponse({"error": {"type": "invalid_request_error", "message": message}}, 400)).get("/")
    assert found.status_code == status and found.json()["error"] == {"type": "api_error", "message": message}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if saesteer had refused with these."""
    monkeypatch.setattr(statuses, "refusals", [LARGE, FULL, ILL])


@pytest.mark.parametrize("message", ["Unknown role: [consumer]", "[no_space]", f"Unknown role: {LARGE}"])
def test_words_of_a_client_are_no_code(message: str) -> None:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    found = client(JSONResponse(body, 400)).get("/")
    assert (found.status_code, found.json()) == (400, body)


def client(answer: Response) -> TestClient:
    app = FastAPI()

    @app.get("/")
    async def root() -> Response:
        return answer

    app.add_middleware(Statuses)
    return TestClient(app)


@pytest.mark.parametrize(("body", "status"), BODIES)
def test_a_refusal_has_the_status_of_its_code(body: Any, status: int) -> None:
    found = client(JSONResponse(body, 400)).get("/")
    assert found.status_code == status
    if status == 400:
        assert found.content == JSONResponse(body).body, "to the byte"
        return
    error = found.json()["error"]
    assert error["message"] == LARGE and error.get("code", status) == status
    assert error.items() >= {key: value for key, value in body["error"].items() if key != "code"}.items()


def test_what_is_no_refusal_passes_as_it_comes() -> None:
    body = json.dumps(BODIES[0][0])
    assert client(JSONResponse(BODIES[0][0])).get("/").status_code == 200
    stream = client(StreamingResponse(iter([body, body]), 400)).get("/")
    assert (stream.status_code, stream.text) == (400, 2 * body)
    assert client(Response("x" * (1 << 17), 400)).get("/").text == "x" * (1 << 17)
    assert client(Response("no JSON [too_large]", 400)).get("/").status_code == 400
    assert client(Response(status_code=400)).get("/").content == b""
