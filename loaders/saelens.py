"""SAELens' own files, ``cfg.json`` + ``sae_weights.safetensors``, in both generations of cfg; it knows no registry.

    xn = in_norm(x)        xs = xn - b_dec (if apply_b_dec_to_input)
    pre = xs @ W_enc + b_enc        y = un_norm(act(pre) @ W_dec + b_dec)

standard: relu. jumprelu: relu(pre) where pre > threshold, so a threshold below 0 is 0. topk: with
rescale_acts_by_decoder_norm on pre * |W_dec_i|, decoded by unit rows. gated: becomes a jumprelu. The subtraction and
the factors are folded into the weights. Per-token norms stay in ``info.in_norm``; feature values are then normalised.

Refused by name, with the reason in the message: fixed scales that the files do not hold (expected_average_only_in,
covariance_whitening), one head of z, transcoders, and every architecture that is not one matrix and one activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saesteer.coder import Activation, CoderInfo, InNorm, SparseCoder
from saesteer.loaders import folds, hooks
from saesteer.loaders.arrays import Arrays, open_arrays
from saesteer.loaders.files import SQUARE, bytes_on_disk, fingerprint, read_json, text, whole_number, wrong

NAME = "saelens"
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_ACTIVATIONS: dict[str, Activation] = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "gated": "jumprelu"}
_BIASES = {"gated": {"b_gate", "b_mag", "r_mag"}}
_REFUSED = {
    "abstopk": "keeps negative activations",
    "matching_pursuit": "its encoder is iterative",
    "temporal": "it attends over earlier positions",
    "batchtopk": "what is active depends on the batch: save it for inference, as jumprelu",
    "matryoshka_batchtopk": "what is active depends on the batch: save it for inference, as jumprelu",
    "transcoder": "SAELens transcoders are not served yet",
    "jumprelu_transcoder": "SAELens transcoders are not served yet",
    "skip_transcoder": "SAELens transcoders are not served yet",
    "jumprelu_skip_transcoder": "SAELens transcoders are not served yet",
}
_NORMS: dict[str, InNorm] = {"none": "none", "layer_norm": "layer_norm", "constant_norm_rescale": "l2_sqrt_d"}
_NO_NORM = {
    "expected_average_only_in": "its constant is not in the files: save the SAE with the scale folded in",
    "covariance_whitening": "the whitening is not folded in: save the SAE for inference",
}
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


@dataclass(frozen=True, slots=True)
class _Config:
    """What both generations of cfg.json say."""

    architecture: str
    d_in: int
    features: int
    k: int | None
    in_norm: InNorm
    subtract_b_dec: bool
    rescale: bool
    site: str | None
    model: str | None


def matches(place: Path) -> bool:
    """A folder with both files, or one of the two."""
    folder = place if place.is_dir() else place.parent
    named = place.is_dir() or place.name in (CONFIG, WEIGHTS)
    return named and (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def describe(place: Path) -> CoderInfo:
    """cfg.json and the headers; raises LoadError."""
    return _open(place)[2]


def read(place: Path, dtype: torch.dtype | None) -> SparseCoder:
    """The dictionary with its matrices in dtype (None: as stored); raises LoadError."""
    cfg, arrays, info = _open(place)
    if "scaling_factor" in arrays.entries and not (arrays.vector("scaling_factor") == 1).all():
        raise wrong(arrays.path, "scaling_factor", "not all ones", "ones: another scale of the features is not served")
    dtype = dtype or arrays.dtype("W_enc", "W_dec")
    b_dec, enc_scale, dec_scale, threshold = arrays.vector("b_dec"), None, None, None
    if cfg.architecture == "gated":
        enc_scale, b_enc, threshold = folds.gated(*(arrays.vector(key) for key in ("b_gate", "b_mag", "r_mag")))
    else:
        b_enc = arrays.vector("b_enc")
    if cfg.architecture == "jumprelu":
        threshold = _threshold(arrays)
    if cfg.rescale:
        enc_scale, dec_scale = folds.to_decoder_norm(arrays.row_norms("W_dec"))
        b_enc = b_enc * enc_scale
    w_enc = arrays.matrix("W_enc", (info.features, info.d_in), dtype, transpose=True, scale=enc_scale)
    if cfg.subtract_b_dec:
        b_enc = folds.subtract_from_input(w_enc, b_enc, b_dec)
    return SparseCoder(
        w_enc=w_enc,
        b_enc=b_enc,
        w_dec=arrays.matrix("W_dec", (info.features, info.d_out), dtype, scale=dec_scale),
        b_dec=b_dec,
        info=info,
        threshold=threshold,
    )


def _threshold(arrays: Arrays) -> Tensor:
    if "threshold" in arrays.entries:
        return arrays.vector("threshold").clamp_min(0)
    return arrays.vector("log_threshold").exp()


def _open(place: Path) -> tuple[_Config, Arrays, CoderInfo]:
    folder = place if place.is_dir() else place.parent
    cfg = _config(folder / CONFIG)
    arrays = open_arrays(folder / WEIGHTS)
    required = {"W_enc", "W_dec", "b_dec"} | _BIASES.get(cfg.architecture, {"b_enc"})
    if cfg.architecture == "jumprelu":
        required |= {"log_threshold"} if "log_threshold" in arrays.entries else {"threshold"}
    arrays.expect(required, {"scaling_factor"})
    arrays.check("W_enc", (cfg.d_in, cfg.features), "[d_in, d_sae]")
    arrays.check("W_dec", (cfg.features, cfg.d_in), "[d_sae, d_in]")
    arrays.check("b_dec", (cfg.d_in,), "[d_in]")
    for key in sorted(arrays.entries.keys() - {"W_enc", "W_dec", "b_dec"}):
        arrays.check(key, (cfg.features,), "[d_sae]")
    if cfg.features == cfg.d_in:
        raise wrong(arrays.path, "W_enc", f"shape {[cfg.d_in] * 2}", SQUARE)
    files = [folder / CONFIG, folder / WEIGHTS]
    info = CoderInfo(
        format=NAME,
        d_in=cfg.d_in,
        d_out=cfg.d_in,
        features=cfg.features,
        activation=_ACTIVATIONS[cfg.architecture],
        k=cfg.k,
        in_norm=cfg.in_norm,
        site_in=cfg.site,
        site_out=cfg.site,
        feature_unit="raw" if cfg.in_norm == "none" else "normalised",
        source=str(place),
        fingerprint=fingerprint(files),
        model=cfg.model,
        stored_dtype=str(arrays.dtype("W_enc", "W_dec")).removeprefix("torch."),
        bytes_on_disk=bytes_on_disk(files),
    )
    return cfg, arrays, info


def _config(file: Path) -> _Config:
    cfg = read_json(file)
    if "metadata" in cfg:
        if not isinstance(cfg["metadata"], dict):
            raise wrong(file, "metadata", repr(cfg["metadata"]), "a JSON object")
        about = cfg["metadata"]
    else:
        cfg = _modern(file, cfg)
        about = cfg
    architecture = text(file, cfg, "architecture")
    if architecture not in _ACTIVATIONS:
        why = _REFUSED.get(str(architecture), "an architecture this loader does not know")
        raise wrong(file, "architecture", f"{architecture!r} ({why})", f"one of {', '.join(_ACTIVATIONS)}")
    if cfg.get("activation_fn", "relu") not in ("relu", "topk" if architecture == "topk" else "relu"):
        raise wrong(file, "activation_fn", repr(cfg["activation_fn"]), "relu, or topk with its k")
    features = whole_number(file, cfg, "d_sae")
    k = whole_number(file, cfg, "k") if architecture == "topk" else None
    if k is not None and k > features:
        raise wrong(file, "k", k, f"at most d_sae = {features}")
    return _Config(
        architecture=architecture,
        d_in=whole_number(file, cfg, "d_in"),
        features=features,
        k=k,
        in_norm=_in_norm(file, cfg),
        subtract_b_dec=_flag(file, cfg, "apply_b_dec_to_input", default=True),
        rescale=architecture == "topk" and _flag(file, cfg, "rescale_acts_by_decoder_norm", default=False),
        site=_site(file, cfg, about),
        model=text(file, about, "model_name"),
    )


def _modern(file: Path, flat: dict[str, Any]) -> dict[str, Any]:
    """A flat cfg from before version 6 in today's words."""
    cfg = {_OLD_NAMES.get(key, key): value for key, value in flat.items()}
    cfg = {"architecture": "standard"} | cfg
    if cfg["architecture"] == "standard" and cfg.get("activation_fn") == "topk":
        params = cfg.get("activation_fn_kwargs")
        if not isinstance(params, dict):
            raise wrong(file, "activation_fn_kwargs", repr(params), "a JSON object with k")
        cfg |= {"architecture": "topk", "k": params.get("k")}
    if isinstance(cfg.get("normalize_activations"), bool):
        cfg["normalize_activations"] = "expected_average_only_in" if cfg["normalize_activations"] else "none"
    return cfg


