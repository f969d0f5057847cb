"""A ``manifest.json`` with one ``layer_{index}_{hook}.safetensors`` a site; it knows no other config.

    f = act(h @ encoder_weight.T + encoder_bias)
    delta: h += sum (f' - f) decoder_weight           full: h = f' @ decoder_weight + decoder_bias

Which features. A delta file holds the rows of ``clampable_features`` only, in that order, not the whole dictionary's.
The canonical record has those n rows, and ``info.feature_ids`` the original index of each; requests keep using original
indices (``info.row_of``). Filling the missing rows with zeros was rejected: clamping an absent feature would run, and
change nothing, in silence. For the same reason ``info.can_reconstruct`` is False: features and b_dec are not there.
A full file holds every feature, so every feature may be clamped and clampable_features restricts nothing.

TopK in delta mode is refused unless the manifest lists every feature: membership in the top k needs them all.
Scalar thresholds of old manifests (activation_params.threshold) are refused: a dictionary has one per feature.

Several sites: ``folder#layer_20_post_block`` or that file's path chooses; with one site the folder is enough. The
branch hooks mlp_in and mlp_out are named after another engine's module and do not say on which side of Gemma's norms
they lie: their sites are None, for the operator to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from saesteer.coder import Activation, CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders.arrays import Arrays, open_arrays
from saesteer.loaders.files import bytes_on_disk, fingerprint, read_json, whole_number, wrong

NAME = "manifest"
FILE = "manifest.json"
HOOKS: dict[str, str | None] = {
    "pre_attn": "resid_pre",
    "post_attn": "resid_mid",
    "post_block": "resid_post",
    "post_mlp": "resid_post",  # the older name
    "mlp_in": None,
    "mlp_out": None,
}
_REQUIRED = {"d_model", "d_sae", "activation", "layers", "clampable_features"}
_OPTIONAL = {"activation_params", "weights_uri", "kind"}
_TENSORS = {"encoder_weight", "encoder_bias", "decoder_weight"}


@dataclass(frozen=True, slots=True)
class _Site:
    """One site's opened file, and what the manifest says of it."""

    arrays: Arrays
    info: CoderInfo
    order: Tensor | None  # row of the file for each row of the dictionary, where the file's order is another


def matches(place: Path) -> bool:
    """A folder with ``manifest.json``, that file, or a layer file beside it."""
    return (place / FILE).is_file() if place.is_dir() else place.is_file() and (place.parent / FILE).is_file()


def describe(place: Path) -> CoderInfo:
    """The manifest and one site's headers; raises LoadError."""
    return _open(place).info


def read(place: Path, dtype: torch.dtype | None) -> SparseCoder:
    """The dictionary of one site with its matrices in dtype (None: as stored); raises LoadError."""
    site = _open(place)
    arrays, info = site.arrays, site.info
    dtype = dtype or arrays.dtype("encoder_weight", "decoder_weight")
    threshold = arrays.vector("threshold") if info.activation == "jumprelu" else None
    if threshold is not None and (threshold < 0).any():
        raise wrong(arrays.path, "threshold", f"holds {threshold.min().item()}", "values of 0 or more")

    def ordered(rows: Tensor) -> Tensor:
        return rows if site.order is None else rows[site.order]

    return SparseCoder(
        w_enc=ordered(arrays.matrix("encoder_weight", (info.features, info.d_in), dtype)),
        b_enc=ordered(arrays.vector("encoder_bias")),
        w_dec=ordered(arrays.matrix("decoder_weight", (info.features, info.d_out), dtype)),
        b_dec=arrays.vector("decoder_bias") if "decoder_bias" in arrays.entries else torch.zeros(info.d_out),
        info=info,
        threshold=None if threshold is None else ordered(threshold),
    )


