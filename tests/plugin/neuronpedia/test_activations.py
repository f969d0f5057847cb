"""Neuronpedia's activation routes, against a formula of position and feature."""

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from tests.plugin.neuronpedia.asking import ALL, SINGLE, TEXT, TOPK, ask, prompt_of, refusal
from tests.plugin.neuronpedia.stand_in import StandIn, act, stream


def values_of(engine: StandIn, feature: int) -> list[float]:
    return [float(act(at, 9216)[feature]) for at in range(len(prompt_of(engine)[0]))]


def test_single(client: TestClient, engine: StandIn) -> None:
    feature = int(np.argmax(act(2, 9216)))
    found = ask(client, "activation/single", {**SINGLE, "index": str(feature)})
    _, tokens = prompt_of(engine)
    wanted = values_of(engine, feature)[1:]
    assert found["tokens"] == tokens[1:] and found["tokensIsSpecial"] == [False] * len(wanted)
    assert found["activation"]["values"] == wanted
    assert found["activation"]["maxValue"] == max(wanted) == wanted[found["activation"]["maxValueIndex"]]
    both = ask(client, "activation/single-batch", {**SINGLE, "index": str(feature), "prompts": [TEXT, "a"]})
    assert both["results"][0] == found and len(both["results"]) == 2
    changed: Any
    for changed, words in [
        ({"index": "x"}, "expected the number"),
        ({"index": "9216"}, "9215"),
        ({"source": "nothing"}, "expected one of"),
        ({"index": None}, "both or neither"),
        ({"prompt": ""}, "no token behind BOS"),
        ({"vector": [1.0], "hook": "blocks.3.hook_resid_post"}, "both or neither"),
    ]:
        assert words in refusal(client, "activation/single", {**SINGLE, **changed})


def test_single_with_a_vector(client: TestClient, engine: StandIn) -> None:
    vector = [float(one) for one in np.linspace(-1, 1, 576)]
    body = {"prompt": TEXT, "model": "m", "vector": vector, "hook": "blocks.3.hook_resid_post"}
    found = ask(client, "activation/single", body)
    count = len(prompt_of(engine)[0])
    wanted = [float(stream("resid_post.3", at) @ np.array(vector)) for at in range(count)]
    np.testing.assert_allclose(found["activation"]["values"], wanted, rtol=1e-4, atol=1e-4)
    assert found["tokensIsSpecial"] == [True] + [False] * (count - 1)
    assert "576" in refusal(client, "activation/single", {**body, "vector": [1.0]})
    assert "--reads" in refusal(client, "activation/single", {**body, "hook": "blocks.4.hook_resid_post"})


@pytest.mark.parametrize("results", [1, 7, None])
@pytest.mark.parametrize("sort", [[], [2], [1, 3, 3], [0]])
@pytest.mark.parametrize("ignore", [True, False])
def test_all(client: TestClient, engine: StandIn, results: int | None, sort: list[int], ignore: bool) -> None:
    found = ask(
        client, "activation/all", {**ALL, "numResults": results, "sortByTokenIndexes": sort, "ignoreBos": ignore}
    )
    ids, tokens = prompt_of(engine)
    acts = np.stack([act(at, 9216) for at in range(len(ids))], 1)
    acts[:, 0] *= not ignore
    keyed = acts[:, sort].sum(1) if sort else acts.max(1)
    order = [one for one in np.argsort(-keyed, kind="stable") if keyed[one] > 0][: results or 25]
    assert [one["index"] for one in found["activations"]] == order
    assert found["tokens"] == tokens
    for one in found["activations"]:
        assert one["values"] == acts[one["index"]].tolist() and one["source"] == "15-demo-res"
        assert one["maxValue"] == max(one["values"]) == one["values"][one["maxValueIndex"]]
        assert math.isclose(one["sumValues"], keyed[one["index"]] if sort else 0.0)


def test_all_over_several_sources(client: TestClient, engine: StandIn) -> None:
    before = len(engine.asked)
    found = ask(client, "activation/all", {**ALL, "selectedSources": ["demo", "mlp", "15-demo-res"], "numResults": 6})
    assert [one["source"] for one in found["activations"]][:2] == ["demo"] * 2, "of equal ones, the first source's"
    assert {one["source"] for one in found["activations"]} <= {"demo", "mlp"}, "one dictionary is read once"
    assert len(engine.asked) - before == 2, "two passes, however many sources"
    both = ask(client, "activation/all-batch", {**ALL, "prompts": [TEXT, "a"]})
    assert len(both["results"]) == 2
    assert "expected tokens of the prompt" in refusal(client, "activation/all", {**ALL, "sortByTokenIndexes": [99]})
    assert "expected one of" in refusal(client, "activation/all", {**ALL, "sourceSet": "neurons"})


def test_topk_by_token(client: TestClient, engine: StandIn) -> None:
    _, tokens = prompt_of(engine)
    found = ask(client, "activation/topk-by-token", TOPK)
    assert found["tokens"] == tokens[1:] == [one["token"] for one in found["results"]]
    for at, one in enumerate(found["results"], 1):
        assert (one["tokenPosition"], one["isSpecial"]) == (at, False)
        order = np.argsort(-act(at, 9216), kind="stable")[:3].tolist()
        assert [top["featureIndex"] for top in one["topFeatures"]] == order
    whole = ask(client, "activation/topk-by-token", {**TOPK, "ignoreBos": False, "topK": None})
    assert whole["results"][0]["isSpecial"] and len(whole["results"][0]["topFeatures"]) == 5
    assert whole["tokens"] == tokens
    both = ask(client, "activation/topk-by-token-batch", {**TOPK, "prompts": [TEXT]})
    assert both["results"] == [found]
    assert ask(client, "activation/topk-by-token", {**TOPK, "prompt": ""}) == {"results": [], "tokens": []}
