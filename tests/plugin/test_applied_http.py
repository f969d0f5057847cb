"""What answers over HTTP say was applied, from a real `saesteer serve demo`: every route, streams, choices, metrics."""

import json
from typing import Any

import httpx
import pytest

from saesteer.client.client import Client
from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders import load
from tests.plugin.asked_http import ALWAYS, STEERED, complete, metric
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS
from tests.plugin.serving import events_of
from tests.plugin.turns import QUESTION

pytestmark = pytest.mark.slow

MAX_ACT = float(load(DEMO_SAE).max_act[BRIDGE["feature"]])  # type: ignore[index]

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


def test_a_chat_says_what_was_applied(demo_server: httpx.Client) -> None:
    spec = {"edits": [BRIDGE, QUIET, {**OCEAN, "feature": 546, "scope": {"generated": True}}]}
    made = post(demo_server, "chat/completions", messages=QUESTION, max_tokens=9, saesteer=spec)
    length = made["usage"]["prompt_tokens"]
    bridge, quiet, generated = made["saesteer"]["applied"]
    assert len(bridge.pop("version")) == 16
    assert bridge == {
        "edit": "saesteer.edits[0]", "op": "clamp", "site": "resid_post.15", "dictionary": "demo", "feature": 3497,
        "mode": "set", "value": 2.0, "unit": "max_act", "times_max_act": 2.0, "max_act": MAX_ACT, "max_act_by": "file",
        "positions": [[1, None]], "tokens_edited": length - 1 + 8, "tokens_cached": 0,
    }  # fmt: skip
    assert quiet["tokens_edited"] == 0, "a gate that never fires"
    assert (generated["positions"], generated["tokens_edited"]) == ([[length, None]], 8)
    assert "saesteer" not in made["choices"][0], "one choice: it stands on top"
    assert made["kv_transfer_params"] is None


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


def test_completions_of_one_prompt_and_of_a_string(demo_server: httpx.Client) -> None:
    one = post(demo_server, "completions", prompt=PROMPTS[1], max_tokens=6, saesteer=STEERED)
    assert tokens(one["saesteer"]) == [one["usage"]["prompt_tokens"] - 1 + 5]
    by_string = post(
        demo_server, "completions", prompt=PROMPTS[1], max_tokens=6, vllm_xargs={"saesteer": json.dumps(STEERED)}
    )
    assert tokens(by_string["saesteer"]) == tokens(one["saesteer"])
    assert post(demo_server, "completions", prompt="x", max_tokens=2, saesteer={"edits": []})["saesteer"] == {
        "applied": []
    }


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


def test_a_stop_string_that_the_front_end_finds(demo_server: httpx.Client) -> None:
    """The engine does not know that this output was the last one."""
    whole = post(demo_server, "completions", prompt=PROMPTS[1], max_tokens=12, saesteer=STEERED)["choices"][0]["text"]
    stop = whole.split()[2]
    body: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 12, "stop": [stop], "saesteer": STEERED}
    made = post(demo_server, "completions", **body)
    assert made["choices"][0]["finish_reason"] == "stop"
    usage = made["usage"]
    assert tokens(made["saesteer"]) == [usage["prompt_tokens"] - 1 + usage["completion_tokens"] - 1]
    assert tokens(events(demo_server, "completions", **body)[-1]["saesteer"]) == tokens(made["saesteer"])


def test_responses_whole_and_streamed(demo_server: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "Who are you?", "max_output_tokens": 9, "saesteer": STEERED}
    made = post(demo_server, "responses", **body)
    expected = [made["usage"]["input_tokens"] - 1 + 8]
    assert tokens(made["saesteer"]) == expected
    *before, last = events(demo_server, "responses", **body)
    assert last["type"] in ("response.completed", "response.incomplete")  # the second from vLLM 0.33 on, at the limit
    assert tokens(last["response"]["saesteer"]) == expected
    assert "tokens_edited" not in json.dumps(before)
    assert "saesteer" not in post(demo_server, "responses", input="x", max_output_tokens=2)


def test_a_batch_says_it_for_each_conversation(demo_server: httpx.Client) -> None:
    batch = {"messages": [QUESTION, [{"role": "user", "content": "Tell me of the sea."}]], "max_tokens": 7}
    lengths = [
        post(demo_server, "chat/completions", messages=one, max_tokens=1)["usage"]["prompt_tokens"]
        for one in batch["messages"]  # type: ignore[attr-defined]
    ]
    alone = post(demo_server, "chat/completions", messages=QUESTION, max_tokens=7, saesteer=STEERED)
    for more in ({"saesteer": STEERED}, {"vllm_xargs": {"saesteer": json.dumps(STEERED)}}):
        made = post(demo_server, "chat/completions/batch", **batch, **more)
        assert [tokens(one["saesteer"]) for one in made["choices"]] == [[length - 1 + 6] for length in lengths]
        assert made["saesteer"] == made["choices"][0]["saesteer"]
        first = made["choices"][0]["message"]["content"]
        assert first[:8] == alone["choices"][0]["message"]["content"][:8], "bf16 rounds otherwise in a larger batch"
    assert "saesteer" not in json.dumps(post(demo_server, "chat/completions/batch", **batch))