def _in_norm(file: Path, cfg: dict[str, Any]) -> InNorm:
    name = cfg.get("normalize_activations") or "none"
    if not isinstance(name, str) or name not in _NORMS:
        why = _NO_NORM.get(str(name), "a normalisation this loader does not know")
        raise wrong(file, "normalize_activations", f"{name!r} ({why})", f"one of {', '.join(_NORMS)}")
    return _NORMS[name]


def _flag(file: Path, cfg: dict[str, Any], key: str, *, default: bool) -> bool:
    value = cfg.get(key, default)
    if not isinstance(value, bool):
        raise wrong(file, key, repr(value), "true or false")
    return value


def _site(file: Path, cfg: dict[str, Any], about: dict[str, Any]) -> str | None:
    name, hf_name = text(file, about, "hook_name"), text(file, about, "hf_hook_name")
    if about.get("hook_head_index") is not None:
        raise wrong(file, "hook_head_index", repr(about["hook_head_index"]), "null: one head alone is not a site")
    site = hooks.from_transformer_lens(name) if name else None
    hf_site = hooks.from_hugging_face(hf_name) if hf_name else None
    if site and hf_site and site != hf_site:
        raise wrong(file, "hf_hook_name", f"{hf_name} is {hf_site}, hook_name {name} is {site}", "one place")
    if name and not hf_site and hooks.is_ambiguous(name):
        raise wrong(file, "hook_name", f"{name}, on either side of the norm", "an hf_hook_name beside it")
    reshape = cfg.get("reshape_activations") or "none"
    if reshape != "none" and not (reshape == "hook_z" and str(hf_site or site).startswith("z.")):
        raise wrong(file, "reshape_activations", repr(reshape), "none, or hook_z at a hook_z")
    return hf_site or site
