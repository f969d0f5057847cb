"""Numbers that JSON has not, on Neuronpedia's routes: in what a client sends, and in what the model makes."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from tests.plugin.neuronpedia.asking import ALL, CHAT, COMPLETION, SINGLE, TEXT, TOPK
from tests.plugin.neuronpedia.stand_in import StandIn

FEATURE: dict[str, Any] = COMPLETION["features"][0]
VECTOR = {"steeringVector": [0.5] * 576, "strength": 2.0, "hook": "blocks.16.hook_resid_pre"}
HOOK: dict[str, Any] = {"prompt": TEXT, "model": "m", "vector": [1.0] * 576, "hook": "blocks.3.hook_resid_post"}
COSSIM: dict[str, Any] = {"model": "m", "source": "demo", "numResults": 3}
RAW: dict[str, Any] = {"prompts": [TEXT], "layers": [3]}
# A body with one number that is replaced: path, body.
NUMBERS: dict[str, tuple[str, Any]] = {
    "strength": ("steer/completion", {**COMPLETION, "features": [{**FEATURE, "strength": "X"}]}),
    "strengthMultiplier": ("steer/completion", {**COMPLETION, "strengthMultiplier": "X"}),
    "temperature": ("steer/completion", {**COMPLETION, "temperature": "X"}),
    "freqPenalty": ("steer/completion-chat", {**CHAT, "freqPenalty": "X"}),
    "seed": ("steer/completion", {**COMPLETION, "seed": "X"}),
    "nCompletionTokens": ("steer/completion", {**COMPLETION, "nCompletionTokens": "X"}),
    "steeringVector": (
        "steer/completion",
        {**COMPLETION, "features": None, "vectors": [{**VECTOR, "steeringVector": [*[0.5] * 575, "X"]}]},
    ),
    "vector of single": ("activation/single", {**HOOK, "vector": [*[1.0] * 575, "X"]}),
    "vector of cossim": ("util/sae-topk-by-decoder-cossim", {**COSSIM, "vector": [*[1.0] * 575, "X"]}),
    "sortByTokenIndexes": ("activation/all", {**ALL, "sortByTokenIndexes": ["X"]}),
    "topK": ("activation/topk-by-token", {**TOPK, "topK": "X"}),
}


def strict(text: str) -> Any:
    """As JavaScript reads JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "1" * 5000])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_not_finite_is_refused(client: TestClient, name: str, number: str) -> None:
    path, body = NUMBERS[name]
    text = json.dumps(body).replace('"X"', number)
    response = client.post(f"/v1/{path}", content=text, headers={"Content-Type": "application/json"})
    large = number.startswith("10") and name in ("nCompletionTokens", "topK")  # whole numbers have no largest one
    assert response.status_code == 200 if large else 400 <= response.status_code < 500, response.text
    found = strict(response.text)
    assert large or "error" in found or "detail" in found


READS: list[tuple[str, dict[str, Any]]] = [
    ("activation/single", SINGLE),
    ("activation/single", HOOK),
    ("activation/single-batch", {**SINGLE, "prompts": [TEXT, "a b"]}),
    ("activation/all-batch", {**ALL, "prompts": ["a b", TEXT]}),
    ("activation/all", ALL),
    ("activation/all", {**ALL, "sortByTokenIndexes": [3, 4]}),
    ("activation/topk-by-token", TOPK),
    ("activation/source", {"model": "m", "source": "15-demo-res", "prompts": [TEXT]}),
    ("activation/raw", RAW),
    ("steer/completion", {**COMPLETION, "nLogprobs": 2}),
    ("steer/completion-chat", {**CHAT, "nLogprobs": 2}),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("path", "body"), READS, ids=range(len(READS)))
def test_what_the_model_makes_that_is_not_finite_is_an_error_of_theirs(
    client: TestClient, engine: StandIn, path: str, body: Any, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "spoilt", value)
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert "gives NaN or infinity in" in strict(response.text)["error"]


def test_a_stream_ends_with_the_error(client: TestClient, engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**COMPLETION, "nLogprobs": 2, "stream": True, "types": ["DEFAULT", "STEERED"]}
    with client.stream("POST", "/v1/steer/completion", json=body) as response:
        lines = response.iter_lines()
        strict(next(one for one in lines if one).removeprefix("data: "))
        monkeypatch.setattr(engine, "spoilt", float("nan"))
        found = [strict(one.removeprefix("data: ")) for one in lines if one]
    assert "gives NaN or infinity in logprobs" in found[-1]["error"]
