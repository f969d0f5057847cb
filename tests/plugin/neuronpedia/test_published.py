"""Whatever the published schema allows is answered as it says; and, slow, what the real engine answers."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pybase64 import b64decode
from schemathesis.core import NotSet

from saesteer.commands.embedded import BRIDGE
from tests.plugin.neuronpedia.asking import ALL, CHAT, COMPLETION, SCHEMA, SINGLE, TEXT, TOPK, check, row_of

CALLS = [(path, method) for path, one in SCHEMA["paths"].items() for method in one if path != "/health"]
# What must exist here, or be left out, for an answer.
REAL: dict[str, Any] = {
    "source": "demo",
    "sourceSet": "demo-res",
    "selectedSources": [],
    "hook": "blocks.3.hook_resid_post",
    "sortByTokenIndexes": [],
    "layers": [3],
    "hookPoint": "residual_stream",
    "type": "final_output_token",
    "freqPenalty": 0.5,
    "temperature": 0.5,
    "isAssistantAxis": False,
    "stream": False,
}


def fixed(body: Any, draw: Any) -> Any:
    """A body in which what must exist here often does, and of two that exclude each other there is one."""
    if isinstance(body, list):
        return [fixed(one, draw) for one in body]
    if not isinstance(body, dict):
        return body
    real = REAL | {"index": str(BRIDGE) if isinstance(body.get("index"), str) else BRIDGE}
    found = {key: real[key] if key in real and draw(often) else fixed(value, draw) for key, value in body.items()}
    if found.get("stream"):
        found["stream"] = False
    if "steerMethod" in found and draw(often):
        found |= {"vectors": None, "features": [{"model": "m", "source": "demo", "index": 3, "strength": 2.0}]}
    if "index" in found and "prompt" in found and draw(often):
        found |= {"vector": None, "hook": None, "index": str(BRIDGE)}
    return found


often = st.sampled_from([True, True, True, True, False])


@pytest.mark.parametrize(("path", "method"), CALLS, ids=str)
@settings(max_examples=20, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_whatever_the_schema_allows_is_answered_as_it_says(
    client: TestClient, path: str, method: str, data: Any
) -> None:
    schema = schemathesis.openapi.from_dict(SCHEMA)
    case = data.draw(schema[path][method.upper()].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    body = None if isinstance(case.body, NotSet) else fixed(case.body, data.draw)
    response = client.request(method.upper(), path, json=body, params=dict(case.query or {}))
    assert response.status_code in (200, 400, 422), response.text
    found = response.json()
    if response.status_code == 400:
        assert list(found) == ["error"] and isinstance(found["error"], str)
    else:
        check(path, found, method, str(response.status_code))


@pytest.mark.slow
def test_the_real_engine(demo_server: Any) -> None:
    """Steering is that of a spec, token by token, and vLLM's health check stays its own."""
    with httpx.Client(base_url=str(demo_server.base_url), timeout=120) as client:
        text = "The Golden Gate Bridge is"
        asked = {**COMPLETION, "prompt": text, "nCompletionTokens": 12, "strengthMultiplier": 6}
        found = client.post("/v1/steer/completion", json=asked).json()
        steered, plain = (one["output"] for one in found["outputs"])
        assert steered != plain
        row = (12.0 * row_of(BRIDGE)).astype(np.float32).tolist()
        edit = {"op": "add", "vector": row, "site": "resid_post.15", "scope": {"positions": [[0, None]]}}
        body = {"model": "demo", "prompt": f"<|im_start|>{text}", "add_special_tokens": False, "temperature": 0}
        for wanted, spec in [(plain, {"defaults": False}), (steered, {"edits": [edit]})]:
            answer = client.post("/v1/completions", json={**body, "max_tokens": 12, "saesteer": spec}).json()
            assert answer["choices"][0]["text"] == wanted
        with client.stream("POST", "/v1/steer/completion", json={**asked, "stream": True}) as response:
            *_, last = (json.loads(one.removeprefix("data: ")) for one in response.iter_lines() if one)
        assert last == found
        chat = client.post("/v1/steer/completion-chat", json=CHAT).json()
        assert [len(one["chatTemplate"]) for one in chat["outputs"]] == [2, 2]
        health = client.get("/health")
        assert (health.status_code, health.content) == (200, b""), "vLLM's own"


@pytest.mark.slow
def test_reads_are_the_read_outs(demo_server: Any) -> None:
    """What the activation routes answer is what a spec reads on the same tokens."""
    scope = {"prompt": True}
    returns = {
        "features": [{"dictionary": "demo", "top_k": 1024, "scope": scope}],
        "activations": [{"site": "resid_post.15", "scope": scope}],
    }
    prompt = {"prompt": f"<|im_start|>{TEXT}", "add_special_tokens": False, "max_tokens": 1, "model": "demo"}
    with httpx.Client(base_url=str(demo_server.base_url), timeout=120) as client:

        def asked(path: str, body: Any) -> Any:
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        report = asked("completions", {**prompt, "saesteer": {"defaults": False, "return": returns}})["saesteer"]
        rows = [{int(index): value for index, value in row["top"]} for row in report["features"][0]["rows"]]
        stored = report["activations"][0]
        stream = np.frombuffer(b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])
        assert len(rows) == len(stream) > 4 and all(rows)

        single = asked("activation/single", {**SINGLE, "source": "demo", "index": str(BRIDGE)})
        assert single["activation"]["values"] == close([row.get(BRIDGE, 0.0) for row in rows[1:]])
        vector = {**SINGLE, "source": None, "index": None, "vector": row_of(BRIDGE).tolist()}
        products = asked("activation/single", {**vector, "hook": "blocks.15.hook_resid_post"})["activation"]["values"]
        assert products == close((stream @ row_of(BRIDGE)).tolist())

        by_token = asked("activation/topk-by-token", {**TOPK, "ignoreBos": False, "topK": 20})
        for token, row in zip(by_token["results"], rows, strict=True):
            told = {one["featureIndex"]: one["activationValue"] for one in token["topFeatures"]}
            assert told == close(dict([*row.items()][:20]))

        every = asked("activation/all", {**ALL, "sourceSet": "demo", "ignoreBos": False, "numResults": 50})
        largest = {index: max(row.get(index, 0.0) for row in rows) for index in {one for row in rows for one in row}}
        assert [one["maxValue"] for one in every["activations"]] == close(sorted(largest.values())[:-51:-1])
        for one in every["activations"]:
            assert one["values"] == close([row.get(one["index"], 0.0) for row in rows])

        source = asked("activation/source", {"model": "m", "source": "demo", "prompts": [TEXT]})["results"][0]
        told = {(int(one), at): value for one, pairs in source["activeFeatures"].items() for at, value in pairs}
        active = {(index, at): value for at, row in enumerate(rows) for index, value in row.items() if at}
        assert told == pytest.approx(active, abs=6e-4), "rounded to three decimals"

        raw = asked("activation/raw", {"prompts": [TEXT], "layers": [15]})["results"][0]
        assert raw["activations"][0]["values"][0] == close(stream[-1].tolist())


def close(numbers: Any) -> Any:
    """The same tokens in another batch may be rounded otherwise."""
    return pytest.approx(numbers, rel=1e-4, abs=1e-4)
