"""circuit-tracer's sets of transcoders: ``layer_{i}.safetensors`` for each layer, and ``config.yaml`` with the hooks.

    f = act(x @ W_enc.T + b_enc)        y = f @ W_dec + b_dec        W_enc and W_dec are [F, d]

act: pre where pre > activation_function.threshold, even where that is below 0; relu where the file has none; or topk by
the config. circuit-tracer's topk keeps negative values where fewer than k are positive; here they are 0. A set that
lists files of other repositories, a cross-layer transcoder and a skip connection are refused. It knows one layer at a
time: ``folder#layer_3`` or the layer's file chooses.
"""

from __future__ import annotations

import re
from pathlib import Path

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases
from saesteer.loaders.arrays import open_arrays
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import read_yaml, text, whole_number, wrong

FILES = ("config.yaml",)
_KEYS = {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
_THRESHOLD = "activation_function.threshold"
_LAYER = re.compile(r"layer_(\d+)\.safetensors")


def draft(place: Path) -> Draft | None:
    """The draft of a layer's file, or of a folder with the file of one layer; None for others. Raises LoadError."""
    config = (place if place.is_dir() else place.parent) / FILES[0]
    if not (place.is_dir() or _LAYER.fullmatch(place.name)) or not config.is_file():
        return None
    cfg = read_yaml(config)
    if "model_kind" not in cfg:
        return None
    if (kind := text(config, cfg, "model_kind")) != "transcoder_set":
        raise wrong(config, "model_kind", f"{kind!r}, which may write to several layers", "transcoder_set")
    if listed := cfg.get("transcoders"):
        raise wrong(config, "transcoders", f"a list: {listed!s:.80}", "one of its places itself, without hf://")
    layers = sorted(path for path in place.iterdir() if _LAYER.fullmatch(path.name)) if place.is_dir() else [place]
    if len(layers) != 1:
        raise wrong(place, "layer_*.safetensors", f"{len(layers)} files and none chosen", f"{place}#layer_0 or another")
    match = _LAYER.fullmatch(layers[0].name)
    assert match is not None
    weights, model = open_arrays(layers[0]), text(config, cfg, "model_name")
    activation: Activation = "jumprelu" if _THRESHOLD in weights.index else "relu"
    if text(config, cfg, "activation") == "topk":
        activation = "topk"
    hooks = (text(config, cfg, f"feature_{side}_hook") for side in ("input", "output"))
    read, written = aliases.pair(*(f"blocks.{int(match[1])}.{hook}" if hook else None for hook in hooks))
    return Draft(
        weights,
        _KEYS | ({"threshold": _THRESHOLD} if activation == "jumprelu" else {}),
        activation,
        optional={"skip": "W_skip"},
        ignored={"k"},
        configs=(config,),
        below_zero="kept",
        k=whole_number(config, cfg, "k") if activation == "topk" else None,
        sites=(aliases.added(read, model), aliases.added(written, model)),
        model=model,
    )
