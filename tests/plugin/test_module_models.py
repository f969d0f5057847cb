"""A module as a model, ``BASE:NAME``, on every route; the header of answers; and a server that requires a spec."""

import json
import re
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams

from saesteer import hf
from saesteer.client.client import Client
from saesteer.config.config import SaesteerConfig
from saesteer.errors import SpecError
from saesteer.language.spec import as_spec, from_json
from saesteer.plugin.door import frontend
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.refusals import refuse_nothing
from saesteer.plugin.http.exchange import begin
from saesteer.plugin.names.versions import Names
from saesteer.plugin.results.errors import SpecRefused
from tests.plugin.conftest import ADMIN_KEY, BRIDGE, CUDA, OCEAN, PROMPTS
from tests.plugin.parity import TOLERANCE, difference
from tests.plugin.serving import events_of
from tests.plugin.test_default_http import STREAMS, WHOLE
from tests.spec.catalogs import CATALOG

HEADER = "x-saesteer-applied"
OTHER = {**OCEAN, "feature": 7}
slow = pytest.mark.slow


@pytest.fixture
def server(any_server: httpx.Client) -> Iterator[httpx.Client]:
    with Client(str(any_server.base_url), admin_key=ADMIN_KEY) as client:
        client.register_module("calm", {"edits": [BRIDGE]})
        client.register_module("a:b", {"edits": [BRIDGE]})
        try:
            yield any_server
        finally:
            client.clear_default()
            for name in ("calm", "a:b"):
                client.delete_module(name)


def edits(report: Any) -> list[str]:
    return [entry["edit"] for entry in report["applied"]]


@slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_route_takes_a_module_as_a_model(server: httpx.Client, name: str) -> None:
    path, body = WHOLE[name]
    sent = {**body, "model": "base:calm"}
    response = server.post(path, json=sent)
    if name == "batch" and response.status_code == 404:
        pytest.skip("this vLLM has no batches of conversations")
    assert response.status_code == 200, response.text
    found = response.json()
    choices = found.get("choices", ())
    for one in (found, *(choices if len(choices) > 1 else ())):
        assert edits(one["saesteer"]) == ["model.edits[0]"]
    assert response.headers[HEADER].startswith("1; digest=")
    both = server.post(path, json={**sent, "saesteer": {"edits": [OCEAN]}})
    assert edits(both.json()["saesteer"]) == ["model.edits[0]", "saesteer.edits[0]"]
    assert both.headers[HEADER].startswith("2; digest=")
    if name.startswith("invocations") and not CUDA:  # where a header selects an adapter
        other = server.post(path, json=sent, headers={"X-Amzn-SageMaker-Adapter-Identifier": "tiny"})
        assert edits(other.json()["saesteer"]) == ["model.edits[0]"] and other.json()["model"] == "tiny"
    if name in STREAMS:
        for more, count in (({}, 1), ({"saesteer": {"edits": [OCEAN]}}, 2)):
            with server.stream("POST", path, json={**sent, **more, "stream": True}) as response:
                reports = [
                    one.get("saesteer") or (one.get("response") or {}).get("saesteer") for one in events_of(response)
                ]
            assert {len(one["applied"]) for one in reports if one} == {count}
            assert response.headers[HEADER] == (server.post(path, json={**sent, **more}).headers[HEADER])


@slow
def test_it_stands_behind_the_default_and_before_the_body(server: httpx.Client, oracle: hf.Model) -> None:
    """And is what a `use` at that place is, to the digest."""
    body: dict[str, Any] = {"prompt": PROMPTS[1], "logprobs": 1, "return_token_ids": True, "max_tokens": 8}
    body |= {"temperature": 0, "ignore_eos": True}
    used = {"op": "use", "module": "calm"}
    with Client(str(server.base_url), admin_key=ADMIN_KEY) as client:
        client.register_module("waves", {"edits": [OTHER]})
        client.set_default("waves")
        own: dict[str, Any] = {"edits": [OCEAN]}
        for model, spec, paths in (
            ("base:calm", own, ["saesteer.defaults.edits[0]", "model.edits[0]", "saesteer.edits[0]"]),
            ("base:calm", {**own, "defaults": False}, ["model.edits[0]", "saesteer.edits[0]"]),
        ):
            made = server.post("/v1/completions", json={**body, "model": model, "saesteer": spec})
            [choice] = made.json()["choices"]
            assert edits(made.json()["saesteer"]) == paths
            same = {**spec, "edits": [used, *spec["edits"]]}
            other = server.post("/v1/completions", json={**body, "model": "base", "saesteer": same})
            assert other.headers[HEADER] == made.headers[HEADER]
            tokens = [*zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)]
            whole = [*([OTHER] if len(paths) == 3 else []), BRIDGE, OCEAN]
            assert difference(oracle, choice["prompt_token_ids"], tokens, {"edits": whole}) < TOLERANCE
        with server.stream("POST", "/v1/completions", json={**body, "model": "base", "stream": True}) as response:
            assert response.headers[HEADER].startswith("1; digest="), "a default's stream has the header as well"
        client.clear_default()
        client.delete_module("waves")
    plain = server.post("/v1/completions", json={**body, "model": "base"})
    assert HEADER not in plain.headers
    read = server.post("/v1/completions", json={**body, "model": "base", "saesteer": {"return": {"hidden": True}}})
    assert read.headers[HEADER].startswith("0; digest=")


