"""Qwen-Scope: one ``layer{n}.sae.pt`` for each layer, with the set's ``config.json``. A folder has a draft for each.

    f = relu(the k largest of x @ W_enc.T + b_enc)        y = f @ W_dec.T + b_dec

W_enc is [F, d] and W_dec is [d, F], the other way round than in all formats with these names. Nothing is subtracted.
"""

import re
from pathlib import Path

from saesteer.loaders import sizes
from saesteer.loaders.draft import KEYS, Draft
from saesteer.loaders.files import Document, numbered, only, read_json, text, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("config.json",)  # and the layer's file, which a place names: a set has some tens of them
_LAYER = re.compile(r"layer(\d+)\.sae\.pt")


def draft(place: Path) -> list[Draft] | None:
    """The draft of a layer's file, or the drafts of a folder's layers; None for others. Raises LoadError."""
    config = (place if place.is_dir() else place.parent) / FILES[0]
    layers = numbered(place, _LAYER)
    if not (layers or place.is_dir()) or not config.is_file():
        return None
    cfg = read_json(config)
    if cfg.get("model_type") != "topk_sae":
        return None
    only(config, cfg, {"hook_point": "resid_post"})
    if not layers:
        raise wrong(place, "layer*.sae.pt", "0 files and none chosen", "one for each layer")
    return [_one(layer, file, config, cfg) for layer, file in layers]


def _one(layer: int, file: Path, config: Path, cfg: Document) -> Draft:
    site = f"resid_post.{layer}"
    return Draft(
        open_arrays(file),
        KEYS,
        "topk",
        transposed={"w_dec"},
        configs=(config,),
        sizes=sizes.named(config, cfg, "d_sae", "d_model"),
        k=whole_number(config, cfg, "k"),
        sites=(site, site),
        model=text(config, cfg, "base_model"),
    )
