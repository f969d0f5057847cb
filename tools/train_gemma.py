"""Trains dictionaries for Gemma 3 270M in the forms of Gemma Scope 2, in one run on a GPU: `make gemma`.

An SAE at resid_post of a middle layer, a skip transcoder of its MLP, and a cross-layer transcoder of six layers, on
texts of installed packages and of the model itself. They are measured on texts of a package that is used for neither.
Nothing of it is kept in the repository but the figures. Google's terms apply to what is trained on the model's texts.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saesteer.commands.embedded import GEMMA
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.loaders.write import write_arrays
from saesteer.model import ensure_model
from tools import train_across
from tools.own_texts import kept
from tools.train_dictionary import Pairs, Recipe, finished, harvest, measure, train

MODEL = "google/gemma-3-270m"
LAYER, ACROSS = 9, range(7, 13)
# Two million tokens at 13 sites take 67 GB. Nothing of this has been run on a GPU yet.
RECIPE = Recipe(features=16_384, k=50, steps=8000, batch=8192)
RECIPE_ACROSS = replace(RECIPE, features=4096, k=12, steps=3000)
POINTS = {
    "resid_post": "model.layers.{}.output",
    "mlp_in": "model.layers.{}.pre_feedforward_layernorm.output",
    "mlp_out": "model.layers.{}.post_feedforward_layernorm.output",
}


def config(kind: str, sites: tuple[str, str], width: int, l0: float, layer: int | None, *, skip: bool) -> str:
    """The config.json of a folder."""
    facts: dict[str, Any] = {"architecture": "jump_relu", "type": kind, "width": width, "l0": round(l0)}
    if layer is not None:
        ends = zip(("in", "out"), sites, strict=True)
        facts |= {f"hf_hook_point_{end}": POINTS[site].format(layer) for end, site in ends}
    return json.dumps(facts | {"affine_connection": skip, "model_name": MODEL}, indent=2) + "\n"


def write_one(folder: Path, coder: SparseCoder, kind: str, sites: tuple[str, str], layer: int, l0: float) -> None:
    """Write an SAE or a transcoder: params.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"w_enc": coder.w_enc.T, "w_dec": coder.w_dec}
    arrays |= {"b_enc": coder.b_enc, "b_dec": coder.b_dec, "threshold": coder.threshold}
    if coder.w_skip is not None:
        arrays["affine_skip_connection"] = coder.w_skip.T
    stored = {name: one.float().cpu().contiguous() for name, one in arrays.items()}
    write_arrays(folder / "params.safetensors", stored, {})
    skip = coder.w_skip is not None
    (folder / "config.json").write_text(config(kind, sites, coder.info.features, l0, layer, skip=skip))


