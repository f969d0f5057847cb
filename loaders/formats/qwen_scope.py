"""Qwen-Scope: one ``layer{n}.sae.pt`` for each layer, with the set's ``config.json``; it knows one layer at a time.

    f = relu(the k largest of x @ W_enc.T + b_enc)        y = f @ W_dec.T + b_dec

W_enc is [F, d] and W_dec is [d, F], the other way round than in all formats with these names. Nothing is subtracted.
"""

from __future__ import annotations

import re
from pathlib import Path

from saesteer.loaders.arrays import open_arrays
from saesteer.loaders.draft import Axis, Draft
from saesteer.loaders.files import only, read_json, text, whole_number, wrong

FILES = ("config.json",)  # and the layer's file, which a place names: a set has some tens of them
_LAYER = re.compile(r"layer(\d+)\.sae\.pt")


def draft(place: Path) -> Draft | None:
    """The draft of a layer's file, or of a folder with the file of one layer; None for others. Raises LoadError."""
    config = (place if place.is_dir() else place.parent) / FILES[0]
    if not (place.is_dir() or _LAYER.fullmatch(place.name)) or not config.is_file():
        return None
    cfg = read_json(config)
    if cfg.get("model_type") != "topk_sae":
        return None
    only(config, cfg, {"hook_point": "resid_post"})
    layers = sorted(path for path in place.iterdir() if _LAYER.fullmatch(path.name)) if place.is_dir() else [place]
    if len(layers) != 1:
        raise wrong(place, "layer*.sae.pt", f"{len(layers)} files and none chosen", f"{place}/layer0.sae.pt or another")
    match = _LAYER.fullmatch(layers[0].name)
    assert match is not None
    site, width = f"resid_post.{int(match[1])}", Axis("d_model", whole_number(config, cfg, "d_model"))
    return Draft(
        open_arrays(layers[0]),
        {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"},
        "topk",
        transposed={"w_dec"},
        configs=(config,),
        sizes=(Axis("d_sae", whole_number(config, cfg, "d_sae")), width, width),
        k=whole_number(config, cfg, "k"),
        sites=(site, site),
        model=text(config, cfg, "base_model"),
    )