def _open(place: Path) -> _Site:
    file = (place if place.is_dir() else place.parent) / FILE
    manifest = read_json(file)
    for key in sorted(_REQUIRED - manifest.keys()):
        raise wrong(file, key, "missing", f"all of {', '.join(sorted(_REQUIRED))}")
    for key in sorted(manifest.keys() - _REQUIRED - _OPTIONAL):
        raise wrong(file, key, "an unknown key", f"only {', '.join(sorted(_REQUIRED | _OPTIONAL))}")
    if manifest.get("weights_uri") is not None:
        raise wrong(file, "weights_uri", repr(manifest["weights_uri"]), "null: weights come from the folder")
    kind = manifest.get("kind", "sae_delta")
    if kind not in ("sae_delta", "sae_full_reconstruction"):
        raise wrong(file, "kind", repr(kind), "sae_delta or sae_full_reconstruction")
    d_model, d_sae = whole_number(file, manifest, "d_model"), whole_number(file, manifest, "d_sae")
    full = kind == "sae_full_reconstruction"
    clampable = _clampable(file, manifest, d_sae)
    complete = full or len(clampable) == d_sae
    rows = d_sae if full else len(clampable)
    activation, k = _activation(file, manifest, rows, complete)
    layer, hook = _choose(file, place, _sites(file, manifest))
    weights = file.parent / f"layer_{layer}_{hook}.safetensors"
    if not weights.is_file():
        raise wrong(file, "layers", f"[{layer}, {hook!r}] without its file", f"{weights.name} beside it")
    arrays = open_arrays(weights)
    arrays.expect(
        _TENSORS | ({"threshold"} if activation == "jumprelu" else set()) | ({"decoder_bias"} if full else set()),
    )
    for key in sorted(arrays.entries):
        if key == "decoder_bias":
            arrays.check(key, (d_model,), "[d_model]")
        elif key.endswith("weight"):
            arrays.check(key, (rows, d_model), "[features, d_model]")
        else:
            arrays.check(key, (rows,), "[features]")
    kind_of_site = HOOKS[hook]
    name = None if kind_of_site is None else f"{kind_of_site}.{layer}"
    in_order = complete or clampable == tuple(range(rows))
    info = CoderInfo(
        format=NAME,
        d_in=d_model,
        d_out=d_model,
        features=rows,
        activation=activation,
        k=k,
        site_in=name,
        site_out=name,
        source=str(place),
        fingerprint=fingerprint([file, weights]),
        feature_ids=None if in_order else clampable,
        can_reconstruct=full,
        stored_dtype=str(arrays.dtype("encoder_weight", "decoder_weight")).removeprefix("torch."),
        bytes_on_disk=bytes_on_disk([file, weights]),
    )
    shuffled = not full and complete and clampable != tuple(range(rows))
    return _Site(arrays, info, torch.tensor(clampable).argsort() if shuffled else None)


def _clampable(file: Path, manifest: dict[str, Any], d_sae: int) -> tuple[int, ...]:
    ids = manifest["clampable_features"]
    if not isinstance(ids, list) or not ids:
        raise wrong(file, "clampable_features", repr(ids), "a list of at least one feature")
    for feature in ids:
        if type(feature) is not int or not 0 <= feature < d_sae:
            raise wrong(file, "clampable_features", repr(feature), f"whole numbers from 0 to {d_sae - 1}")
    if len(set(ids)) < len(ids):
        raise wrong(file, "clampable_features", "a feature twice", "each feature once")
    return tuple(ids)


def _activation(file: Path, manifest: dict[str, Any], rows: int, complete: bool) -> tuple[Activation, int | None]:
    activation, params = manifest["activation"], manifest.get("activation_params") or {}
    if activation not in ("relu", "jumprelu", "topk"):
        raise wrong(file, "activation", repr(activation), "relu, jumprelu or topk")
    if not isinstance(params, dict):
        raise wrong(file, "activation_params", repr(params), "a JSON object")
    if activation != "topk":
        for key in params:
            raise wrong(file, f"activation_params.{key}", repr(params[key]), f"nothing there for {activation}")
        return cast(Activation, activation), None
    if not complete:
        raise wrong(
            file,
            "activation",
            "topk over a part of the features",
            "every feature: a rank inside a subset is not the rank",
        )
    if set(params) != {"k"} or whole_number(file, params, "k") > rows:
        raise wrong(file, "activation_params", repr(params), f"k alone, from 1 to {rows}")
    return "topk", params["k"]


def _sites(file: Path, manifest: dict[str, Any]) -> list[tuple[int, str]]:
    layers = manifest["layers"]
    if not isinstance(layers, list) or not layers:
        raise wrong(file, "layers", repr(layers), "a list of at least one [layer, hook]")
    for item in layers:
        good = isinstance(item, list) and len(item) == 2 and type(item[0]) is int and item[0] >= 0
        if not good or item[1] not in list(HOOKS):
            raise wrong(file, "layers", repr(item), f"[layer, hook] with a hook among {', '.join(HOOKS)}")
    sites = [(layer, hook) for layer, hook in layers]
    if len(set(sites)) < len(sites):
        raise wrong(file, "layers", "a site twice", "each [layer, hook] once")
    return sites


def _choose(file: Path, place: Path, sites: list[tuple[int, str]]) -> tuple[int, str]:
    names = {f"layer_{layer}_{hook}": (layer, hook) for layer, hook in sites}
    known = ", ".join(f"{file.parent}#{name}" for name in names)
    if place.suffix == ".safetensors":
        if place.stem not in names:
            raise wrong(file, "layers", f"nothing about {place.name}", f"one of {known}")
        return names[place.stem]
    if len(sites) > 1:
        raise LoadError(f"{file}: layers: {len(sites)} sites and none chosen; expected a place such as {known}")
    return sites[0]
