"""circuit-tracer's sets of transcoders: ``layer_{i}.safetensors`` for each layer, and ``config.yaml`` with the hooks.

    f = act(x @ W_enc.T + b_enc)        y = f @ W_dec + b_dec        W_enc and W_dec are [F, d]

act: pre where pre > activation_function.threshold, even where that is below 0; relu where the file has none; or topk by
the config. circuit-tracer's topk keeps negative values where fewer than k are positive; here they are 0. A set that
lists files of other repositories and a cross-layer transcoder are refused; a skip transcoder adds x @ W_skip.T. A
folder has a draft for each layer; ``folder#layer_3`` or the layer's file chooses one.

Two public sets say less than they mean, so the repository's name counts: that of Qwen3 14B has no config, and reads and
writes as the smaller ones; Facebook's CRV is a topk whose k stands in circuit-tracer's code alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases
from saesteer.loaders.arrays import open_arrays
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import read_yaml, text, whole_number, wrong

FILES = ("config.yaml",)
_KEYS = {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
_THRESHOLD = "activation_function.threshold"
_LAYER = re.compile(r"layer_(\d+)\.safetensors")
_QWEN = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out", "model_name": "Qwen/Qwen3-14B"}
_UNSAID: dict[str, dict[str, Any]] = {
    "qwen3-14b-transcoders": _QWEN,
    "crv-8b-instruct-transcoders": {"activation": "topk", "k": 128},
}


def draft(place: Path) -> Draft | list[Draft] | None:
    """The draft of a layer's file, or the drafts of a folder's layers; None for others. Raises LoadError."""
    config = (place if place.is_dir() else place.parent) / FILES[0]
    if not (place.is_dir() or _LAYER.fullmatch(place.name)):
        return None
    layers = sorted(path for path in place.iterdir() if _LAYER.fullmatch(path.name)) if place.is_dir() else [place]
    if config.is_file():
        cfg = _from_path(place) | read_yaml(config)
    elif layers and set(_KEYS.values()) <= open_arrays(layers[0]).index.keys():
        cfg = {"model_kind": "transcoder_set"} | _from_path(place)
    else:
        return None
    if "model_kind" not in cfg:
        return None
    if (kind := text(config, cfg, "model_kind")) != "transcoder_set":
        raise wrong(config, "model_kind", f"{kind!r}, which may write to several layers", "transcoder_set")
    if listed := cfg.get("transcoders"):
        raise wrong(config, "transcoders", f"a list: {listed!s:.80}", "one of its places itself, without hf://")
    if not layers:
        raise wrong(place, "layer_*.safetensors", "0 files and none chosen", "one for each layer")
    drafts = [_one(file, config, cfg) for file in layers]
    return drafts if len(drafts) > 1 else drafts[0]


def _one(file: Path, config: Path, cfg: dict[str, Any]) -> Draft:
    match = _LAYER.fullmatch(file.name)
    assert match is not None
    weights, model = open_arrays(file), text(config, cfg, "model_name")
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
        ignored={"k"} if activation == "topk" else frozenset(),
        configs=(config,) if config.is_file() else (),
        below_zero="kept",
        k=whole_number(config, cfg, "k") if activation == "topk" else None,
        sites=(aliases.added(read, model), aliases.added(written, model)),
        model=model,
    )


def _from_path(place: Path) -> dict[str, Any]:
    """What the config leaves out, as far as the repository's name tells."""
    parts = " ".join(place.absolute().parts)
    return {key: value for name, said in _UNSAID.items() if name in parts for key, value in said.items()}
