"""A set in an engine: a request for one of its layers makes the row that a dictionary of its own would make."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from saesteer import hf
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.errors import ConfigError, SpecError
from saesteer.loaders import load
from saesteer.loaders.formats import own
from tests.rows import row_of
from tests.small_world import WIDTH, coder
from tests.spec.sets import apart

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("set")
    for layer in LAYERS:
        own.write(at / f"layer_{layer}.safetensors", coder(layer, "jumprelu", None, "none", "resid_post", skip=False))
    return at


def made(dictionaries: dict[str, str]) -> Engine:
    size: dict[str, Any] = {"width": WIDTH, "layers": 4, "max_rows": 4, "max_tokens": 64}
    assets = Assets.open(SaesteerConfig.from_json({"dictionaries": dictionaries}))
    return Engine(assets, dtype=torch.float32, device=torch.device("cpu"), **size)


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Engine, Engine]:
    alone = {f"gs-{layer}": f"{folder}/layer_{layer}.safetensors@resid_post.{layer}" for layer in LAYERS}
    return made({"gs": f"{folder}@resid_post"}), made(alone)


named = st.builds(
    lambda n, f: {"dictionary": "gs", "layer": n, "feature": f}, st.sampled_from(LAYERS), st.integers(0, 9)
)
gates = named.map(lambda one: one | {"above": 0.5})
clamps = st.builds(
    lambda where, value, gate: {"op": "clamp", **where, "value": value, "mode": "add", "when": gate},
    named,
    st.just(2.0) | named,
    st.lists(gates, max_size=2),
)
whole = named.map(lambda one: {"op": "reconstruct", "dictionary": "gs", "layer": one["layer"]})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(clamps | whole, min_size=1, max_size=4))
def test_the_row_is_the_row_of_dictionaries_of_their_own(engines: tuple[Engine, Engine], edits: list[Any]) -> None:
    rows: list[object] = []
    for engine, spec in zip(engines, ({"edits": edits}, apart({"edits": edits})), strict=True):
        try:
            row = row_of(engine, spec, 9)
        except SpecError as error:
            rows.append(error.code)
        else:
            assert row is not None
            rows.append(row.words.tobytes())
    assert rows[0] == rows[1]


def test_transformers_backend_takes_a_layer(folder: Path) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 64}
    model = hf.Model(
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=64)),
        dictionaries={"gs": f"{folder}@resid_post"},
    )
    ids = [3, 1, 4, 1, 5]
    assert model.layers_of("gs") == LAYERS
    for layer in LAYERS:
        assert model.info("gs", layer).site_in == f"resid_post.{layer}"
        expected = load(folder / f"layer_{layer}.safetensors").encode(model.stream(ids, f"resid_post.{layer}"))
        torch.testing.assert_close(model.activations(ids, "gs", layer=layer), expected)
        spec = {"edits": [{"op": "clamp", "dictionary": "gs", "layer": layer, "feature": 2, "value": 9.0}]}
        moved = {site: model.stream(ids, site, steer=spec) - model.stream(ids, site) for site in model.engine.sites}
        assert not moved["resid_post.1"].any()  # the stream before the edits
        assert bool(moved["resid_post.2"].any()) == (layer == 1)
        assert (model.logits(ids, steer=spec) != model.logits(ids)).any()
    for wrong in (None, 3):
        with pytest.raises(ConfigError, match=f"dictionary 'gs' at layer {wrong}; expected 1 or 2"):
            model.coder("gs", wrong)
