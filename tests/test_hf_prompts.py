"""What a Transformers model takes as a prompt, and how it ranks features and where: on a tiny random model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from saesteer import hf
from saesteer.errors import ConfigError
from saesteer.loaders.formats import own
from saesteer.workbench.reading import tokens_of
from tests import small_world
from tests.hf_models import IDS, SITE, made_with

EXPECTED = "expected a flat list of at least one token id from 0 to 63"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> hf.Model:
    folder: Path = tmp_path_factory.mktemp("prompts")
    own.write(folder / "abs.safetensors", small_world.CODERS["abs"])
    return made_with(folder, {"abs": f"{folder}/abs.safetensors@{SITE}"})


def refused(told: str) -> Any:
    return pytest.raises(ConfigError, match=f"^{told}$")


@pytest.mark.parametrize("form", [tuple, torch.tensor, np.array, lambda ids: list(torch.tensor(ids))])
def test_token_ids_in_every_form(model: hf.Model, form: Any) -> None:
    assert model.encode(form(IDS)) == IDS
    assert torch.equal(model.logits(form(IDS)), model.logits(IDS))


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([IDS], r"prompt\[0\]: got a list, "),
        (torch.tensor([IDS]), r"prompt: got a Tensor of shape \[1, 12\], "),
        (np.array(3), r"prompt: got a ndarray of shape \[\], "),
        ([], "prompt: got no token, "),
        (torch.tensor([]), "prompt: got no token, "),
        ([1, 2.0], r"prompt\[1\]: got 2.0, "),
        ([True], r"prompt\[0\]: got True, "),
        (["a"], r"prompt\[0\]: got a str, "),
        ([3, 64], r"prompt\[1\]: got 64, "),
        ([-1], r"prompt\[0\]: got -1, "),
        ({"input_ids": IDS}, "prompt: got a dict, "),
        (5, "prompt: got a int, "),
    ],
)
def test_other_prompts_are_refused(model: hf.Model, prompt: Any, told: str) -> None:
    for method in (model.logits, model.generate, model.streams):
        with refused(told + EXPECTED):
            method(prompt)


@pytest.mark.parametrize("prompt_len", [-1, 13])
def test_a_prompt_ends_among_the_tokens(model: hf.Model, prompt_len: int) -> None:
    with refused(f"prompt_len: got {prompt_len}, expected 0 to 12, the number of tokens"):
        model.logits(IDS, prompt_len=prompt_len)
    assert model.logits(IDS, prompt_len=12).shape == model.logits(IDS, prompt_len=0).shape == (12, 64)


def test_no_more_tokens_than_the_models_context(model: hf.Model) -> None:
    assert len(model.logits([5] * 64)) == 64
    for call in (model.logits, lambda ids: model.activations(ids, "abs")):
        with refused("got 65 tokens, expected at most 64, the model's context"):
            call([5] * 65)
    assert len(model.generate([5] * 62, max_tokens=2)) <= 2
    with refused("got 62 tokens and max_tokens 3, expected at most 64, the model's context"):
        model.generate([5] * 62, max_tokens=3)


def test_a_message_needs_a_chat_template(model: hf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for call, what in ((model.chat_ids, "a message"), (model.encode, "text")):
        with refused(f"this model was given without a tokenizer, expected token ids instead of {what}"):
            call("Who?")

    def missing(*_: Any, **__: Any) -> str:
        raise ValueError("Cannot use chat template functions because tokenizer.chat_template is not set")

    monkeypatch.setattr(model, "tokenizer", SimpleNamespace(apply_chat_template=missing))
    with refused("the model's tokenizer has no chat template; pass the text itself, or token ids"):
        model.chat_ids("Who?")
    with refused("the model's tokenizer has no chat template; leave out --chat"):
        tokens_of(model.tokenizer, "Who?", chat=True)


@pytest.mark.parametrize("name", ["abs", "jump", "top"])
def test_features_are_those_that_a_read_has(model: hf.Model, name: str) -> None:
    wanted = [{"dictionary": name, "top_k": 4, "scope": {"skip_first": 1}}]
    [entry] = model.read(IDS, steer={"return": {"features": wanted}})["features"]
    found = model.features(IDS, name, top_k=4)
    assert [[one.feature for one in here] for here in found] == [
        [one for one, _ in row["top"]] for row in entry["rows"]
    ]
    for here, row in zip(found, entry["rows"], strict=True):
        assert [one.value for one in here] == pytest.approx([value for _, value in row["top"]], abs=1e-5)
    assert any(one.value < 0 for here in found for one in here) == (name == "abs")
    with refused("top_k: got -1, expected 0 or more"):
        model.features(IDS, name, top_k=-1)


def test_a_dictionary_is_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_with(tmp_path)
    monkeypatch.setattr(model.engine, "device", torch.device("meta"))
    coder = model.coder("jump")
    parts = (coder.w_enc, coder.b_enc, coder.w_dec, coder.b_dec, coder.threshold, coder.max_act)
    assert {one.device.type for one in parts if one is not None} == {"meta"}
