"""Every way in is really steered: what each answers, token by token, is what the HF backend says under the same spec.

Over HTTP the server tells the tokens and their logprobs, so each answer is held against the oracle, teacher-forced,
also where it was sampled, streamed, one of several, bound to a grammar or made with a LoRA adapter. The specs are fixed
and none stands near a bound, so no token is left out.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from saesteer import hf
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS, Answer, Dictionaries
from tests.plugin.lora import merge_adapter
from tests.plugin.parity import TOLERANCE, difference
from tests.plugin.serving import CUDA, events_of
from tests.plugin.turns import TURNS, pieces

pytestmark = pytest.mark.slow

ADD = {"op": "add", "vector": "any", "site": "resid_mid.7", "scale": 1.5}
CAP = {"op": "cap", "vector": "each", "site": "resid_post.20", "max": 2.0}
SPEC: dict[str, Any] = {"edits": [BRIDGE, ADD, CAP, {"op": "use", "module": "outer", "scale": 0.3}]}
LIMIT = {"max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
CHOICE = {"type": "object", "properties": {"what": {"enum": ["sea", "hill"]}}, "required": ["what"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {**CHOICE, "additionalProperties": False}}}


def post(any_server: httpx.Client, path: str, body: dict[str, Any], spec: Any = SPEC) -> Any:
    """The JSON of an answer; the same request without the spec must answer something else."""
    whole = {"model": "base", **LIMIT, **body}
    response = any_server.post(path, json=whole if spec is None else {**whole, "saesteer": spec})
    assert response.status_code == 200, response.text
    return response.json()


def said(choice: Any) -> Answer:
    """Tokens and logprobs of a choice, from completions or chat."""
    found = choice["logprobs"]
    values = found["token_logprobs"] if "token_logprobs" in found else [one["logprob"] for one in found["content"]]
    return list(zip(choice["token_ids"], values, strict=True))


def check(oracle: hf.Model, ids: list[int], made: Answer, spec: Any = SPEC, tolerance: float = TOLERANCE) -> None:
    """The oracle says the same, and another thing without the spec."""
    assert len(made) == 10
    assert difference(oracle, ids, made, spec) < tolerance
    assert difference(oracle, ids, made) > 0.05, "it is steered"


def test_completions(any_server: httpx.Client, oracle: hf.Model) -> None:
    ids = [oracle.encode(prompt) for prompt in PROMPTS]
    for prompt, expected in (
        (PROMPTS[0], ids[:1]),
        (PROMPTS[:3], ids[:3]),
        (ids[1], ids[1:2]),
        (ids[2:], ids[2:]),
    ):
        document = post(any_server, "/v1/completions", {"prompt": prompt, "logprobs": 1})
        assert [choice["index"] for choice in document["choices"]] == list(range(len(expected)))
        assert document["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert document["usage"]["completion_tokens"] == 10 * len(expected)
        for choice, one in zip(document["choices"], expected, strict=True):
            assert choice["prompt_token_ids"] == one and choice["finish_reason"] == "length"
            assert choice["text"] == oracle.tokenizer.decode(choice["token_ids"])
            check(oracle, one, said(choice))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_of_several_sampled_answers(any_server: httpx.Client, oracle: hf.Model, path: str) -> None:
    chat = "chat" in path
    asked = {"messages": TURNS, "logprobs": True} if chat else {"prompt": PROMPTS[0], "logprobs": 1}
    document = post(any_server, path, {**asked, "n": 2, "temperature": 0.9, "seed": 5})
    choices = document["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    for choice in choices:
        check(oracle, (document if chat else choice)["prompt_token_ids"], said(choice))


def test_chat_with_tools_and_messages(any_server: httpx.Client, oracle: hf.Model) -> None:
    """The tools are part of the prompt; windows of messages are found behind them."""
    spec = {"edits": [{**BRIDGE, "scope": {"messages": [1, -1]}}, {**OCEAN, "scope": {"generated": True}}]}
    template = (
        "{{ tools[0].function.name }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ tail }}"
    )
    # The server's own template knows no tools; where a request may not bring one, its own is what is left to test.
    asked = {"messages": TURNS, "logprobs": True, "tools": [TOOL], "tool_choice": "none"}
    document = post(any_server, "/v1/chat/completions", asked, spec)
    ids = document["prompt_token_ids"]
    ends = [0]
    for piece in pieces(TURNS):
        ends.append(ends[-1] + len(oracle.tokenizer(piece, add_special_tokens=False).input_ids))
    windows = [[ends[1], ends[2]], [ends[3], ends[4]]]
    by_position = {"edits": [{**BRIDGE, "scope": {"positions": windows}}, spec["edits"][1]]}
    check(oracle, ids, said(document["choices"][0]), by_position)
    refused = any_server.post(
        "/v1/chat/completions", json={"model": "base", **asked, "chat_template": template, "saesteer": spec}
    )
    assert refused.status_code == 400, "vLLM trusts no request's template unless it is told to"


def events(any_server: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of each event of a stream."""
    with any_server.stream("POST", path, json={"model": "base", "stream": True, **body}) as response:
        assert response.status_code == 200
        return events_of(response)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams(any_server: httpx.Client, oracle: hf.Model, path: str) -> None:
    chat = "chat" in path
    asked: dict[str, Any] = {"messages": TURNS, "logprobs": True} if chat else {"prompt": PROMPTS[3], "logprobs": 1}
    whole = post(any_server, path, asked)
    found = events(any_server, path, {**LIMIT, **asked, "saesteer": SPEC})
    choices = [event["choices"][0] for event in found if event["choices"] and event["choices"][0].get("token_ids")]
    made = [step for choice in choices for step in said(choice)]
    assert [token for token, _ in made] == whole["choices"][0]["token_ids"]
    text = "".join((one["delta"].get("content") or "") if chat else one["text"] for one in choices)
    assert text == (whole["choices"][0]["message"]["content"] if chat else whole["choices"][0]["text"])
    ids = (whole if chat else whole["choices"][0])["prompt_token_ids"]
    check(oracle, ids, made)


