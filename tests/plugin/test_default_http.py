"""A default module over HTTP: what it does to all traffic, and that each answer reports it, whole and in a stream.

What several API servers know of it is in test_admin.py.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from saesteer import hf
from saesteer.client.client import Client
from tests.plugin.conftest import ADMIN, ADMIN_KEY, BRIDGE, OCEAN, PROMPTS
from tests.plugin.parity import TOLERANCE, difference
from tests.plugin.serving import events_of
from tests.plugin.turns import QUESTION, TURNS

pytestmark = pytest.mark.slow

FLAG = {"op": "flag", "when": {"dictionary": "demo", "feature": BRIDGE["feature"], "above": -1}}
CALM = {"edits": [BRIDGE, FLAG]}
APPLIED, FLAGGED = "saesteer.defaults.edits[0]", "saesteer.defaults.edits[1]"
FEW = {"max_tokens": 3, "temperature": 0}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": QUESTION, **FEW}),
    "chat, n": ("/v1/chat/completions", {"messages": QUESTION, **FEW, "n": 2, "temperature": 1}),
    "completions": ("/v1/completions", {"prompt": PROMPTS[0], **FEW}),
    "completions, n": ("/v1/completions", {"prompt": PROMPTS[:2], **FEW, "n": 2, "temperature": 1}),
    "responses": ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 3, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": QUESTION, **FEW}),
    "batch": ("/v1/chat/completions/batch", {"messages": [TURNS, TURNS[:2]], **FEW}),
    "invocations, chat": ("/invocations", {"messages": QUESTION, **FEW}),
    "invocations, completions": ("/invocations", {"prompt": PROMPTS[0], **FEW}),
}
STREAMS = [name for name in WHOLE if name != "batch"]
# What else a body holds → whether the default module steers its answer.
BODIES: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "an empty spec": ({"saesteer": {}}, True),
    "no defaults": ({"saesteer": {"defaults": False}}, False),
}


@pytest.fixture
def server(any_server: httpx.Client) -> Iterator[httpx.Client]:
    """The server of all tests, which steers everything for as long as one of these runs."""
    with Client(str(any_server.base_url), admin_key=ADMIN_KEY) as client:
        client.register_module("calm", CALM)
        client.set_default("calm")
        try:
            yield any_server
        finally:
            client.clear_default()
            client.delete_module("calm")


def answered(server: httpx.Client, name: str, more: Any) -> list[Any]:
    """The field of an answer and of its choices; None where there is none."""
    path, body = WHOLE[name]
    response = server.post(path, json={"model": "base", **body, **more})
    if name == "batch" and response.status_code == 404:
        pytest.skip("this vLLM has no batches of conversations")
    assert response.status_code == 200, response.text
    found = response.json()
    choices = found.get("choices", ())
    return [one.get("saesteer") for one in (found, *(choices if len(choices) > 1 else ()))]


def streamed(server: httpx.Client, name: str, more: Any) -> list[Any]:
    """The field of each event of a stream that has it."""
    path, body = WHOLE[name]
    with server.stream("POST", path, json={"model": "base", **body, **more, "stream": True}) as response:
        assert response.status_code == 200
        found = events_of(response)
    reports = [one.get("saesteer") or (one.get("response") or {}).get("saesteer") for one in found]
    return [one for one in reports if one is not None]


def check(report: Any, *, default: bool) -> None:
    """A report of all that a spec would get: what was applied, and the flags."""
    if not default:
        assert report["applied"] == [] and "flags" not in report
        return
    assert [entry["edit"] for entry in report["applied"]] == [APPLIED]
    assert report["applied"][0]["tokens_edited"] + report["applied"][0]["tokens_cached"] > 0
    assert {flag["edit"] for flag in report["flags"]} == {FLAGGED}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", WHOLE)
def test_every_answer_that_a_default_module_steers_reports_it(server: httpx.Client, name: str, body: str) -> None:
    more, default = BODIES[body]
    for report in answered(server, name, more):
        check(report, default=default)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_that_a_default_module_steers_reports_it(server: httpx.Client, name: str, body: str) -> None:
    more, default = BODIES[body]
    _, asked = WHOLE[name]
    prompts = len(asked["prompt"]) if isinstance(asked.get("prompt"), list) else 1
    reports = streamed(server, name, more)
    assert len(reports) == asked.get("n", 1) * prompts, "at the end of each choice"
    for report in reports:
        check(report, default=default)


def test_all_is_steered_but_what_opts_out(server: httpx.Client, oracle: hf.Model) -> None:
    """With edits of its own behind those of the module; the second time from the prefix cache."""
    own: list[Any] = [OCEAN]
    asked: dict[str, Any] = {"prompt": PROMPTS[1], "logprobs": 1, "return_token_ids": True, "max_tokens": 8}
    for more, edits in (
        ({}, [BRIDGE]),
        ({"saesteer": {"edits": own}}, [BRIDGE, *own]),
        ({"saesteer": {"edits": own, "defaults": False}}, own),
        ({"saesteer": {"defaults": False}}, []),
    ):
        body = {"model": "base", "temperature": 0, "ignore_eos": True, **asked, **more}
        first, second = (server.post("/v1/completions", json=body).json()["choices"][0] for _ in range(2))
        assert first["token_ids"] == second["token_ids"]
        made = [*zip(second["token_ids"], second["logprobs"]["token_logprobs"], strict=True)]
        assert difference(oracle, second["prompt_token_ids"], made, {"edits": edits}) < TOLERANCE


def test_a_stop_of_the_module_ends_all_but_what_opts_out(server: httpx.Client) -> None:
    with Client(str(server.base_url), admin_key=ADMIN_KEY) as client:
        client.register_module("calm", {"edits": [BRIDGE, {**FLAG, "op": "stop", "for": 3}]})
    body = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 20, "ignore_eos": True}
    for more, tokens in (({}, 4), ({"saesteer": {"edits": [OCEAN]}}, 4), ({"saesteer": {"defaults": False}}, 20)):
        made = server.post("/v1/completions", json={**body, **more}).json()
        assert made["usage"]["completion_tokens"] == tokens
        assert made["choices"][0]["stop_reason"] == (FLAGGED if tokens == 4 else None)
    beam = server.post("/v1/completions", json={**body, "use_beam_search": True, "n": 2})
    assert beam.status_code == 400 and "beam search cannot be steered" in beam.text


def test_without_a_default_module_only_a_spec_is_reported(server: httpx.Client) -> None:
    assert server.get("/v1/saesteer/default", headers=ADMIN).json() == {"module": "calm"}
    assert server.delete("/v1/saesteer/default", headers=ADMIN).status_code == 200
    for name in WHOLE:
        if name != "batch" or "/v1/chat/completions/batch" in server.get("/openapi.json").text:
            assert {*answered(server, name, {})} == {None}, name
    for name in STREAMS:
        assert streamed(server, name, {}) == [], name
    assert answered(server, "chat", {"saesteer": {}})[0]["applied"] == []
