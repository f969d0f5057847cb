"""A ``manifest.json`` with a ``layer_{index}_{hook}.safetensors`` for each site; knows no other config.

    f = act(h @ encoder_weight.T + encoder_bias)
    delta: h += sum (f' - f) decoder_weight           full: h = f' @ decoder_weight + decoder_bias

Features: a delta file holds only the rows of ``clampable_features``, in that order. The dictionary has these n rows,
and ``info.feature_ids`` their original indices, which requests keep using (``info.row_of``). The missing rows are not
filled with zeros, because a clamp of an absent feature would silently change nothing. ``info.can_reconstruct`` is
False, because features and b_dec are missing. A full file holds every feature, so all of them can be clamped.

TopK in delta mode is refused unless the manifest lists every feature, since all of them decide what the top k are.
Scalar thresholds of old manifests (activation_params.threshold) are refused: a dictionary has one for each feature.

Several sites: a folder has a draft for each; ``folder#layer_20_post_block`` or the file's path chooses one. The
hooks mlp_in and mlp_out are named after another engine's module and leave open on which side of Gemma's norms they
lie, so their sites are None, and the operator names them.
"""

from pathlib import Path

import torch

from saesteer.dictionaries.coder import Activation
from saesteer.loaders.draft import Axis, Draft
from saesteer.loaders.files import Document, read_json, section, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("manifest.json", "layer_*[a-z].safetensors")  # layer_3.safetensors is one of another format's set
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


def draft(place: Path) -> list[Draft] | None:
    """The drafts of a folder with ``manifest.json``, one for each site, or of a file there. Raises LoadError."""
    file = (place if place.is_dir() else place.parent) / FILES[0]
    if not file.is_file():
        return None
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
    in_order = full or clampable == tuple(range(rows))
    activation, k = _activation(file, manifest, rows, complete)
    keys = {"w_dec": "decoder_weight", "w_enc": "encoder_weight", "b_enc": "encoder_bias"}
    keys |= {"threshold": "threshold"} if activation == "jumprelu" else {}
    keys |= {"b_dec": "decoder_bias"} if full else {}
    drafts = []
    for layer, hook in _chosen(file, place, _sites(file, manifest)):
        weights = file.parent / f"layer_{layer}_{hook}.safetensors"
        if not weights.is_file():
            raise wrong(file, "layers", f"[{layer}, {hook!r}] without its file", f"{weights.name} next to it")
        site = None if HOOKS[hook] is None else f"{HOOKS[hook]}.{layer}"
        drafts.append(
            Draft(
                open_arrays(weights),
                keys,
                activation,
                configs=(file,),
                sizes=(Axis("features", rows), Axis("d_model", d_model), Axis("d_model", d_model)),
                unmistakable=True,
                order=torch.tensor(clampable).argsort() if complete and not in_order else None,
                k=k,
                sites=(site, site),
                feature_ids=None if complete or in_order else clampable,
                can_reconstruct=full,
            )
        )
    return drafts


def _clampable(file: Path, manifest: Document, d_sae: int) -> tuple[int, ...]:
    ids = manifest["clampable_features"]
    if not isinstance(ids, list) or not ids:
        raise wrong(file, "clampable_features", repr(ids), "a list of at least one feature")
    for feature in ids:
        if type(feature) is not int or not 0 <= feature < d_sae:
            raise wrong(file, "clampable_features", repr(feature), f"whole numbers from 0 to {d_sae - 1}")
    if len(set(ids)) < len(ids):
        raise wrong(file, "clampable_features", "a feature twice", "each feature once")
    return tuple(ids)


def _activation(file: Path, manifest: Document, rows: int, complete: bool) -> tuple[Activation, int | None]:
    activation = manifest["activation"]
    if activation not in ("relu", "jumprelu", "topk"):
        raise wrong(file, "activation", repr(activation), "relu, jumprelu or topk")
    params = section(file, manifest, "activation_params") if manifest.get("activation_params") else {}
    if activation != "topk":
        for key in params:
            raise wrong(file, f"activation_params.{key}", repr(params[key]), f"nothing there for {activation}")
        return activation, None
    if not complete:
        rank = "every feature: a rank inside a subset is not the rank"
        raise wrong(file, "activation", "topk over a part of the features", rank)
    if set(params) != {"k"} or whole_number(file, params, "k") > rows:
        raise wrong(file, "activation_params", repr(params), f"k alone, from 1 to {rows}")
    return "topk", params["k"]


def _sites(file: Path, manifest: Document) -> list[tuple[int, str]]:
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


def _chosen(file: Path, place: Path, sites: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """All sites of a folder, or the site of a file."""
    names = {f"layer_{layer}_{hook}": (layer, hook) for layer, hook in sites}
    known = ", ".join(f"{file.parent}#{name}" for name in names)
    if place.suffix == ".safetensors":
        if place.stem not in names:
            raise wrong(file, "layers", f"nothing about {place.name}", f"one of {known}")
        return [names[place.stem]]
    return sites
