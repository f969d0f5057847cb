"""Gemma Scope 2: ``params.safetensors``, mostly with ``config.json``, or a cross-layer transcoder's folder.

    pre = x @ w_enc + b_enc        f = relu(pre) * (pre > threshold)
    y = f @ w_dec + b_dec (+ x @ affine_skip_connection, not transposed)

Nothing is subtracted from the input or normalised. The folder attn_out holds dictionaries of z. Transcoders read the
MLP's input behind the norm's gain (those of Gemma Scope 1 read it before the gain). Without a config, the repository's
and the folder's name in the path give model and sites. Affine transcoders are described only.

A cross-layer transcoder has ``params_layer_{i}.safetensors`` with w_dec [F, layers, d], whose part m is written at
layer m; parts before layer i mean nothing. It reads and writes where transcoders do. A crosscoder has the same files,
so the config's type or the folder's name must tell; it is refused.
"""

import re
from pathlib import Path

from saesteer.loaders import aliases
from saesteer.loaders.draft import Draft, Sites
from saesteer.loaders.files import Document, numbered, positive, read_json, text, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("params.safetensors", "config.json", "params_layer_*.safetensors")
_KEYS = {key: key for key in ("w_enc", "w_dec", "b_enc", "b_dec", "threshold")}
_REPOSITORY = re.compile(r"gemma-scope-2-(\d+[mb])-(pt|it)\Z")
_KIND = re.compile(r"(resid_post|attn_out|mlp_out|transcoder)(?:_all)?")
_LAYER = re.compile(r"layer_(\d+)_width_\w+")
_SET = re.compile(r"params_layer_(\d+)\.safetensors")
_SITES = {"transcoder": ("mlp_in", "mlp_out"), "attn_out": ("z", "z")}  # the other folders are named after their site


def draft(place: Path) -> Draft | list[Draft] | None:
    """The draft of a folder with ``params.safetensors``, of that file or of a layer's file, or those of all layers.

    None for other places. Raises LoadError.
    """
    folder = place if place.is_dir() else place.parent
    file, config = (folder / name for name in FILES[:2])
    if layers := numbered(place, _SET):
        return [_across(layer, one, config) for layer, one in layers]
    if place not in (folder, file, config) or not file.is_file():
        return None
    weights = open_arrays(file)
    sites, model = _from_path(file.absolute().parts)
    cfg = read_json(config) if config.is_file() else {}
    if config.is_file():
        sites, model = _from_config(config, cfg, sites, model)
    return Draft(
        weights,
        _KEYS,
        "jumprelu",
        optional={"skip": "affine_skip_connection"},
        transposed={"w_enc", "skip"},
        configs=(config,) if config.is_file() else (),
        below_zero="raised",
        sites=sites,
        model=model,
        l0=None if cfg.get("l0") is None else positive(config, cfg, "l0"),
    )


def _across(layer: int, file: Path, config: Path) -> Draft:
    """One layer of a cross-layer transcoder."""
    cfg = read_json(config) if config.is_file() else {}
    parts = file.absolute().parts
    kind = text(config, cfg, "type") or next((part for part in parts[::-1] if part in ("clt", "crosscoder")), None)
    if kind != "clt":
        found = f"{kind!r}, by config.json or the folders' names"
        raise wrong(file, "type", found, "'clt': a crosscoder, which reads several places at once, has the same files")
    weights = open_arrays(file)
    last = weights.shape("w_dec", 3)[1]
    if layer >= last:
        raise wrong(file, "w_dec", f"decoders for {last} layers", f"more than {layer}, as this is layer {layer}")
    names = {at: f"w_dec[:, {at}]" for at in range(layer, last)}
    name = text(config, cfg, "model_name")
    return Draft(
        weights.split("w_dec", 3, names, axis=1),
        _KEYS | {"w_dec": names[layer]},
        "jumprelu",
        optional={"skip": "affine_skip_connection"},
        transposed={"w_enc", "skip"},
        configs=(config,) if config.is_file() else (),
        below_zero="raised",
        later=tuple({"w_dec": names[at]} for at in range(layer + 1, last)),
        sites=(f"mlp_in.{layer}", f"mlp_out.{layer}"),
        can_reconstruct=False,
        model=_model(name.removeprefix("google/")) if name else _from_path(parts)[1],
        l0=None if cfg.get("l0") is None else positive(config, cfg, "l0"),
    )


def _from_config(file: Path, cfg: Document, sites: Sites, model: str | None) -> tuple[Sites, str | None]:
    """What the config says, and for what it leaves out, what the path says."""
    for key, known in (("architecture", ("jump_relu",)), ("type", ("sae", "transcoder"))):
        if cfg.get(key, known[0]) not in known:
            raise wrong(file, key, repr(cfg[key]), f"{' or '.join(known)}: others are not served")
    hooks = [text(file, cfg, f"hf_hook_point_{side}") for side in ("in", "out")]
    read, written = (aliases.from_hugging_face(hook) if hook else None for hook in hooks)
    if name := text(file, cfg, "model_name"):
        model = _model(name.removeprefix("google/"))
    if hooks[0]:
        sites = read, read if not hooks[1] and cfg.get("type") != "transcoder" else written
    return sites, model


def _from_path(parts: tuple[str, ...]) -> tuple[Sites, str | None]:
    found = [match for part in parts if (match := _REPOSITORY.search(part))]
    model = _model(f"gemma-3-{found[-1][1]}-{found[-1][2]}") if found else None
    kind, layer = _KIND.fullmatch(parts[-3]) if len(parts) > 2 else None, _LAYER.fullmatch(parts[-2])
    if kind is None or layer is None:
        return (None, None), model
    read, written = _SITES.get(kind[1], (kind[1], kind[1]))
    return (f"{read}.{int(layer[1])}", f"{written}.{int(layer[1])}"), model


def _model(name: str) -> str:
    """The hub's name of a model; that of the smallest base model has no suffix."""
    name = name.replace("-v3", "-3")
    return f"google/{name.removesuffix('-pt') if '270m' in name else name}"
