"""tools/train_gemma.py on a tiny random model: files in Gemma Scope 2's forms, which measure as trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer.config.assets import Assets
from saesteer.config.settings import read_settings
from saesteer.hf import Model
from saesteer.loaders import describe, later, load
from tests.test_training import END, texts
from tests.tiny import WIDTH, made
from tools.own_texts import kept
from tools.train_dictionary import Recipe, harvest
from tools.train_gemma import make

LAYER, ACROSS = 1, range(1, 3)
RECIPE = Recipe(features=160, k=6, steps=60, batch=256, rate=3e-3, warm_up=5, dead_after=2048, aux_k=8)
FEW = Recipe(features=96, k=6, steps=60, batch=256, rate=3e-3, warm_up=5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("gemma")
    whole = texts(80)
    return out, make(made("Gemma 3"), END, whole[:60], whole[60:], out, RECIPE, FEW, LAYER, ACROSS)


def test_an_sae_and_a_skip_transcoder_are_those_of_gemma_scope_2(trained: tuple[Path, dict[str, Any]]) -> None:
    out, figures = trained
    ids = texts(80)[60:]
    seen = harvest(made("Gemma 3"), ids, kept(ids, END), ("mlp_in.1", "mlp_out.1", "resid_post.1"))
    for folder, kind, ends in (
        ("resid_post/layer_1_width_0k_l0_medium", "sae", ("resid_post.1", "resid_post.1")),
        ("transcoder/layer_1_width_0k_l0_medium_affine", "transcoder", ("mlp_in.1", "mlp_out.1")),
    ):
        info, coder = describe(out / folder), load(out / folder)
        assert (info.format, info.site_in, info.site_out, info.activation) == ("gemma_scope_2", *ends, "jumprelu")
        assert (info.model, info.features, info.skip) == ("google/gemma-3-270m", RECIPE.features, kind != "sae")
        x, y = (seen[end] for end in ends)
        f = coder.encode(x)
        fvu = (coder.decode(f, like=x) - y).square().sum() / (y - y.mean(0)).square().sum()
        assert float(fvu) == pytest.approx(figures[kind]["fvu"], rel=0.02)
        assert float((f > 0).sum(1).float().mean()) == pytest.approx(figures[kind]["l0"], abs=0.1)
        assert figures[kind]["fvu"] < 1 and figures[kind]["l0"] < 3 * RECIPE.k


def test_a_cross_layer_transcoder_writes_what_it_was_trained_to(trained: tuple[Path, dict[str, Any]]) -> None:
    """Each layer's output is the sum of what the layers up to it write there."""
    out, figures = trained
    [place] = (out / "clt").iterdir()
    assets = Assets.open(read_settings([f"clt={place}"]))
    assert assets.sets == {"clt": (1, 2)} and {one.model for one in assets.infos.values()} == {"google/gemma-3-270m"}
    ids = texts(80)[60:]
    keep, sums = kept(ids, END), dict[str, Any]()
    sites = [f"{kind}.{layer}" for layer in ACROSS for kind in ("mlp_in", "mlp_out")]
    seen = harvest(made("Gemma 3"), ids, keep, sites)
    for number, layer in enumerate(ACROSS):
        info = assets.info("clt", layer)
        coder = load(info.source, site=info.site_in)
        f = coder.encode(seen[f"mlp_in.{layer}"])
        for site, rows in zip(info.writes, (coder.w_dec, *later(info)), strict=True):
            sums[site] = sums.get(site, 0) + f @ rows.float()
        y = seen[f"mlp_out.{layer}"]
        fvu = (sums[f"mlp_out.{layer}"] + coder.b_dec - y).square().sum() / (y - y.mean(0)).square().sum()
        assert float(fvu) == pytest.approx(figures["clt"]["fvu"][number], rel=0.02)
        assert float((f > 0).sum(1).float().mean()) == pytest.approx(figures["clt"]["l0"][number], abs=0.1)
    assert max(figures["clt"]["fvu"]) < 1
    assert json.loads((out / "figures.json").read_text())["clt"] == figures["clt"]


def test_the_backend_serves_all_three(trained: tuple[Path, dict[str, Any]]) -> None:
    out, _ = trained
    places = {one.parent.parent.name: str(one.parent) for one in out.glob("*/*/config.json")}
    model = Model(made("Gemma 3"), dictionaries=places)
    ids = texts(1)[0][:12].tolist()
    plain = model.logits(ids)
    for name in places:
        layer = {"layer": 1} if name == "clt" else {}
        feature = int(model.activations(ids, name, **layer)[1:].amax(0).argmax())
        clamp = {"op": "clamp", "dictionary": name, **layer, "feature": feature, "value": 30.0}
        assert (model.logits(ids, steer=clamp) - plain).abs().max() > 1e-3
    assert set(places) == {"resid_post", "transcoder", "clt"} and model.engine.catalog.width == WIDTH
    assert torch.isfinite(plain).all()
