"""The same over HTTP: a real `saesteer serve demo`, a real socket, the OpenAI client and httpx."""

import json
import time
from itertools import product
from typing import Any

import httpx
import pytest

from tests.plugin.asked_http import STEERED, complete, metric, text
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS
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


def test_chat_and_responses_and_the_openai_client(demo_server: httpx.Client, model: str) -> None:
    from openai import OpenAI

    base = str(demo_server.base_url).rstrip("/")
    turns: Any = [{"role": "user", "content": "Who are you?"}]
    answers = []
    with OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        for extra in ({}, {"saesteer": STEERED}):
            made = client.chat.completions.create(
                model=model, messages=turns, max_tokens=24, temperature=0, extra_body=extra
            )
            answers.append(made.choices[0].message.content)
            other = client.responses.create(
                model=model, input="Who are you?", max_output_tokens=24, temperature=0, extra_body=extra
            )
            answers.append(other.output_text)
    assert answers[0] != answers[2] and answers[1] != answers[3]
    assert "bridge" in str(answers[2]).lower() and "bridge" in str(answers[3]).lower()


def test_streaming_is_steered(demo_server: httpx.Client, model: str) -> None:
    whole = text(complete(demo_server, model, saesteer=STEERED))
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with demo_server.stream("POST", "/v1/completions", json={**body, "stream": True, "saesteer": STEERED}) as response:
        pieces = [event["choices"][0]["text"] for event in events_of(response)]
    assert "".join(pieces) == whole


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


def test_two_prompts_and_n_of_two_are_all_steered(demo_server: httpx.Client, model: str) -> None:
    one, other = (text(complete(demo_server, model, prompt, saesteer=STEERED)) for prompt in PROMPTS[:2])
    # Greedy with n = 2 is refused by some versions; this is nearly greedy, so the first words are compared.
    both = complete(demo_server, model, PROMPTS[:2], saesteer=STEERED, n=2, temperature=1e-3).json()["choices"]
    assert [choice["text"][:8] for choice in both] == [one[:8], one[:8], other[:8], other[:8]]
    plain = complete(demo_server, model, PROMPTS[:2]).json()["choices"]
    assert plain[0]["text"][:8] != one[:8] and plain[1]["text"][:8] != other[:8]


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
    (None, "saesteer"),
]


@pytest.mark.parametrize(("spec", "field"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_specs_are_400_and_name_the_field(demo_server: httpx.Client, model: str, spec: Any, field: str) -> None:
    plain = text(complete(demo_server, model))
    queued = metric(demo_server, "vllm:prompt_tokens_total")
    routes = {
        "completions": {"prompt": "x", "max_tokens": 4},
        "chat/completions": {"messages": _turns(), "max_tokens": 4},
        "responses": {"input": "x", "max_output_tokens": 4},
    }
    for (path, body), stream in product(routes.items(), (False, True)):
        response = demo_server.post(f"/v1/{path}", json={"model": model, "saesteer": spec, "stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert str(error["param"]).startswith(field)
        assert field in error["message"]
    assert metric(demo_server, "vllm:prompt_tokens_total") == queued, "the engine received nothing of it"
    assert text(complete(demo_server, model)) == plain


def _turns() -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}]


def test_beam_search_is_refused(demo_server: httpx.Client, model: str) -> None:
    response = complete(demo_server, model, use_beam_search=True, n=2, saesteer=STEERED)
    assert response.status_code == 400
    assert "beam search" in response.json()["error"]["message"]


def test_many_at_once_over_the_socket(demo_server: httpx.Client, model: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    specs: list[Any] = [None, STEERED, {"edits": [OCEAN]}]
    plain = [text(complete(demo_server, model, **({"saesteer": spec} if spec else {}))) for spec in specs]
    assert len(set(plain)) == 3
    with ThreadPoolExecutor(9) as pool:
        jobs = [
            pool.submit(complete, demo_server, model, **({"saesteer": specs[n % 3]} if specs[n % 3] else {}))
            for n in range(18)
        ]
    # bf16 rounds otherwise in a larger batch, so the first words are compared, not all of them.
    for n, job in enumerate(jobs):
        assert text(job.result())[:4] == plain[n % 3][:4]


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
