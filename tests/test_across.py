"""Cross-layer transcoders through door, tables and op at several sites, against tests/formulas.py."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from saesteer import hf
from saesteer.config.assets import Assets
from saesteer.engine.engine import Engine, Row
from saesteer.errors import SpecError
from saesteer.loaders import alone, max_act
from tests import tiny
from tests.formulas import Dict, World
from tests.loaders import across
from tests.rows import making
from tests.small_engine import forward, make_engine
from tests.small_truth import expected as truth_of
from tests.small_truth import world
from tests.small_world import FEATURES, KINDS, MODULES, TOKENS, WIDTH, edits, features, gates, strengths, values

# Layer 1 reads mlp_in.1 and writes mlp_out.1, which the op of the sum does, and mlp_out.2; layer 2 writes mlp_out.2.
CLT = across.layers(2, FEATURES, WIDTH, seed=70)
LARGEST = [np.linspace(1, 2, FEATURES, dtype=np.float32) + layer for layer in range(2)]
ALL = {"edits": [{"op": "clamp", "dictionary": "clt", "layer": 1, "feature": 3, "value": 2.0}]}


def known() -> World:
    made = {}
    for layer, one in enumerate(CLT, 1):
        w_dec = {f"mlp_out.{to + 1}": rows.astype(float) for to, rows in one.w_dec.items()}
        arrays = (one.w_enc.T.astype(float), one.b_enc.astype(float), w_dec.pop(f"mlp_out.{layer}"), np.zeros(WIDTH))
        rest: dict[str, Any] = {"threshold": one.threshold.astype(float), "max_act": LARGEST[layer - 1].astype(float)}
        site, reads = f"mlp_out.{layer}", f"mlp_in.{layer}"
        made[f"clt@{layer}"] = Dict(site, *arrays, "jumprelu", **rest, reads=reads, later=w_dec)
    here = world()
    return replace(here, dictionaries={**here.dictionaries, **made}, modules={**MODULES, "all": ALL})


WORLD = known()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("across")
    place = across.circuit_tracer(folder / "clt", CLT, first=1)
    for layer, largest in enumerate(LARGEST, 1):
        file = place / f"W_enc_{layer}.safetensors"
        max_act.write(file, alone(file), torch.from_numpy(largest), tokens=1)
    dictionaries = {name: f"{folder}/{name}.safetensors@{kind[3]}" for name, kind in KINDS.items()}
    modules = {**MODULES, "all": ALL}
    return make_engine(folder, inline_rows=64, dictionaries={**dictionaries, "clt": str(place)}, modules=modules)


@pytest.fixture(scope="module")
def row_of(engine: Engine) -> Callable[..., Row | None]:
    return making(Assets.open(engine.config))


def check(engine: Engine, row_of: Any, spec: Any, prompt_len: int, seed: int = 0) -> None:
    x = torch.randn(3 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    out = forward(engine, [None, spec, None], prompt_len, x, row_of)
    plain = forward(engine, [None, None, None], prompt_len, x)
    mine = slice(TOKENS, 2 * TOKENS)
    truth, sure, _ = truth_of(spec, prompt_len, x[mine], here=WORLD)
    size = 1 + np.abs(truth).max(1, keepdims=True)
    assert (np.abs(out[mine].numpy() - truth) / size)[sure].max(initial=0) < 2e-4
    assert torch.equal(out[:TOKENS], plain[:TOKENS]) and torch.equal(out[2 * TOKENS :], plain[2 * TOKENS :])


sources = st.fixed_dictionaries({"dictionary": st.just("clt"), "layer": st.sampled_from([1, 2]), "feature": features})


@st.composite
def clamps(draw: Any) -> Any:
    mode = draw(st.sampled_from(["set", "add", "scale", "min", "max"]))
    read = sources.flatmap(lambda one: st.just(one | {"slope": 0.5, "max": 2.0}))
    found = draw(sources) | {"op": "clamp", "mode": mode, "only_if_active": draw(st.booleans())}
    found["value"] = draw(st.one_of(strengths(), read)) if mode == "add" else draw(values)
    found["unit"] = "raw" if mode == "scale" else draw(st.sampled_from(["raw", "max_act"]))
    if draw(st.booleans()):
        found["when"] = draw(st.one_of(gates(), sources.map(lambda one: one | {"above": 0.1})))
    if draw(st.integers(0, 2)) == 0:
        found["scope"] = {"generated": True}
    return found


anything = st.one_of(
    clamps(), clamps(), edits(), st.builds(lambda n: {"op": "use", "module": "all", "scale": n}, strengths())
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(anything, min_size=1, max_size=4), st.integers(2, TOKENS), st.integers(0, 2**31))
def test_every_composition_means_what_the_definition_says(
    engine: Engine, row_of: Any, found: list[Any], prompt_len: int, seed: int
) -> None:
    spec = {"edits": found}
    try:
        row_of(engine, spec, prompt_len)
    except SpecError as error:
        event(f"refused: {error.code}")
        return  # tested in tests/spec
    event("cross-layer" if any(one.get("dictionary") == "clt" for one in found) else "others")
    check(engine, row_of, spec, prompt_len, seed)


def of(layer: int, feature: int = 1, **more: Any) -> dict[str, Any]:
    return {"op": "clamp", "dictionary": "clt", "layer": layer, "feature": feature, "value": 2.0, **more}


def test_the_backend_on_transformers_does_what_hooks_do(tmp_path: Path) -> None:
    """One read at layer 0; the output of each MLP gains the decoder row for its layer."""
    found = across.layers(2, FEATURES, tiny.WIDTH, seed=80)
    place = across.circuit_tracer(tmp_path, found)
    steered, plain = hf.Model(tiny.made("Llama"), dictionaries={"clt": str(place)}), tiny.made("Llama")
    assert list(steered.engine.sites) == ["mlp_in.0", "resid_post.0", "mlp_in.1", "resid_post.1"]
    one, kept = found[0], []

    def read(_module: Any, _args: Any, x: torch.Tensor) -> None:
        pre = x[0] @ torch.from_numpy(one.w_enc[:, 5]) + float(one.b_enc[5])
        kept.append(torch.where(pre > float(one.threshold[5]), pre, 0.0))

    def written(layer: int) -> Callable[..., torch.Tensor]:
        def change(_module: Any, _args: Any, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[0, 1:] += ((3.0 - kept[0])[:, None] * torch.from_numpy(one.w_dec[layer][5]))[1:]
            return x

        return change

    ids = [3, 1, 4, 1, 5, 9]
    with torch.no_grad():
        before = plain(torch.tensor([ids])).logits[0]
        layers = plain.get_decoder().layers
        layers[0].post_attention_layernorm.register_forward_hook(read)
        for layer in range(2):
            layers[layer].mlp.register_forward_hook(written(layer))
        expected = plain(torch.tensor([ids])).logits[0]
    spec = {"op": "clamp", "dictionary": "clt", "layer": 0, "feature": 5, "value": 3.0}
    torch.testing.assert_close(steered.logits(ids, steer=spec), expected, atol=1e-5, rtol=1e-4)
    assert (expected - before)[1:].abs().max() > 1e-3
    features = steered.activations(ids, "clt", layer=0)
    torch.testing.assert_close(features[:, 5], kept[0], atol=1e-5, rtol=1e-4)
    above = float(kept[0][1:].max()) - 1e-3
    rule = {"op": "flag", "when": {"dictionary": "clt", "layer": 0, "feature": 5, "above": above}}
    whole = {"scope": {"prompt": True}}
    named = {"dictionary": "clt", "layer": 0, "features": [5, 3], **whole}
    seen = steered.read(ids, steer={"return": {"features": [named]}, "edits": [rule | whole]})
    rows = torch.tensor([[row["features"][name] for name in ("5", "3")] for row in seen["features"][0]["rows"]])
    torch.testing.assert_close(rows, features[:, [5, 3]], atol=1e-5, rtol=1e-4)
    assert seen["flags"] == [{"edit": "saesteer.edits[0]", "position": int(kept[0][1:].argmax()) + 1}]
