"""Which of Neuronpedia's routes there are, who may call them, and what the small ones answer."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders import load
from saesteer.plugin.http.neuronpedia import keys, routes
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
    row_of,
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


def test_no_other_route_takes_it(client: TestClient) -> None:
    app: Any = client.app
    others = {
        (re.sub(r"{.*?}", "x", one.path), method)
        for one in app.routes
        for method in (getattr(one, "methods", None) or set()) - {"OPTIONS"}
        if one.path.startswith("/v1/") and one.path not in SCHEMA["paths"]
    }
    assert {("/v1/chat/completions", "POST"), ("/v1/saesteer/dictionaries", "GET")} <= others
    for path, method in sorted(others):
        found = TestClient(app).request(method, path, headers={"X-SECRET-KEY": "usual"})
        assert found.status_code == 401, (method, path)


def test_initialize_never_loads(client: TestClient, engine: StandIn) -> None:
    before = len(engine.asked)
    assert client.post("/initialize").json() is None
    found = client.post("/initialize", params={"custom_hf_model_id": "other/model"})
    assert found.status_code == 400 and "keeps the model" in found.json()["error"]
    assert len(engine.asked) == before


def test_what_is_lacking_says_so(client: TestClient) -> None:
    for path in routes.LACKING:
        assert f"/v1/{path} is not served here" in refusal(client, path, {})
    found = client.get("/v1/capabilities").json()
    assert found["endpoints"]["activation_all"] and not found["endpoints"]["activation_attention"]
    assert found["sae_sets"] == ["demo-res", "demo-mlp", "demo", "mlp", "stored"]
    assert (found["token_limit"], found["num_layers"], found["device"]) == (LONGEST, 30, "cpu")
    assert client.get("/v1/steer/health").json() == {"summary": "healthy"}


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


def test_what_is_no_text_is_refused(client: TestClient) -> None:
    for path, body in prompts("a\ud800"):
        headers = {"Content-Type": "application/json"}
        found = client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
        assert found.status_code == 400 and "half of a surrogate pair" in found.json()["error"], path


def test_tokenize(client: TestClient, engine: StandIn) -> None:
    ids, tokens = prompt_of(engine)
    found = ask(client, "tokenize", {"model": "m", "text": TEXT})
    assert found == {"tokens": ids, "tokenStrings": tokens, "prependBos": True}
    bare = ask(client, "tokenize", {"model": "m", "text": TEXT, "prependBos": False})
    assert bare == {"tokens": ids[1:], "tokenStrings": tokens[1:], "prependBos": False}


def test_decoder_rows(client: TestClient) -> None:
    found = ask(client, "util/sae-vector", {"model": "m", "source": "15-demo-res", "index": 7})
    assert found == {"vector": row_of(7).tolist(), "hookName": "blocks.15.hook_resid_post"}
    assert "9215" in refusal(client, "util/sae-vector", {"model": "m", "source": "demo", "index": 9216})
    rows = load(DEMO_SAE).w_dec.float()
    unit = rows / rows.norm(dim=1, keepdim=True)
    order = (unit @ unit[7]).argsort(descending=True, stable=True)[:4].tolist()
    feature = {"model": "m", "source": "demo", "index": 7}
    asked: Any
    for asked in ({"feature": feature}, {"vector": (2 * rows[7]).tolist()}):
        found = ask(
            client, "util/sae-topk-by-decoder-cossim", {"model": "m", "source": "demo", "numResults": 4, **asked}
        )
        near = found["topkDecoderCossimFeatures"]
        assert [one["feature"]["index"] for one in near] == order
        assert near[0]["cosineSimilarity"] == pytest.approx(1.0, abs=1e-5)
    wrong: Any
    for wrong in ({}, {"feature": feature, "vector": [1.0]}, {"vector": [1.0]}):
        body = {"model": "m", "source": "demo", "numResults": 4, **wrong}
        assert "expected" in refusal(client, "util/sae-topk-by-decoder-cossim", body)