def write_across(folder: Path, made: list[train_across.Layer], above: float, first: int, l0: float) -> None:
    """Write a cross-layer transcoder: a file for each layer, whose decoders stand at the layers that they write."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer, one in enumerate(made, first):
        targets, features, width = one.w_dec.shape
        w_dec = torch.zeros(features, layer + targets, width, dtype=torch.bfloat16)
        w_dec[:, layer:] = one.w_dec.transpose(0, 1).cpu()
        arrays = {"w_enc": one.w_enc.T.cpu().bfloat16().contiguous(), "w_dec": w_dec}
        arrays |= {"b_enc": one.b_enc.cpu(), "b_dec": one.b_dec.cpu(), "threshold": torch.full((features,), above)}
        write_arrays(folder / f"params_layer_{layer}.safetensors", arrays, {})
    width = sum(len(one.b_enc) for one in made)
    (folder / "config.json").write_text(config("clt", ("mlp_in", "mlp_out"), width, l0, None, skip=False))


def make(
    model: Any, end: int, old: Tensor, fresh: Tensor, out: Path, recipe: Recipe, recipe_across: Recipe, layer: int,
    across: range,
) -> dict[str, Any]:  # fmt: skip
    """Train all three, write them, and return the figures.

    Args:
        model: a Transformers causal language model, which loses the layers behind the last that is read.
        end: the token that texts are filled up with.
        old: [texts, length] int64, to train on.
        fresh: the same, to measure on.
        out: the folder.
        recipe: of the SAE and the transcoder.
        recipe_across: of the cross-layer transcoder, for each of its layers.
        layer: of the SAE and the transcoder.
        across: the layers of the cross-layer transcoder.
    """
    begun, figures = time.monotonic(), dict[str, Any]()
    sites = [f"{kind}.{one}" for one in dict.fromkeys([*across, layer]) for kind in ("mlp_in", "mlp_out")]
    sites.append(f"resid_post.{layer}")
    keeps = [kept(texts, end) for texts in (old, fresh)]
    seen = harvest(model, torch.cat([old, fresh]), torch.cat(keeps), sites)
    count = int(keeps[0].sum())
    for kind, ends in (("sae", ("resid_post", "resid_post")), ("transcoder", ("mlp_in", "mlp_out"))):
        whole = Pairs(*(seen[f"{end}.{layer}"] for end in ends))
        pairs, held = Pairs(*(one[:count] for one in whole)), Pairs(*(one[count:] for one in whole))
        info = CoderInfo("", whole.x.shape[1], whole.y.shape[1], recipe.features, "jumprelu")
        coder = finished(*train(pairs, replace(recipe, skip=kind != "sae")), info, pairs.x, recipe.k)
        found, everything = measure(coder, held), measure(coder, pairs)
        folder = f"{ends[0] if kind == 'sae' else kind}/layer_{layer}_width_{recipe.features // 1024}k_l0_medium"
        write_one(out / (folder if kind == "sae" else f"{folder}_affine"), coder, kind, ends, layer, found.l0)
        figures[kind] = {"l0": round(found.l0, 1), "fvu": round(found.fvu, 4), "dead": everything.dead}
    x, y = ([seen[f"{kind}.{one}"] for one in across] for kind in ("mlp_in", "mlp_out"))
    made = train_across.train([one[:count] for one in x], [one[:count] for one in y], recipe_across)
    above = train_across.threshold(made, [one[:count] for one in x], recipe_across.k)
    quality = train_across.measure(made, above, [one[count:] for one in x], [one[count:] for one in y])
    place = out / "clt" / f"width_{len(made) * recipe_across.features // 1024}k_l0_medium"
    write_across(place, made, above, across[0], sum(quality.l0))
    dead = [int((one == 0).sum()) for one in quality.max_act]
    figures["clt"] = {"l0": [round(one, 1) for one in quality.l0], "fvu": [round(one, 4) for one in quality.fvu]}
    figures["clt"]["dead"] = dead
    figures |= {"tokens": count, "held_out_tokens": int(keeps[1].sum()), "seconds": round(time.monotonic() - begun)}
    recipes = {"recipe": asdict(recipe), "recipe_across": asdict(recipe_across)}
    (out / "figures.json").write_text(json.dumps(figures | recipes, indent=1) + "\n")
    return figures


def texts(folder: Path, place: Path) -> tuple[Tensor, Tensor]:
    """The texts to train on and those to measure on, written by processes of their own if they are missing."""
    wanted = {
        "own.npy": ["tools.own_texts", "--seconds", "100", "--tokens", "1000000"],
        "packages.npy": ["tools.package_texts", "--tokens", "1000000"],
        "held-out.npy": ["tools.package_texts", "--held-out", "--tokens", "100000"],
    }
    found = []
    for name, (tool, *words) in wanted.items():
        if not (folder / name).is_file():
            command = [sys.executable, "-m", tool, "--out", str(folder / name), "--model", str(place), *words]
            subprocess.run(command, check=True)
        found.append(torch.from_numpy(np.load(folder / name).astype(np.int64)))
    order = torch.randperm(len(found[0]) + len(found[1]), generator=torch.Generator().manual_seed(0))
    return torch.cat(found[:2])[order], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gemma"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given.out.mkdir(parents=True, exist_ok=True)
    place = ensure_model(print, name=GEMMA)
    old, fresh = texts(given.out, place)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).to(given.device).eval()
    end = AutoTokenizer.from_pretrained(place).eos_token_id
    print(json.dumps(make(model, end, old, fresh, given.out, RECIPE, RECIPE_ACROSS, LAYER, ACROSS), indent=1))


if __name__ == "__main__":
    main()
