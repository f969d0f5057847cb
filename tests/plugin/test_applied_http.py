"""What answers over HTTP say was applied, from a real `saesteer serve demo`: every route, streams, choices, metrics."""

import json
from typing import Any

import httpx
import pytest

from tests.plugin.asked_http import ALWAYS, STEERED, complete, metric
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS
from tests.plugin.serving import events_of
from tests.plugin.turns import QUESTION

pytestmark = pytest.mark.slow

QUIET = {**OCEAN, "when": {"dictionary": "demo", "feature": 6511, "above": 1e9}}
LATE = {**BRIDGE, "feature": 7081, "scope": {"positions": [[900, None]]}}


def post(server: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(f"/v1/{path}", json={"model": "demo", "temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(server: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "demo", "temperature": 0, "ignore_eos": True, "stream": True, **body}
    with server.stream("POST", f"/v1/{path}", json=body) as response:
        assert response.status_code == 200
        return events_of(response)


def tokens(said: Any) -> list[int]:
    """Edited or cached, for each edit."""
    return [one["tokens_edited"] + one["tokens_cached"] for one in said["applied"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": QUESTION, "max_tokens": 1}),
        ("completions", {"prompt": PROMPTS[0], "max_tokens": 1, "stream": True}),
        ("responses", {"input": PROMPTS[0], "max_output_tokens": 1}),
        ("messages", {"messages": QUESTION, "max_tokens": 1}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_spec_without_effect_is_a_400(demo_server: httpx.Client, path: str, body: dict[str, Any]) -> None:
    generated = {"edits": [{**BRIDGE, "scope": {"generated": True}}]}
    tried: list[tuple[dict[str, Any], str, str]] = [
        ({"saesteer": generated}, "saesteer.edits[0].scope", "empty_scope"),
        ({"saesteer": {"edits": [LATE]}}, "saesteer.edits[0].scope", "empty_scope"),
        ({"saester": STEERED}, "saester", "unknown_field"),
        ({"vllm_xargs": {"steering": json.dumps(STEERED)}}, "vllm_xargs.steering", "unknown_field"),
        ({"chat_template_kwargs": {"saesteer": STEERED}}, "saesteer", "unknown_field"),
        ({"options": STEERED}, "edits", "unknown_field"),
    ]
    for more, param, code in tried:
        response = demo_server.post(f"/v1/{path}", json={"model": "demo", **body, **more})
        assert response.status_code == 400, (more, response.text)
        error = response.json()["error"]
        assert f"[{code}]" in error["message"] and error.get("param", param) == param, (more, error)
    plain = demo_server.post(f"/v1/{path}", json={"model": "demo", **body, "metadata": {"note": "saesteer"}})
    assert plain.status_code == 200, plain.text


def test_each_choice_has_its_own(demo_server: httpx.Client) -> None:
    prompts = [PROMPTS[0], PROMPTS[2]]
    lengths = [post(demo_server, "completions", prompt=one, max_tokens=1)["usage"]["prompt_tokens"] for one in prompts]
    assert lengths[0] != lengths[1]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "temperature": 0.5, "max_tokens": 7, "saesteer": STEERED}
    made = post(demo_server, "completions", **body)
    expected = [length - 1 + 6 for length in lengths for _ in range(2)]
    assert [tokens(choice["saesteer"]) for choice in made["choices"]] == [[one] for one in expected]
    assert made["saesteer"] == made["choices"][0]["saesteer"]
    ends = [one for one in events(demo_server, "completions", **body) if one["choices"][0]["finish_reason"]]
    assert {one["choices"][0]["index"]: tokens(one["saesteer"]) for one in ends} == {
        number: [one] for number, one in enumerate(expected)
    }
    chat = post(
        demo_server, "chat/completions", messages=QUESTION, n=2, temperature=0.5, max_tokens=7, saesteer=STEERED
    )
    assert [tokens(choice["saesteer"]) for choice in chat["choices"]] == [[chat["usage"]["prompt_tokens"] - 1 + 6]] * 2


@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": PROMPTS[0]})],
    ids=["chat", "completions"],
)
def test_a_stream_tells_it_with_the_end_of_a_choice(
    demo_server: httpx.Client,
    path: str,
    asked: dict[str, Any],
    usage: bool,
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    whole = post(demo_server, path, max_tokens=8, saesteer=STEERED, **asked)
    pieces = events(demo_server, path, max_tokens=8, saesteer=STEERED, **asked, **options)
    told = [one for one in pieces if "saesteer" in one]
    assert len(told) == 1 and told[0]["choices"][0]["finish_reason"] == "length"
    assert told[0] is pieces[-2 if usage else -1]
    assert tokens(told[0]["saesteer"]) == tokens(whole["saesteer"])


def test_messages_in_anthropics_form(demo_server: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 9}
    plain, steered = (post(demo_server, "messages", **body, **more) for more in ({}, {"saesteer": STEERED}))
    assert list(steered) == [*plain, "saesteer"] and "saesteer" not in json.dumps(plain)
    assert tokens(steered["saesteer"]) == [steered["usage"]["input_tokens"] - 1 + 8]
    whole = post(demo_server, "chat/completions", messages=QUESTION, max_tokens=9, saesteer=STEERED)
    assert steered["content"][0]["text"] == whole["choices"][0]["message"]["content"] != plain["content"][0]["text"]
    pieces = events(demo_server, "messages", **body, vllm_xargs={"saesteer": json.dumps(STEERED)})
    [told] = [one for one in pieces if "saesteer" in one]
    assert (told["type"], told["delta"]["stop_reason"]) == ("message_delta", "max_tokens")
    assert tokens(told["saesteer"]) == tokens(steered["saesteer"])
    text = "".join(one["delta"].get("text", "") for one in pieces if one["type"] == "content_block_delta")
    assert text == steered["content"][0]["text"]


@pytest.mark.parametrize("prompt", [False, True], ids=["generated", "prompt"])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_rules_end_answers_and_streams(demo_server: httpx.Client, path: str, prompt: bool) -> None:
    scope = {"positions": [[-1, None]]} if prompt else {"generated": True}
    rules = [{"op": "flag", "when": ALWAYS}, {"op": "stop", "when": ALWAYS, "scope": scope}]
    body = {"messages": QUESTION} if "chat" in path else {"prompt": PROMPTS[0]}
    before = [metric(demo_server, f'saesteer_rules_total{{op="{op}"}}') for op in ("flag", "stop")]
    made = post(demo_server, path, max_tokens=9, saesteer={"edits": rules}, **body)
    (choice,), length = made["choices"], made["usage"]["prompt_tokens"]
    assert made["usage"]["completion_tokens"] == (0 if prompt else 2)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "saesteer.edits[1]")
    flags = [{"edit": f"saesteer.edits[{n}]", "position": length - prompt} for n in range(prompt, 2)]
    assert made["saesteer"] == {"applied": [], "flags": flags}
    chunks = [
        one for one in events(demo_server, path, max_tokens=9, saesteer={"edits": rules}, **body) if one["choices"]
    ]
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "saesteer.edits[1]")
    assert chunks[-1]["saesteer"] == made["saesteer"]
    assert all("saesteer" not in one for one in chunks[:-1])
    text = "".join(
        (one["choices"][0].get("text") or one["choices"][0].get("delta", {}).get("content") or "") for one in chunks
    )
    assert text == (choice["text"] if "text" in choice else choice["message"]["content"] or "")
    assert bool(text) != prompt
    after = [metric(demo_server, f'saesteer_rules_total{{op="{op}"}}') for op in ("flag", "stop")]
    assert [late - early for late, early in zip(after, before, strict=True)] == [0 if prompt else 2, 2]


def test_metrics_count_tokens_and_refusals(demo_server: httpx.Client) -> None:
    before = metric(demo_server, "saesteer_edited_tokens_total")
    made = post(demo_server, "completions", prompt=PROMPTS[3], max_tokens=5, saesteer={"edits": [BRIDGE, QUIET]})
    post(demo_server, "completions", prompt=PROMPTS[3], max_tokens=5)
    edited = sum(one["tokens_edited"] for one in made["saesteer"]["applied"])
    assert metric(demo_server, "saesteer_edited_tokens_total") - before == edited > 0
    names = ['saesteer_refusals_total{code="unknown_name"}', 'saesteer_refusals_total{code="not_served"}']
    counts = [metric(demo_server, name) for name in names]
    for code in ("memory", "consumer", "dose", "too_large"):
        assert f'saesteer_refusals_total{{code="{code}"}} ' in demo_server.get("/metrics").text, "from the start"
    assert complete(demo_server, "demo", saesteer={"edits": [{**BRIDGE, "dictionary": "demon"}]}).status_code == 400
    assert complete(demo_server, "demo", use_beam_search=True, n=2, saesteer=STEERED).status_code == 400
    assert [metric(demo_server, name) for name in names] == [counts[0] + 1, counts[1] + 1]
    assert 'saesteer_pool_rows_in_use{site="resid_post.15"} 0.0' in demo_server.get("/metrics").text
    assert "3497" not in "".join(
        line for line in demo_server.get("/metrics").text.splitlines() if line.startswith("saesteer")
    )
