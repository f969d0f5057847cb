"""Specs under a misspelt key, or in an object where no route reads one: refused by each route that serves the field."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams

from saesteer.language.fields import step
from saesteer.plugin.door import frontend
from saesteer.plugin.door.admission import Door
from saesteer.plugin.http import anthropic, bodies, models
from saesteer.plugin.http.routes import near
from saesteer.plugin.names.versions import Names
from saesteer.plugin.results.errors import SpecRefused
from tests.spec.catalogs import CATALOG

MISPLACED: list[dict[str, Any]] = [
    {"extra_body": {"saesteer": {}}},
    {"extra_body": {"vllm_xargs": {"saesteer": "{}"}}},
    {"extra_args": {"saesteer": None}},
    {"sampling_params": {"extra_args": {"saesteer": {}}}},
    *({name: {"saesteer": {}}} for name in ("options", "parameters", "chat_template_kwargs", "kv_transfer_params")),
    *({name: {"edits": []}} for name in ("extra_body", "options", "parameters", "chat_template_kwargs")),
    {"metadata": {"saesteer": ' {"edits": []}'}},
    {"metadata": {"edits": "[]"}},
]
NEAR: tuple[str, ...] = (
    "saester",
    "sae_steer",
    "steering",
    "Saesteer",
    "SAESTEER",
    "saesteer ",
    "steer",
    "sae",
    "SAE",
    "sasteer",
)
NEAR += ("saesteeer", "sae-steer", "saesteer\n", "seasteer", "saesteer:", "\u017faesteer")
PLAIN: list[dict[str, Any]] = [
    {},
    {"extra_body": {"top_k": 1}},
    {"extra_body": "saesteer"},
    {"sampling_params": None},
    {"metadata": {"saesteer": "on", "edits": "three"}, "extra_headers": {"saesteer": {}}},
    {"vllm_xargs": {"seed_steering": 1}, "steered": 1, "saesteer_runs": 1, "master": 1, "edits": 1},
    {"structured_outputs": {"json": {"edits": {}, "saesteer": {}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"saesteer": {}}}}},
]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with saesteer's configuration and no default module."""
    monkeypatch.setattr(models, "serving", [SimpleNamespace(catalog=SimpleNamespace(default=None))])


def served(body: dict[str, Any]) -> list[Callable[[], Any]]:
    """What happens to a body on each of the routes that serve the field."""
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    turns: Any = [{"role": "user", "content": "x"}]
    chat = ChatCompletionRequest(messages=turns, **body)
    sampling = frontend._forwarding_body_field(lambda *_: SimpleNamespace(extra_args=None))
    beams = frontend._refusing_beam_search(lambda *_: None)
    batch = bodies._batch_request(BatchChatCompletionRequest.to_chat_completion_request)
    own = BatchChatCompletionRequest(messages=[turns], **body)
    raw = SimpleNamespace(json=AsyncMock(return_value=body))
    messages = anthropic._forwarding(AsyncMock())
    return [
        lambda: sampling(chat),
        lambda: sampling(CompletionRequest(prompt="x", **body)),
        lambda: sampling(ResponsesRequest(input="x", **body)),
        lambda: beams(chat),
        lambda: batch(own, turns),
        lambda: asyncio.run(messages(None, SimpleNamespace(vllm_xargs=None), raw)),
    ]


@pytest.mark.parametrize("body", MISPLACED, ids=str)
def test_a_spec_in_an_object_that_is_not_read_for_it_is_refused(body: dict[str, Any], configured: None) -> None:
    """The OpenAI SDK unpacks extra_body; whoever copies it into another client sends it as it is."""
    [(name, held)] = body.items()
    for one in served(body):
        with pytest.raises(SpecRefused, match=f"stands in {name}, where no spec is read; expected the field") as error:
            one()
        assert (error.value.field, error.value.code) == ("edits" if "edits" in held else "saesteer", "unknown_field")


@pytest.mark.parametrize("key", NEAR)
def test_a_misspelt_key_is_refused(key: str, configured: None) -> None:
    for place, body in (("", {key: {"edits": []}}), ("vllm_xargs", {"vllm_xargs": {key: "{}"}})):
        for one in served(body):
            with pytest.raises(SpecRefused, match=r"is no field of a request \(did you mean saesteer\?\)") as error:
                one()
            assert error.value.code == "unknown_field" and error.value.field == step(place, key).removeprefix(".")


@pytest.mark.parametrize("body", PLAIN, ids=str)
def test_fields_of_others_pass(body: dict[str, Any], configured: None) -> None:
    for one in served(body):
        one()


def test_no_field_of_vllm_is_near_ours() -> None:
    """Of every route that serves the field."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    whole = ChatCompletionRequest, BatchChatCompletionRequest, CompletionRequest, ResponsesRequest
    for model in (*whole, AnthropicMessagesRequest):
        names = {*model.model_fields, *(str(one.alias) for one in model.model_fields.values() if one.alias)}
        assert len(names) > 15 and near(names) is None, model
        assert all(near([f"{name} "]) is None for name in names)


@pytest.mark.parametrize("key", ["saester", "steering", "SAESTEER "])
def test_a_misspelt_key_of_extra_args_is_refused(key: str) -> None:
    """As ``LLM.generate`` sends it on, and as vllm_xargs of a route that forwards them arrive."""
    params = SamplingParams(extra_args={key: {"edits": []}, "other": 1})
    check = frontend._checking(lambda *_: SimpleNamespace(sampling_params=None))
    with pytest.raises(SpecRefused, match=r"is no field of a request \(did you mean saesteer\?\)") as error:
        check(
            SimpleNamespace(saesteer_names=Names(CATALOG, pool_rows=0, layers=4), saesteer_door=Door()), "", {}, params
        )
    assert (error.value.field, error.value.code) == (step("extra_args", key), "unknown_field")
    check(SimpleNamespace(saesteer_names=None, saesteer_door=Door()), "", {}, params)
