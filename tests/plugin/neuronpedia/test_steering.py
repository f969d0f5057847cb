"""Neuronpedia's steering routes: the spec of each request, and what is said so far."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from tests.plugin.neuronpedia.asking import CHAT, COMPLETION, STEER, TEXT, ask, check, given_vector, refusal, row_of
from tests.plugin.neuronpedia.stand_in import LONGEST, WORDS, StandIn


def test_completion(client: TestClient, engine: StandIn) -> None:
    del engine.asked[:]
    found = ask(client, "steer/completion", COMPLETION)
    assert [one["type"] for one in found["outputs"]] == ["STEERED", "DEFAULT"]
    assert all(one["output"] and WORDS.startswith(one["output"]) for one in found["outputs"])
    assert "logprobs" not in found["outputs"][0]
    steered, plain = engine.asked
    assert plain.spec == {"defaults": False}
    assert engine.tokenizer.decode(steered.ids) == engine.tokenizer.bos_token + TEXT
    [edit] = steered.spec["edits"]
    assert (edit["op"], edit["site"], edit["scope"]) == ("add", "resid_post.15", {"positions": [[0, None]]})
    np.testing.assert_allclose(given_vector(edit), 3.0 * row_of(3497), rtol=1e-6)
    assert (steered.params.max_tokens, steered.params.seed, steered.params.temperature) == (4, 16, 0)


def test_a_feature_that_is_steered_twice_counts_twice_and_of_sources_with_addresses(
    client: TestClient, engine: StandIn
) -> None:
    features = [
        {"model": "smollm2", "source": "15-demo-res", "index": 3, "strength": 1.0},
        {"model": "smollm2", "source": "demo", "index": 3, "strength": 2.0},
        {"model": "smollm2", "source": "stored", "index": 4, "strength": -1.0},
    ]
    del engine.asked[:]
    ask(client, "steer/completion", {**COMPLETION, "features": features, "normalizeSteering": True})
    [edit] = engine.asked[0].spec["edits"]
    three, four = (row_of(one) / np.linalg.norm(row_of(one)) for one in (3, 4))
    np.testing.assert_allclose(given_vector(edit), 1.5 * (3 * three - four), atol=1e-6)


def test_vectors(client: TestClient, engine: StandIn) -> None:
    vector = {"steeringVector": [0.5] * 576, "strength": 2, "hook": "blocks.16.hook_resid_pre"}
    del engine.asked[:]
    ask(client, "steer/completion", {**COMPLETION, "features": None, "vectors": [vector]})
    [edit] = engine.asked[0].spec["edits"]
    assert edit["site"] == "resid_pre.16" and given_vector(edit).tolist() == [1.5] * 576
    wrong: Any
    for wrong, words in [
        ({"hook": "blocks.1.nothing"}, "expected a hook such as"),
        ({"hook": "blocks.7.hook_resid_post"}, "where this server has no op"),
        ({"steeringVector": [1.0]}, "expected 576"),
        ({"steeringVector": [1e39] * 576}, "[not_finite]"),
    ]:
        body = {**COMPLETION, "features": None, "vectors": [{**vector, **wrong}]}
        assert words in refusal(client, "steer/completion", body)


def test_what_steering_lacks_is_an_error_of_theirs(client: TestClient, engine: StandIn) -> None:
    feature: Any = STEER["features"][0]
    vectors = [{"steeringVector": [1.0], "strength": 1, "hook": "x"}]
    three = [{**feature, "index": index} for index in range(3)]
    del engine.asked[:]
    changed: Any
    for changed, words in [
        ({"features": [{**feature, "source": "dema"}]}, "did you mean 'demo'"),
        ({"features": [{**feature, "index": 9216}]}, "0 to 9215"),
        ({"features": [{**feature, "index": -1}]}, "expected the number of a feature"),
        ({"features": []}, "expected something to steer with"),
        ({"features": None}, "expected one of the two"),
        ({"vectors": vectors}, "expected one of the two"),
        ({"prompt": "a " * 400}, f"expected at most {LONGEST}"),
        ({"freqPenalty": 9}, "frequency_penalty"),
        ({"steerMethod": "PROJECTION_CAP", "features": three}, "--inline-rows"),
    ]:
        for stream_ in (False, True):
            assert words in refusal(client, "steer/completion", {**COMPLETION, **changed, "stream": stream_})
    assert "persona" in refusal(client, "steer/completion-chat", {**CHAT, "isAssistantAxis": True})
    default = {**COMPLETION, "types": ["DEFAULT"], "features": []}
    assert ask(client, "steer/completion", default)["outputs"][0]["type"] == "DEFAULT"


def events(client: TestClient, path: str, body: Any) -> list[Any]:
    with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        found = [json.loads(one.removeprefix("data: ")) for one in response.iter_lines() if one]
    for one in found:
        check(f"/v1/{path}", one)
    return found


def test_a_stream_has_the_whole_texts_so_far(client: TestClient) -> None:
    found = events(client, "steer/completion", COMPLETION)
    assert found[-1] == ask(client, "steer/completion", COMPLETION)
    texts = [[one["output"] for one in event["outputs"]] for event in found]
    assert len(texts) == 8 and [one[1] for one in texts[:4]] == [""] * 4, "one after the other"
    for before, after in pairwise(texts):
        assert all(later.startswith(earlier) for earlier, later in zip(before, after, strict=True))


def test_a_client_that_leaves_frees_its_request(client: TestClient, engine: StandIn) -> None:
    before = engine.closed, len(engine.asked)
    with client.stream("POST", "/v1/steer/completion", json={**COMPLETION, "stream": True}) as response:
        next(response.iter_lines())
    assert engine.closed - before[0] == len(engine.asked) - before[1]


def test_chat(client: TestClient, engine: StandIn) -> None:
    del engine.asked[:]
    found = ask(client, "steer/completion-chat", {**CHAT, "nLogprobs": 2})
    rendered = engine.tokenizer.apply_chat_template(CHAT["prompt"], tokenize=False, add_generation_prompt=True)
    assert found["input"] == {"raw": rendered, "chatTemplate": CHAT["prompt"]}
    for one in found["outputs"]:
        said = one["raw"].removeprefix(rendered)
        assert said and one["chatTemplate"] == [*CHAT["prompt"], {"role": "assistant", "content": said}]
        first = one["logprobs"][0]
        assert first["logprob"] == -0.5 and first["topLogprobs"][1] == {"token": "x", "logprob": -9999.0}
    asked = engine.asked[0]
    special = [at for at, one in enumerate(asked.ids) if one in engine.tokenizer.all_special_ids]
    spans = asked.spec["edits"][0]["scope"]["positions"]
    assert spans[-1][1] is None and special
    assert not any(lo <= at < (hi or 999) for at in special for lo, hi in spans)
    ask(client, "steer/completion-chat", {**CHAT, "steerSpecialTokens": True})
    assert engine.asked[-2].spec["edits"][0]["scope"] == {"positions": [[0, None]]}
    assert len(events(client, "steer/completion-chat", CHAT)) == 8