def test_messages_in_anthropics_form(demo_server: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 9}
    plain, steered = (post(demo_server, "messages", **body, **more) for more in ({}, {"saesteer": STEERED}))
    assert list(steered) == [*plain, "saesteer"] and "saesteer" not in json.dumps(plain)
    assert tokens(steered["saesteer"]) == [steered["usage"]["input_tokens"] - 1 + 8]
    assert steered["saesteer"]["applied"][0]["positions"] == [[1, None]]
    whole = post(demo_server, "chat/completions", messages=QUESTION, max_tokens=9, saesteer=STEERED)
    assert steered["content"][0]["text"] == whole["choices"][0]["message"]["content"] != plain["content"][0]["text"]
    by_string = post(demo_server, "messages", **body, vllm_xargs={"saesteer": json.dumps(STEERED)})
    assert by_string["content"] == steered["content"] and by_string["saesteer"].keys() == {"applied"}
    for more in ({"saesteer": STEERED}, {"vllm_xargs": {"saesteer": json.dumps(STEERED)}}):
        pieces = events(demo_server, "messages", **body, **more)
        told = [one for one in pieces if "saesteer" in one]
        assert [one["type"] for one in told] == ["message_delta"] and told[0]["delta"]["stop_reason"] == "max_tokens"
        assert tokens(told[0]["saesteer"]) == tokens(steered["saesteer"])
        text = "".join(one["delta"].get("text", "") for one in pieces if one["type"] == "content_block_delta")
        assert text == steered["content"][0]["text"]
    quiet = events(demo_server, "messages", **body)
    assert "saesteer" not in json.dumps(quiet)
    assert [one["type"] for one in quiet][-2:] == ["message_delta", "message_stop"]


def test_what_is_wrong_with_messages_is_a_400(demo_server: httpx.Client) -> None:
    wrong = {"edits": [{**BRIDGE, "feature": 9216}]}
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 9, "saesteer": wrong}
    for stream in (False, True):
        response = demo_server.post("/v1/messages", json={**body, "stream": stream})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith("saesteer.edits[0].feature: ") and message.endswith("[out_of_range]")


def test_sagemakers_route_hands_it_on(demo_server: httpx.Client) -> None:
    body = {"model": "demo", "messages": QUESTION, "temperature": 0, "ignore_eos": True, "max_tokens": 9}
    made = demo_server.post("/invocations", json={**body, "saesteer": STEERED}).json()
    assert tokens(made["saesteer"]) == [made["usage"]["prompt_tokens"] - 1 + 8]
    prompt = {"model": "demo", "prompt": "x", "max_tokens": 2, "ignore_eos": True, "saesteer": STEERED}
    assert tokens(demo_server.post("/invocations", json=prompt).json()["saesteer"])


def test_no_edits_are_applied_where_none_are_asked_for(demo_server: httpx.Client) -> None:
    with Client(str(demo_server.base_url), timeout=120) as client:
        steers: list[Any] = [[], {}, {"edits": []}]
        for steer in steers:
            assert client.chat("x", steer=steer, max_tokens=2).applied == ()
            assert client.respond("x", steer=steer, max_output_tokens=2).applied == ()
            assert [one.applied for one in client.stream("x", steer=steer, max_tokens=2) if one.finish_reason] == [()]


def test_bodies_without_a_spec_are_stock_s(demo_server: httpx.Client) -> None:
    """Steered and plain bodies have the same fields but one; nothing of ours stands in the plain one."""
    for path, asked in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "x"})):
        plain, steered = (
            post(demo_server, path, max_tokens=4, **asked, **more) for more in ({}, {"saesteer": STEERED})
        )
        assert list(steered) == [*plain, "saesteer"]
        assert "saesteer" not in json.dumps(plain)
        assert all("saesteer" not in one for one in events(demo_server, path, max_tokens=4, **asked))


def test_what_the_client_reads(demo_server: httpx.Client) -> None:
    with Client(str(demo_server.base_url), timeout=120) as client:
        whole = client.chat("Who are you?", steer=BRIDGE, temperature=0, max_tokens=8)
        assert whole.applied is not None and whole.applied[0]["feature"] == 3497
        pieces = list(client.stream("Who are you?", steer=BRIDGE, temperature=0, max_tokens=8))
        (told,) = [piece.applied for piece in pieces if piece.applied is not None]
        assert tokens({"applied": told}) == tokens({"applied": whole.applied})
        assert client.respond("x", steer=BRIDGE, max_output_tokens=2).applied
        assert client.chat("x", max_tokens=2).applied is None


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


@pytest.mark.parametrize("stream", [False, True])
def test_rules_end_responses_and_messages(demo_server: httpx.Client, stream: bool) -> None:
    """Their answers have no place for the reason, but the flags name the rule."""
    for scope in ({"generated": True}, {"positions": [[-1, None]]}):
        spec = {"edits": [{"op": "stop", "when": ALWAYS, "scope": scope}]}
        for path, body in (
            ("responses", {"input": "Who are you?", "max_output_tokens": 9}),
            ("messages", {"messages": QUESTION, "max_tokens": 9}),
        ):
            body = {"model": "demo", "temperature": 0, "stream": stream, "saesteer": spec, **body}
            response = demo_server.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            assert response.text.count('"edit":"saesteer.edits[0]"') == 1, response.text


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
