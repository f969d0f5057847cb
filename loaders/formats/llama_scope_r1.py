"""Llama Scope R1-Distill of OpenMOSS: ``config.json`` + ``sae_weights.safetensors`` with linear layers' names.

    s = sqrt(d) / dataset_average_activation_norm        pre = (x * s) @ W_enc + b_enc
    f = pre * (pre * |W_dec_i| > exp(log_jumprelu_threshold))        y = (f @ W_dec + b_dec) / s

Without sparsity_include_decoder_norm, pre alone is compared. Feature values become raw: f / s. It knows neither Llama
Scope 1, whose threshold is one number, nor llamascopium, whose files have the same names. SAELens does not multiply by
the row length in the gate, so other features are active there.
"""

from pathlib import Path

from saesteer.loaders import aliases, sizes
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import both, flag, only, read_json, text
from saesteer.loaders.opening import open_arrays

FILES = ("config.json", "sae_weights.safetensors")
_KEYS = {"w_enc": "encoder.weight", "w_dec": "decoder.weight", "b_enc": "encoder.bias", "b_dec": "decoder.bias"}
# What the formula above takes for granted.
_TAKEN = {
    "sae_type": "sae",
    "act_fn": "jumprelu",
    "norm_activation": "dataset-wise",
    "apply_decoder_bias_to_pre_encoder": False,
}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files, or of one of the two; None for other places. Raises LoadError."""
    if (found := both(place, FILES)) is None:
        return None
    config, file = found
    cfg = read_json(config)
    weights = open_arrays(file)
    if "hook_point_in" not in cfg or not any(key.startswith("encoder.") for key in weights.index):
        return None
    only(config, cfg, _TAKEN)
    hook = text(config, cfg, "hook_point_in")
    length = f"dataset_average_activation_norm.{hook}"
    return Draft(
        weights,
        _KEYS | {"log_threshold": "log_jumprelu_threshold", "length_in": length, "length_out": length},
        "jumprelu",
        ignored={key for key in weights.index if key.startswith("dataset_average_activation_norm.")},
        transposed={"w_dec"},
        configs=(config,),
        sizes=sizes.expanded(config, cfg),
        decoder_norm="gates" if flag(config, cfg, "sparsity_include_decoder_norm", default=True) else "kept",
        sites=aliases.pair(hook, text(config, cfg, "hook_point_out") or hook),
    )