@slow
def test_models_are_listed_and_unknown_ones_are_not_found(server: httpx.Client) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert "base:a:b" not in cards and [one for one in cards if "calm" in one] == ["base:calm"]
    assert cards["base:calm"]["parent"] == "base"
    for model, near in (
        ("base:clam", "base:calm"),
        ("bass:calm", "base:calm"),
        ("base:a:b", ""),
        (":calm", ":calm"),
    ):
        for name in ("chat", "completions", "responses", "messages", "invocations, chat"):
            path, body = WHOLE[name]
            response = server.post(path, json={**body, "model": model})
            assert response.status_code == 404, (model, name, response.text)
            assert bool(re.search(rf"\(did you mean '\w*{near}'\?\)", response.text)) is bool(near), response.text
    for path in ("/tokenize", "/v1/chat/completions/render", "/v1/embeddings"):
        more = {"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]}
        assert server.post(path, json={"model": "base:calm", **more}).status_code >= 400, path
    path, body = WHOLE["completions"]
    beams = server.post(path, json={**body, "model": "base:calm", "use_beam_search": True, "n": 2})
    assert beams.status_code == 400 and "beam search cannot be steered" in beams.text
    wrong = server.post(path, json={**body, "model": "base:calm", "saesteer": {"edits": [{"op": "clamp"}]}})
    assert json.loads(wrong.text)["error"]["param"].startswith("saesteer.edits[0]"), "its own edits keep their numbers"
    if not CUDA:
        steered = server.post(path, json={**body, "model": "tiny:calm", "logprobs": 1}).json()
        assert edits(steered["saesteer"]) == ["model.edits[0]"]
        same = {"edits": [{"op": "use", "module": "calm"}]}
        known = server.post(path, json={**body, "model": "tiny", "logprobs": 1, "saesteer": same}).json()
        assert known["choices"][0]["logprobs"] == steered["choices"][0]["logprobs"], "the adapter stays"


def test_a_server_that_requires_a_spec_refuses_what_asks_for_nothing() -> None:
    asked: Any
    for asked in (None, {}, {"edits": []}):
        with pytest.raises(SpecError, match="answers no request without a spec") as caught:
            refuse_nothing(SaesteerConfig(require=("spec",)), as_spec(asked))
        assert (caught.value.field, caught.value.code) == ("saesteer", "missing_field")
        refuse_nothing(SaesteerConfig(require=("default",)), as_spec(asked))
    for asked in ({"edits": [BRIDGE]}, {"return": {"hidden": True}}, {"defaults": False}):
        refuse_nothing(SaesteerConfig(require=("spec",)), as_spec(asked))


def test_such_a_server_refuses_what_comes_from_any_side() -> None:
    """A module as the model asks for something, and so do no requests that a default module steers."""
    check = frontend._checking(lambda _, __, ___, params: SimpleNamespace(sampling_params=params, prompt_token_ids=[1]))
    catalog = replace(CATALOG, modules={"m": from_json({"edits": []})}, default="m")
    names, door = Names(catalog, pool_rows=0, layers=4), Door(config=SaesteerConfig(require=("spec",)))
    server = SimpleNamespace(saesteer_names=names, saesteer_door=door)
    extra: Any
    for extra in (None, {"saesteer": {}}, {"other": 1}):
        with pytest.raises(SpecRefused, match="answers no request without a spec"):
            check(server, "", {}, SamplingParams(extra_args=extra))
    check(server, "", {}, SamplingParams(extra_args={"saesteer": {"defaults": False}}))

    def named() -> None:
        begin("/v1/completions").module = "m"
        check(server, "", {}, SamplingParams())

    copy_context().run(named)