def test_responses_say_what_chat_says(any_server: httpx.Client, oracle: hf.Model) -> None:
    body = {"messages": TURNS, "logprobs": True}
    spec = {"edits": [*SPEC["edits"], {**OCEAN, "scope": {"messages": "user"}}]}
    spec["edits"][0] = {**BRIDGE, "scope": {"messages": "system", "positions": [[0, 5]]}}
    chat = post(any_server, "/v1/chat/completions", body, spec)
    assert chat["choices"][0]["token_ids"] != post(any_server, "/v1/chat/completions", body)["choices"][0]["token_ids"]
    asked = {"model": "base", "input": TURNS, "max_output_tokens": 10, "temperature": 0, "ignore_eos": True}
    response = any_server.post("/v1/responses", json={**asked, "saesteer": spec})
    assert response.status_code == 200, response.text
    document = response.json()
    content = chat["choices"][0]["message"]["content"]
    assert document["output"][-1]["content"][0]["text"] == content
    assert document["usage"]["output_tokens"] == 10 and document["status"] == "incomplete"
    found = events(any_server, "/v1/responses", {**asked, "saesteer": spec})
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == content


def test_batches_of_conversations(any_server: httpx.Client, oracle: hf.Model) -> None:
    if "/v1/chat/completions/batch" not in any_server.get("/openapi.json").json()["paths"]:
        pytest.skip("this vLLM has no batches of conversations")
    batch = {"messages": [TURNS, TURNS[:2]], "logprobs": True, "max_completion_tokens": 10}
    asked = {key: value for key, value in {**LIMIT, **batch}.items() if key != "ignore_eos"}
    response = any_server.post("/v1/chat/completions/batch", json={"model": "base", **asked, "saesteer": SPEC})
    assert response.status_code == 200, response.text
    for choice, turns in zip(response.json()["choices"], (TURNS, TURNS[:2]), strict=True):
        alone = post(any_server, "/v1/chat/completions", {"messages": turns, "logprobs": True, "ignore_eos": False})
        assert choice["message"]["content"] == alone["choices"][0]["message"]["content"]


def check_bound(oracle: hf.Model, ids: list[int], choice: Any) -> int:
    """Among the tokens that a grammar leaves, logprobs differ as the oracle's do; how many pairs were compared."""
    made = choice["token_ids"]
    logits = oracle.logits(ids + made[:-1], steer=SPEC, prompt_len=len(ids))
    pairs = 0
    for step, one in enumerate(choice["logprobs"]["content"]):
        told = {int(t["token"].removeprefix("token_id:")): t["logprob"] for t in [one, *one["top_logprobs"]]}
        left = {token: value for token, value in told.items() if value > -50}  # others are what the grammar forbids
        here = logits[len(ids) - 1 + step]
        first, *others = left
        assert first == made[step]
        for other in others:
            expected = float(here[first] - here[other])
            assert left[first] - left[other] == pytest.approx(expected, abs=5 * TOLERANCE)
        pairs += len(others)
    return pairs


def test_structured_output(any_server: httpx.Client, oracle: hf.Model) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    asked = {"messages": TURNS[-1:], "logprobs": True, "top_logprobs": 8, "return_tokens_as_token_ids": True}
    document = post(any_server, "/v1/chat/completions", {**asked, **bound, "ignore_eos": False, "max_tokens": 20})
    (choice,) = document["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")
    assert check_bound(oracle, document["prompt_token_ids"], choice) > 20
    plain = post(any_server, "/v1/chat/completions", {**asked, **bound, "ignore_eos": False, "max_tokens": 20}, None)
    assert plain["choices"][0]["token_ids"] != choice["token_ids"]


def test_tool_calls(any_server: httpx.Client, oracle: hf.Model) -> None:
    call = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}
    asked = {"messages": TURNS[-1:], "logprobs": True, "top_logprobs": 8, "return_tokens_as_token_ids": True}
    document = post(any_server, "/v1/chat/completions", {**asked, **call, "ignore_eos": False, "max_tokens": 80})
    (choice,) = document["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "look"
    json.loads(made["function"]["arguments"])  # bound to the schema in strict mode alone
    assert check_bound(oracle, document["prompt_token_ids"], choice) > 20


def test_a_lora_adapter_and_steering_together(
    lora_server: httpx.Client, oracle: hf.Model, adapter: Path, model_dir: str, dictionaries: Dictionaries
) -> None:
    ids = oracle.encode(PROMPTS[0])
    asked = {"prompt": PROMPTS[0], "logprobs": 1}
    answers = [
        said(post(lora_server, "/v1/completions", {**asked, "model": model}, spec)["choices"][0])
        for model in ("base", "tiny")
        for spec in (None, SPEC)
    ]
    assert len({str(one) for one in answers}) == 4
    # The adapter's product is rounded in another order, and on a GPU the whole model to bfloat16.
    plain, adapted = (0.5, 0.5) if CUDA else (TOLERANCE, 2 * TOLERANCE)
    check(oracle, ids, answers[1], tolerance=plain)
    merged = hf.Model(model_dir, **dictionaries.options, dtype=torch.float32)
    merge_adapter(adapter, merged.model)
    assert difference(merged, ids, answers[2]) < adapted
    check(merged, ids, answers[3], tolerance=adapted)
