"""The same over HTTP: a real `saesteer serve demo`, a real socket, the OpenAI client and httpx."""

import json
import time
from itertools import product
from typing import Any

import httpx
import pytest

from tests.plugin.asked_http import STEERED, complete, metric, text
from tests.plugin.conftest import BRIDGE
from tests.plugin.serving import events_of

pytestmark = pytest.mark.slow


@pytest.fixture
def model(demo_server: httpx.Client) -> str:
    return str(demo_server.get("/v1/models").json()["data"][0]["id"])


def test_body_field_and_xargs_say_the_same(demo_server: httpx.Client, model: str) -> None:
    plain = text(complete(demo_server, model))
    steered = text(complete(demo_server, model, saesteer=STEERED))
    by_string = text(complete(demo_server, model, vllm_xargs={"saesteer": json.dumps(STEERED)}))
    assert steered == by_string != plain
    assert text(complete(demo_server, model)) == plain


def test_a_stream_begins_as_ever(demo_server: httpx.Client, model: str) -> None:
    """The look at its first event, before HTTP says 200, takes nothing away: all routes, plain and steered."""
    routes = {
        "completions": {"prompt": "x", "max_tokens": 3},
        "chat/completions": {"messages": _turns(), "max_tokens": 3},
        "responses": {"input": "x", "max_output_tokens": 3},
    }
    for path, body in routes.items():
        told = []
        extra: dict[str, Any]
        for extra in ({}, {"saesteer": {"edits": []}}):
            asked = {"model": model, "stream": True, "temperature": 0, **body, **extra}
            with demo_server.stream("POST", f"/v1/{path}", json=asked) as response:
                assert response.status_code == 200
                told.append(_story(events_of(response)))
        assert told[0] == told[1]


def test_a_steered_stream_begins_before_its_first_token(demo_server: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "The bridge. " * 220, "max_tokens": 2, "stream": True, "saesteer": STEERED}
    begin = time.monotonic()
    with demo_server.stream("POST", "/v1/completions", json=body) as response:
        begun = time.monotonic()
        assert response.status_code == 200
        next(response.iter_lines())
    assert time.monotonic() - begun > begun - begin, "the prompt takes longer than its admission"


def _story(events: list[Any]) -> tuple[list[Any], str]:
    """What comes in a stream, in order, and its text; a busy server may put two tokens into one event."""
    kinds = dict.fromkeys(event.get("type", "role" in str(event)) for event in events)
    pieces = [
        choice.get("text") or choice.get("delta", {}).get("content") for e in events for choice in e.get("choices", [])
    ]
    pieces += [event["delta"] for event in events if isinstance(event.get("delta"), str)]
    return list(kinds), "".join(piece or "" for piece in pieces)


BAD: list[tuple[Any, str]] = [
    ({"edits": [{**BRIDGE, "feature": 9216}]}, "saesteer.edits[0].feature"),
    ({"edits": [{**BRIDGE, "dictionary": "demon"}]}, "saesteer.edits[0].dictionary"),
    ({"edits": [{**BRIDGE, "valeu": 1}]}, "saesteer.edits[0].valeu"),
    ({"edits": [{**BRIDGE, "value": "much"}]}, "saesteer.edits[0].value"),
    ({"edits": [{**BRIDGE, "mode": "blend"}]}, "saesteer.edits[0].mode"),
    ({"edits": [{**BRIDGE, "scope": {"positions": [[3, 3]]}}]}, "saesteer.edits[0].scope"),
    ({"edits": [{"op": "ablate", "vector": "refusal", "site": "resid_post.14"}]}, "saesteer.edits[0]"),
    ({"edits": 3}, "saesteer.edits"),
    ("{", "saesteer"),
]


@pytest.mark.parametrize(("spec", "field"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_specs_are_400_and_name_the_field(demo_server: httpx.Client, model: str, spec: Any, field: str) -> None:
    plain = text(complete(demo_server, model))
    queued = metric(demo_server, "vllm:prompt_tokens_total")
    routes = {
        "completions": {"prompt": "x", "max_tokens": 4},
        "chat/completions": {"messages": _turns(), "max_tokens": 4},
        "responses": {"input": "x", "max_output_tokens": 4},
        "messages": {"messages": _turns(), "max_tokens": 4},
    }
    for (path, body), stream in product(routes.items(), (False, True)):
        response = demo_server.post(f"/v1/{path}", json={"model": model, "saesteer": spec, "stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert path == "messages" or str(error["param"]).startswith(field)
        assert field in error["message"]
    assert metric(demo_server, "vllm:prompt_tokens_total") == queued, "the engine received nothing of it"
    assert text(complete(demo_server, model)) == plain


def _turns() -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}]


def test_beam_search_is_refused(demo_server: httpx.Client, model: str) -> None:
    response = complete(demo_server, model, use_beam_search=True, n=2, saesteer=STEERED)
    assert response.status_code == 400
    assert "beam search" in response.json()["error"]["message"]


UNSERVED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/generative_scoring": {"query": "x", "items": ["y"]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/v1/systemone": {"prompt": "x"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", UNSERVED)
def test_a_route_that_drops_the_field_refuses_it(demo_server: httpx.Client, path: str) -> None:
    for more in ({"saesteer": STEERED}, {"vllm_xargs": {"saesteer": json.dumps(STEERED)}}):
        response = demo_server.post(path, json={"model": "demo", **UNSERVED[path], **more})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("saesteer", 400) and error["message"].endswith("[not_served]")
        assert path in error["message"] and "/v1/chat/completions, " in error["message"]
    assert "not_served" not in demo_server.post(path, json={"model": "demo", **UNSERVED[path]}).text


def test_a_path_that_no_route_takes_is_not_found(demo_server: httpx.Client) -> None:
    """As in stock vLLM, whatever its body holds: this server makes no embeddings."""
    response = demo_server.post("/v1/embeddings", json={"model": "demo", "input": "x", "saesteer": STEERED})
    assert response.status_code == 404
