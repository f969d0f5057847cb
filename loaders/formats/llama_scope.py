"""Llama Scope 1 of OpenMOSS: ``hyperparams.json`` + ``checkpoints/final.safetensors``; it knows no later release.

    fi = sqrt(d) / dataset_average_activation_norm.in        fo = sqrt(d) / dataset_average_activation_norm.out
    b_enc /= fi        W_dec *= fi / fo        b_dec /= fo        then the decoder's row lengths go into the encoder
    f = pre * (pre > jump_relu_threshold)        y = f @ W_dec + b_dec

So OpenMOSS reads its files: feature values are raw, and the one threshold is about unit decoder rows. It takes the
place of an act_fn topk, too. SAELens works in scaled units and leaves the row lengths alone, so its values, and which
features are active, differ. The output of the transcoders is said to be hook_mlp_out; the files were not seen.
"""

from pathlib import Path

from saesteer.loaders import aliases, sizes
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import only, positive, read_json, section, text, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("hyperparams.json", "checkpoints/final.safetensors")
_KEYS = {"w_enc": "encoder.weight", "w_dec": "decoder.weight", "b_enc": "encoder.bias"}
# What the formula above takes for granted.
_TAKEN = {
    "use_glu_encoder": False,
    "norm_activation": "dataset-wise",
    "sparsity_include_decoder_norm": True,
    "apply_decoder_bias_to_pre_encoder": False,
}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files; None for other places. Raises LoadError."""
    config, file = (place / name for name in FILES)
    if not place.is_dir() or not config.is_file() or not file.is_file():
        return None
    cfg = read_json(config)
    if cfg.get("act_fn") not in ("jumprelu", "topk"):
        raise wrong(config, "act_fn", repr(cfg.get("act_fn")), "jumprelu, or topk with a threshold")
    only(config, cfg, _TAKEN)
    average = section(config, cfg, "dataset_average_activation_norm")
    read = text(config, cfg, "hook_point_in")
    return Draft(
        open_arrays(file),
        _KEYS,
        "jumprelu",
        optional={"b_dec": "decoder.bias"},
        transposed={"w_dec"},
        configs=(config,),
        sizes=sizes.named(config, cfg, "d_sae", "d_model"),
        decoder_norm="values",
        lengths=(positive(config, average, "in"), positive(config, average, "out")),
        threshold=positive(config, cfg, "jump_relu_threshold"),
        sites=aliases.pair(read, text(config, cfg, "hook_point_out") or read),
        model="meta-llama/Llama-3.1-8B",
    )
