"""Features named by their address at Neuronpedia, asked of a real server. What they mean is in test_origins."""

from typing import Any

import httpx
import pytest

from tests.plugin.conftest import PROMPTS, SECOND

pytestmark = pytest.mark.slow


def ask(server: httpx.Client, spec: dict[str, Any], **body: Any) -> httpx.Response:
    body = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    return server.post("/v1/completions", json={**body, "logprobs": 1, "saesteer": spec})


def by(named: dict[str, Any]) -> dict[str, Any]:
    """A clamp and a read of a feature, however it is named."""
    read = {**named, "features": [named["feature"]], "at": "after"}
    del read["feature"]
    return {"edits": [{"op": "clamp", **named, "value": 40.0}], "return": {"features": [read]}}


def test_an_address_means_dictionary_and_index(any_server: httpx.Client) -> None:
    answers = [ask(any_server, by(one)) for one in ({"dictionary": "second", "feature": 5}, {"feature": f"{SECOND}/5"})]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    indexed, addressed = (answer.json() for answer in answers)
    assert addressed["choices"][0]["text"] == indexed["choices"][0]["text"]
    assert addressed["choices"][0]["logprobs"] == indexed["choices"][0]["logprobs"]
    assert addressed["saesteer"]["features"] == indexed["saesteer"]["features"] != []
    (applied,) = addressed["saesteer"]["applied"]
    assert (applied["dictionary"], applied["feature"]) == ("second", 5)
    assert applied["trained_on"] == SECOND.partition("/")[0], "what the operator declares stands in the answer"
    plain = ask(any_server, {"edits": []}).json()
    assert plain["choices"][0]["logprobs"] != addressed["choices"][0]["logprobs"]


def test_an_unknown_address_is_refused(any_server: httpx.Client) -> None:
    refused = ask(any_server, by({"feature": "gemma-2-2b/20-gemmascope-res-16k/3124"}))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "saesteer.edits[0].feature"
    assert f"np:{SECOND}" in error["message"] and error["message"].endswith("[unknown_name]"), error["message"]
