"""Probes with a function: what answers say, what conditions compare, and where the function comes from."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from saesteer import hf
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.vectors import Function, from_inline
from saesteer.errors import ConfigError, LoadError, SpecError
from saesteer.language.spec import Spec, from_json
from saesteer.loaders.vectors import read_vectors
from saesteer.planning.answers import Reported, Rows
from saesteer.planning.plan import END, Catalog, Direction, Readout
from saesteer.planning.planner import plan
from saesteer.planning.reads import score_of

SITE = "resid_post.1"
APPLY: dict[Function, Any] = {
    "linear": lambda s: s,
    "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
    "tanh": math.tanh,
}
functions = st.sampled_from(sorted(APPLY))


@given(functions, st.floats(-15, 15), st.floats(-15, 15))
def test_a_condition_on_a_value_is_one_on_the_score(function: Function, score: float, bound: float) -> None:
    value, border = APPLY[function](score), APPLY[function](bound)
    assume(abs(score - bound) > 1e-3 and abs(value - border) > 1e-12)
    assert (value > border) == (score > score_of(function, border))


@pytest.mark.parametrize(("function", "low", "high"), [("sigmoid", 0.0, 1.0), ("tanh", -1.0, 1.0)])
def test_values_that_a_function_never_reaches(function: Function, low: float, high: float) -> None:
    for value in (low, low - 1, float("-inf")):
        assert score_of(function, value) == float("-inf")
    for value in (high, high + 1, float("inf")):
        assert score_of(function, value) == float("inf")


@given(functions, st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5))
def test_answers_have_the_value_behind_the_function(function: Function, scores: list[float]) -> None:
    found: dict[str, Any] = {}
    one = Readout("probe", "x", SITE, SITE, False, ((0, END),), probe=Direction("p", 1))
    rows = Rows([Reported(one, ({},), "float32", function)], found)
    rows.add([[0, [(0, len(scores))], np.array(scores, "<f4").tobytes()]])
    rows.tell(len(scores), 1, final=True)
    with np.errstate(over="ignore"):
        expected = {"linear": scores, "sigmoid": 1 / (1 + np.exp(-np.array(scores))), "tanh": np.tanh(scores)}
    assert found["probes"][0]["scores"] == pytest.approx([float(one) for one in expected[function]], rel=1e-5)


def catalog(function: Function) -> Catalog:
    vectors = {"p": from_inline((1.0, 2.0), bias=0.5, function=function), "v": from_inline((1.0, 0.0))}
    return Catalog({}, None, 64, vectors, width=2)


def gated(**bounds: float) -> Spec:
    when = {"probe": "p", **bounds}
    return from_json({"edits": [{"op": "add", "vector": "v", "site": SITE, "when": when}]})


def test_gates_compare_the_value_and_strengths_are_linear() -> None:
    [found] = plan(gated(above=0.8, below=0.9), catalog("sigmoid"), 5).conditions
    assert (found.above, found.below) == pytest.approx((math.log(4), math.log(9)))
    [found] = plan(gated(above=-2.0, below=0.9), catalog("tanh"), 5).conditions
    assert found.above == float("-inf") and found.below == pytest.approx(math.atanh(0.9))
    scaled = from_json({"edits": [{"op": "add", "vector": "v", "site": SITE, "scale": {"probe": "p", "slope": 2.0}}]})
    assert plan(scaled, catalog("linear"), 5).reads
    with pytest.raises(
        SpecError, match=r"whose function is sigmoid.*expected a linear probe, or a condition"
    ) as caught:
        plan(scaled, catalog("sigmoid"), 5)
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[0].scale.probe", "not_served")


def test_the_function_comes_from_the_file_or_the_settings(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(4), "bias": torch.tensor([0.5])}
    save_file(tensors, tmp_path / "plain.safetensors")
    save_file(tensors, tmp_path / "own.safetensors", {"function": "tanh"})
    save_file(tensors, tmp_path / "wrong.safetensors", {"function": "relu"})
    plain, own = (read_vectors(tmp_path / f"{name}.safetensors") for name in ("plain", "own"))
    assert (plain.function, own.function) == ("linear", "tanh")
    assert plain.fingerprint != own.fingerprint, "a version of its own"
    assert plain.fingerprint == read_vectors(tmp_path / "own.safetensors", function="linear").fingerprint
    with pytest.raises(LoadError, match="function: 'relu'; expected one of linear, sigmoid, tanh"):
        read_vectors(tmp_path / "wrong.safetensors")
    made = SaesteerConfig.from_json({"vectors": {"p": {"path": "x", "function": "sigmoid"}}})
    assert SaesteerConfig.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(ConfigError, match=r"vectors\.p\.function"):
        SaesteerConfig.from_json({"vectors": {"p": {"path": "x", "function": "relu"}}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> hf.Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("probes")
    torch.manual_seed(0)
    probe = {"layer.1": torch.randn(16), "bias": torch.tensor([0.1])}
    save_file(probe, folder / "linear.safetensors")
    save_file(probe, folder / "sigmoid.safetensors", {"function": "sigmoid"})
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
    made = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=64))
    vectors = {name: str(folder / f"{name}.safetensors") for name in ("linear", "sigmoid")}
    return hf.Model(made, vectors=vectors, reads=[SITE])
