"""Files of OpenAI's GPT-2 autoencoders and what they mean: TopK with a layer norm, ReLU without."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, affine, relu, topk
from tests.loaders.writers import F

R = writers.raw(seed=18)
K = 5
ARRAYS = {
    "pre_bias": R["b_dec"],
    "latent_bias": R["b_enc"],
    "encoder.weight": R["W_enc"].T,
    "decoder.weight": R["W_dec"].T,
}
TOP_K: dict[str, Any] = {"activation": "TopK", "activation_state_dict": {"k": K, "postact_fn": "ReLU"}}
# torch 2.13 repeats what the activation says of itself.
STATISTICS: dict[str, Any] = {
    "activation.k": K,
    "stats_last_nonzero": np.arange(F),
    "latents_activation_frequency": np.ones(F, np.float32),
    "latents_mean_square": np.ones(F, np.float32),
}


pre, plain = affine(R)


def layer_norm(x: Array) -> tuple[Array, Array, Array]:
    mean, std = x.mean(-1, keepdims=True), x.std(-1, ddof=1, keepdims=True)
    return (x - mean) / (std + 1e-5), mean, std


def write(folder: Path, arrays: dict[str, Any]) -> Path:
    return writers.torch_file(folder / "7.pt", arrays)


def cases() -> list[Case]:
    def normed(x: Array) -> Array:
        return topk(pre(layer_norm(x)[0] - R["b_dec"]), K)

    def un_normed(f: Array, x: Array) -> Array:
        _, mean, std = layer_norm(x)
        return np.asarray(plain(f, x) * std + mean)

    def case(name: str, place: str, site: str | None, top_k: bool = False) -> Case:
        norm = {"in_norm": "layer_norm", "feature_unit": "normalised", "k": K} if top_k else {"in_norm": "none"}
        facts = {"activation": "topk" if top_k else "relu", "site_in": site, "site_out": site}
        stored = ARRAYS | STATISTICS | (TOP_K if top_k else {})
        return Case(
            f"openai_gpt2-{name}",
            lambda folder: writers.torch_file(folder / "gpt2-small" / place, stored),
            normed if top_k else lambda x: relu(pre(x - R["b_dec"])),
            un_normed if top_k else plain,
            facts | {"model": "openai-community/gpt2"} | norm,
        )

    return [
        case("topk", "resid_post_mlp_v5_32k/autoencoders/7.pt", "resid_post.7", top_k=True),
        case("relu", "resid_delta_attn_v4/autoencoders/0.pt", "attn_out.0"),
        case("hidden", "mlp_post_act/autoencoders/11.pt", "mlp_hidden.11"),
        case("copied", "mine.pt", None),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, arrays: dict[str, Any]) -> Row:
        return f"openai_gpt2-{name}", lambda folder: write(folder, arrays), words

    inner = {"activation_state_dict": {"k": torch.tensor(K), "postact_fn": "ReLU"}}
    gelu = {"activation_state_dict": {"k": K, "postact_fn": "GELU"}}
    return [
        row("act", "7.pt: activation: 'Tanh'; expected", ARRAYS | {"activation": "Tanh"}),
        row("acts", "7.pt: activation: 'list (not read)'; expected", ARRAYS | {"activation": ["TopK"]}),
        row("k-tensor", "_dict: 'dict (not read)'; expected a flat dict", ARRAYS | TOP_K | inner),
        row("no-k", "7.pt: k: None; expected a whole number", ARRAYS | {"activation": "TopK"}),
        row("post", "7.pt: postact_fn: 'GELU'; expected 'ReLU'", ARRAYS | TOP_K | gelu),
        row("state", "7.pt: activation_state_dict: '[1]'", ARRAYS | {"activation_state_dict": "[1]"}),
        row("broken", "activation_state_dict: '{'; exp", ARRAYS | {"activation_state_dict": "{"}),
    ]


def stored(folder: Path, arrays: dict[str, Any]) -> Path:
    """With what such a file holds besides."""
    return write(folder, arrays | STATISTICS | TOP_K)


SAMPLE = Sample("7.pt", stored, ARRAYS, tells={"pre_bias", "latent_bias"})
