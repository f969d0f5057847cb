"""Which of Neuronpedia's routes there are, who may call them, and what the small ones answer."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from saesteer.plugin.http.neuronpedia import keys
from tests.plugin.apps import app_of_vllm
from tests.plugin.neuronpedia.asking import (
    ALL,
    CHAT,
    COMPLETION,
    SCHEMA,
    SINGLE,
    TEXT,
    TOPK,
    ask,
    check,
    prompt_of,
    refusal,
)
from tests.plugin.neuronpedia.stand_in import LONGEST, StandIn


def test_every_published_route_is_there_and_only_if_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    published = {(path, method.upper()) for path, one in SCHEMA["paths"].items() for method in one}

    def served(config: Any) -> set[tuple[str, str]]:
        app = app_of_vllm(monkeypatch, additional={"saesteer": config})
        return {(one.path, method) for one in app.routes for method in getattr(one, "methods", None) or ()}

    assert published <= served({"neuronpedia": True})
    assert published & served({}) == {("/health", "GET")}
    of_ours = {path for path, _ in published} - {"/health", "/initialize"}
    assert all(any(path == one or path.startswith(one) for one in keys.PATHS) for path in of_ours)


def test_only_these_routes_take_the_other_header(client: TestClient) -> None:
    tokenize, body = "/v1/tokenize", {"model": "m", "text": "a"}
    for headers, status in [
        ({}, 401),
        ({"X-SECRET-KEY": "other"}, 401),
        ({"X-SECRET-KEY": ""}, 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"X-SECRET-KEY": "usual"}, 200),
        ({"x-secret-key": "usual"}, 200),
        ({"Authorization": "Bearer usual"}, 200),
    ]:
        bare = TestClient(client.app)
        response = bare.post(tokenize, json=body, headers=headers)
        assert response.status_code == status, headers
        if status == 401:
            assert isinstance(response.json()["error"], str)
        behind = TestClient(client.app, root_path="/proxy").post(f"/proxy{tokenize}", json=body, headers=headers)
        assert behind.status_code == status, "a proxy puts something in front"


def test_initialize_never_loads(client: TestClient, engine: StandIn) -> None:
    before = len(engine.asked)
    assert client.post("/initialize").json() is None
    found = client.post("/initialize", params={"custom_hf_model_id": "other/model"})
    assert found.status_code == 400 and "keeps the model" in found.json()["error"]
    assert len(engine.asked) == before


def test_wrong_bodies_are_refused_as_published(client: TestClient) -> None:
    for path, body in [
        ("steer/completion", {**COMPLETION, "steerMethod": "OTHER"}),
        ("steer/completion", {**COMPLETION, "types": []}),
        ("steer/completion", {**COMPLETION, "temperature": -1}),
        ("tokenize", {"text": "a"}),
        ("activation/raw", {"prompts": [1]}),
    ]:
        found = ask(client, path, body, 422)
        check(f"/v1/{path}", found, status="422")
    infinite = json.dumps(COMPLETION).replace('"seed": 16', '"seed": 1e999')
    for content in (infinite, "{"):
        found = client.post("/v1/steer/completion", content=content, headers={"Content-Type": "application/json"})
        assert found.status_code == 422
    error = client.post("/v1/tokenize", json={"saesteer": {}, "model": "m", "text": "a"})
    assert error.status_code == 400, "a spec has no place here"


def prompts(text: str) -> list[tuple[str, Any]]:
    """Every kind of request, with this text."""
    return [
        ("tokenize", {"model": "m", "text": text}),
        ("steer/completion", {**COMPLETION, "prompt": text}),
        ("steer/completion-chat", {**CHAT, "prompt": [{"role": "user", "content": text}]}),
        ("activation/single", {**SINGLE, "prompt": text}),
        ("activation/all", {**ALL, "prompt": text}),
        ("activation/topk-by-token", {**TOPK, "prompt": text}),
        ("activation/source", {"model": "m", "source": "demo", "prompts": ["a", text]}),
        ("activation/raw", {"prompts": ["a", text], "layers": [3]}),
    ]


def test_what_no_prompt_can_be_is_refused_before_it_is_tokenized(client: TestClient, engine: StandIn) -> None:
    most = LONGEST * max(map(len, engine.tokenizer.get_vocab()))
    encoded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer, "encode", lambda text, **_: encoded.append(text))
        patch.setattr(engine.tokenizer, "apply_chat_template", lambda *_, **__: encoded.append("a chat"))
        for path, body in prompts("x" * (most + 1)):
            assert f"characters, expected at most {most}" in refusal(client, path, body), path
        half = {"prompts": ["x" * (most // 2 + 1)] * 2, "layers": [3]}
        assert f"prompts: has {2 * (most // 2 + 1)} characters" in refusal(client, "activation/raw", half)
        assert not encoded
    for path, body in prompts("x" * (most - 1)):
        if path != "steer/completion-chat":
            assert "tokens, expected at most" in refusal(client, path, body), path
    longer = {**CHAT, "prompt": [{"role": "user", "content": "x" * most}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer, "encode", lambda text, **_: encoded.append(text))
        assert "characters" in refusal(client, "steer/completion-chat", longer), "the template adds to it"
        assert not encoded


def test_tokenize(client: TestClient, engine: StandIn) -> None:
    ids, tokens = prompt_of(engine)
    found = ask(client, "tokenize", {"model": "m", "text": TEXT})
    assert found == {"tokens": ids, "tokenStrings": tokens, "prependBos": True}
    bare = ask(client, "tokenize", {"model": "m", "text": TEXT, "prependBos": False})
    assert bare == {"tokens": ids[1:], "tokenStrings": tokens[1:], "prependBos": False}
