"""Bodies that the admin routes refuse by their fields alone, on vLLM's app. Starts no engine."""

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from saesteer.plugin.http.entries import VectorBody
from tests.plugin.apps import app_of_vllm

HEADERS = {"Authorization": "Bearer other", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        app: Any = app_of_vllm(patch, key="other")
        app.state.saesteer_admin = Namespace(names=None, engine=None, key="other")
        yield TestClient(app, headers=HEADERS)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    st.text(st.characters(exclude_categories=()), max_size=300).filter(lambda name: name not in VectorBody.model_fields)
)
@example("k" * 3_000_000)
@example("\ud800")
@example("body")
@example("path")
def test_a_field_that_does_not_exist_is_named_in_short(client: TestClient, name: str) -> None:
    content = json.dumps({"name": "a", "vector": [1], name: 1})
    answer = client.post("/v1/saesteer/vectors", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unknown_field")
    assert error["param"].isprintable() and len(answer.content) < 5000 and error["param"] in error["message"]
    if name in ("body", "path"):
        assert error["param"] == name


@pytest.mark.parametrize("body", ["[]", "1", "{", '{"name": "a", "vector": [1]'])
def test_what_is_no_object_is_called_so(client: TestClient, body: str) -> None:
    error = client.post("/v1/saesteer/vectors", content=body).json()["error"]
    assert "the body is not a JSON object" in error["message"] and error["param"] is None
