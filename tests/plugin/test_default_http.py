"""A default module over HTTP: every answer that it steers reports it, on each route, whole and in a stream.

What the module does to tokens is in test_default_module.py, and what several API servers know of it in test_admin.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saesteer.client.client import Client
from tests.plugin.conftest import ADMIN, ADMIN_KEY, BRIDGE, PROMPTS
from tests.plugin.serving import events_of, served
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("default")
    (folder / "calm.json").write_text(json.dumps(CALM))
    words = ["--module", f"calm={folder}/calm.json", "--default-module", "calm", "--max-dose", "9"]
    with served(["demo", "--saesteer-admin-key", ADMIN_KEY, *words], folder / "log") as client:
        yield client


def answered(server: httpx.Client, name: str, more: Any) -> list[Any]:
    """The field of an answer and of its choices; None where there is none."""
    path, body = WHOLE[name]
    response = server.post(path, json={"model": "demo", **body, **more})
    if name == "batch" and response.status_code == 404:
        pytest.skip("this vLLM has no batches of conversations")
    assert response.status_code == 200, response.text
    found = response.json()
    choices = found.get("choices", ())
    return [one.get("saesteer") for one in (found, *(choices if len(choices) > 1 else ()))]


def streamed(server: httpx.Client, name: str, more: Any) -> list[Any]:
    """The field of each event of a stream that has it."""
    path, body = WHOLE[name]
    with server.stream("POST", path, json={"model": "demo", **body, **more, "stream": True}) as response:
        assert response.status_code == 200
        found = events_of(response)
    reports = [one.get("saesteer") or (one.get("response") or {}).get("saesteer") for one in found]
    return [one for one in reports if one is not None]


def check(report: Any, *, default: bool) -> None:
    """A report of all that a spec would get: what was applied, the flags and, under --max-dose, the dose."""
    if not default:
        assert (report["applied"], report["dose"]) == ([], []) and "flags" not in report
        return
    assert [entry["edit"] for entry in report["applied"]] == [APPLIED]
    assert report["applied"][0]["tokens_edited"] + report["applied"][0]["tokens_cached"] > 0
    assert {flag["edit"] for flag in report["flags"]} == {FLAGGED}
    assert {one["site"] for one in report["dose"]} <= {"resid_post.15"}


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


def test_without_a_default_module_only_a_spec_is_reported(server: httpx.Client) -> None:
    with Client(str(server.base_url), admin_key=ADMIN_KEY) as client:
        client.clear_default()
        try:
            for name in WHOLE:
                if name != "batch" or "/v1/chat/completions/batch" in server.get("/openapi.json").text:
                    assert {*answered(server, name, {})} == {None}, name
            for name in STREAMS:
                assert streamed(server, name, {}) == [], name
            assert answered(server, "chat", {"saesteer": {}})[0]["applied"] == []
        finally:
            client.set_default("calm")
        check(answered(server, "chat", {})[0], default=True)
    assert server.get("/v1/saesteer/default", headers=ADMIN).json() == {"module": "calm"}
