"""circuit-tracer's transcoders: ``layer_{i}.safetensors`` for each layer, and ``config.yaml`` with the hooks.

    f = act(x @ W_enc.T + b_enc)        y = f @ W_dec + b_dec        W_enc and W_dec are [F, d]

act: pre where pre > activation_function.threshold, even where that is below 0; relu where the file has none; or topk by
the config. circuit-tracer's topk keeps negative values where fewer than k are positive; here they are 0. A set that
lists files of other repositories is refused; a skip transcoder adds x @ W_skip.T. A folder has a draft for each layer;
``folder#layer_3`` or the layer's file chooses one.

A cross-layer transcoder has ``W_enc_{i}.safetensors`` with W_enc_{i}, b_enc_{i}, b_dec_{i} and perhaps threshold_{i},
and ``W_dec_{i}.safetensors`` with W_dec_{i} [F, layers - i, d], whose part j is written at layer i + j. Its skip
connection is left alone, which is why nobody needs to know whether it is transposed.

Two public sets say less than they mean, so the repository's name counts: that of Qwen3 14B has no config, and reads and
writes as the smaller ones; Facebook's CRV is a topk whose k stands in circuit-tracer's code alone.
"""

import re
from pathlib import Path

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases
from saesteer.loaders.draft import KEYS, Draft, Sites
from saesteer.loaders.files import Document, numbered, read_yaml, text, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("config.yaml",)
_THRESHOLD = "activation_function.threshold"
_LAYER = re.compile(r"(?:layer|W_enc)_(\d+)\.safetensors")  # W_enc: of a cross-layer transcoder
_KINDS = {"transcoder_set": "layer_*.safetensors", "cross_layer_transcoder": "W_enc_*.safetensors"}
_QWEN = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out", "model_name": "Qwen/Qwen3-14B"}
_UNSAID: dict[str, Document] = {
    "qwen3-14b-transcoders": _QWEN,
    "crv-8b-instruct-transcoders": {"activation": "topk", "k": 128},
}


def draft(place: Path) -> list[Draft] | None:
    """The draft of a layer's file, or the drafts of a folder's layers; None for others. Raises LoadError."""
    config = (place if place.is_dir() else place.parent) / FILES[0]
    layers = numbered(place, _LAYER)
    if not (layers or place.is_dir()):
        return None
    across = [one for one in layers if one[1].name.startswith("W_")]
    if config.is_file():
        cfg = _from_path(place) | read_yaml(config)
    elif layers and set(KEYS.values()) <= open_arrays(layers[0][1]).index.keys():
        cfg = {"model_kind": "transcoder_set"} | _from_path(place)
    else:
        return None
    if "model_kind" not in cfg:
        return None
    if (kind := text(config, cfg, "model_kind")) not in _KINDS:
        raise wrong(config, "model_kind", repr(kind), " or ".join(_KINDS))
    if listed := cfg.get("transcoders"):
        first = str(listed[0] if isinstance(listed, list) else listed).removeprefix("hf://").partition("?")[0]
        expected = f"the place of one of them, such as {first}, with the site that it reads"
        raise wrong(config, "transcoders", "a list of files of other repositories, which is not served", expected)
    layers = across if kind == "cross_layer_transcoder" else [one for one in layers if one not in across]
    if not layers:
        raise wrong(place, _KINDS[str(kind)], "0 files and none chosen", "one for each layer")
    return [(_across if across else _one)(*one, config, cfg) for one in layers]


def _one(layer: int, file: Path, config: Path, cfg: Document) -> Draft:
    weights = open_arrays(file)
    activation: Activation = "jumprelu" if _THRESHOLD in weights.index else "relu"
    if text(config, cfg, "activation") == "topk":
        activation = "topk"
    return Draft(
        weights,
        KEYS | ({"threshold": _THRESHOLD} if activation == "jumprelu" else {}),
        activation,
        optional={"skip": "W_skip"},
        ignored={"k"} if activation == "topk" else frozenset(),
        configs=(config,) if config.is_file() else (),
        below_zero="kept",
        k=whole_number(config, cfg, "k") if activation == "topk" else None,
        sites=_sites(layer, config, cfg),
        model=text(config, cfg, "model_name"),
    )


def _across(layer: int, file: Path, config: Path, cfg: Document) -> Draft:
    """One layer of a cross-layer transcoder."""
    beside = file.with_name(f"W_dec_{layer}.safetensors")
    if not beside.is_file():
        raise wrong(file, beside.name, "missing next to it", "the decoders of its features")
    weights, key = open_arrays(file), f"W_dec_{layer}"
    decoders = open_arrays(beside)
    written = decoders.shape(key, 3)[1]
    names = {at: f"{key}[:, {at}]" for at in range(written)}
    keys = {"w_enc": f"W_enc_{layer}", "w_dec": names[0], "b_enc": f"b_enc_{layer}", "b_dec": f"b_dec_{layer}"}
    threshold = f"threshold_{layer}"
    return Draft(
        weights,
        keys | ({"threshold": threshold} if threshold in weights.index else {}),
        "jumprelu" if threshold in weights.index else "relu",
        ignored={f"W_skip_{layer}"},
        configs=(config,),
        below_zero="kept",
        later=tuple({"w_dec": names[at]} for at in range(1, written)),
        decoders=decoders.split(key, 3, names, axis=1),
        sites=_sites(layer, config, cfg),
        can_reconstruct=False,
        model=text(config, cfg, "model_name"),
    )


def _sites(layer: int, config: Path, cfg: Document) -> Sites:
    hooks = (text(config, cfg, f"feature_{side}_hook") for side in ("input", "output"))
    read, written = aliases.pair(*(f"blocks.{layer}.{hook}" if hook else None for hook in hooks))
    model = text(config, cfg, "model_name")
    return aliases.added(read, model), aliases.added(written, model)


def _from_path(place: Path) -> Document:
    """What the config leaves out, as far as the repository's name tells."""
    parts = " ".join(place.absolute().parts)
    return {key: value for name, said in _UNSAID.items() if name in parts for key, value in said.items()}
