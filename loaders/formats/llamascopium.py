"""llamascopium's own files (OpenMOSS, Llama Scope 2): ``config.json`` with sae_type + ``sae_weights.safetensors``.

    xn = x, x * sqrt(d) / |x| (token-wise) or x * sqrt(d) / dataset_average_activation_norm (dataset-wise)
    pre = xn @ W_E + b_E        f = act(pre * n) / n, n = |W_D_i| with sparsity_include_decoder_norm, else 1
    yn = f @ W_D + b_D          y = yn, taken back out of its own norm

A jumprelu's gate is pre * n > exp(log_jumprelu_threshold), and f = pre. Top-k values are f * n: their ranking is about
unit decoder rows. Dataset-wise values become raw. A transcoder is an SAE with two hooks; it knows no cross-layer
dictionary, no Lorsa and no gated linear unit, which are refused, and batch-wise top-k depends on the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases
from saesteer.loaders.arrays import open_arrays
from saesteer.loaders.draft import Axis, Draft
from saesteer.loaders.files import flag, only, positive, read_json, text, whole_number, wrong

FILES = ("config.json", "sae_weights.safetensors")
_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "jumprelu": "jumprelu", "topk": "topk"}
_AVERAGE = "dataset_average_activation_norm"
_NORMS = ("inference", "token-wise", "dataset-wise")
_BY_NORM: dict[Activation, Literal["gates", "values"]] = {"jumprelu": "gates", "topk": "values"}
_REFUSED = {
    "clt": "it writes to several layers, which is not served yet",
    "crosscoder": "it reads several places at once",
    "lorsa": "its features attend over earlier positions",
    "molt": "it is a bank of transforms",
}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files, or of one of the two; None for other places. Raises LoadError."""
    config, file = ((place if place.is_dir() else place.parent) / name for name in FILES)
    if not (place.is_dir() or place.name in FILES) or not config.is_file() or not file.is_file():
        return None
    cfg = read_json(config)
    if "sae_type" not in cfg:
        return None
    if (kind := text(config, cfg, "sae_type")) != "sae":
        raise wrong(config, "sae_type", f"{kind!r} ({_REFUSED.get(str(kind), 'unknown')})", "'sae'")
    only(config, cfg, {"use_glu_encoder": False})
    activation = _ACTIVATIONS[_one_of(config, cfg, "act_fn", tuple(_ACTIVATIONS))]
    norm = _one_of(config, cfg, "norm_activation", _NORMS)
    hooks = text(config, cfg, "hook_point_in"), text(config, cfg, "hook_point_out")
    if norm == "token-wise" and hooks[0] != hooks[1]:
        raise wrong(config, "norm_activation", "token-wise in a transcoder", "a norm that the files hold")
    keys = {"w_enc": "W_E", "w_dec": "W_D", "b_enc": "b_E"}
    if flag(config, cfg, "use_decoder_bias", default=True):
        keys["b_dec"] = "b_D"
    if activation == "jumprelu":
        keys["log_threshold"] = "activation_function.log_jumprelu_threshold"
    if norm == "dataset-wise":
        keys |= {"length_in": f"{_AVERAGE}.{hooks[0]}", "length_out": f"{_AVERAGE}.{hooks[1]}"}
    by_norm = flag(config, cfg, "sparsity_include_decoder_norm", default=True)
    width = Axis("d_model", whole_number(config, cfg, "d_model"))
    features = int(width.size * positive(config, cfg, "expansion_factor"))
    weights = open_arrays(file)
    return Draft(
        weights,
        keys,
        activation,
        # Always there: without a fixed scale, they are whatever was in memory when the file was saved.
        ignored={key for key in weights.index if key.startswith(_AVERAGE)},
        transposed={"w_enc"},
        configs=(config,),
        sizes=(Axis("d_model * expansion_factor", features), width, width),
        decoder_norm=_BY_NORM.get(activation, "kept") if by_norm else "kept",
        k=whole_number(config, cfg, "top_k") if activation == "topk" else None,
        in_norm="l2_sqrt_d" if norm == "token-wise" else "none",
        feature_unit="normalised" if norm == "token-wise" else "raw",
        sites=aliases.pair(*hooks),
    )


def _one_of(file: Path, cfg: dict[str, Any], key: str, known: tuple[str, ...]) -> str:
    if cfg.get(key) not in known:
        raise wrong(file, key, repr(cfg.get(key)), f"one of {', '.join(known)}")
    return str(cfg[key])
