"""Files of Llama Scope R1-Distill and what they mean: log thresholds on pre times the decoder's row lengths."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample
from tests.loaders.writers import D, F

R = writers.raw(seed=15)
HOOK = "blocks.15.hook_resid_post"
LENGTH = np.float32(7.25)
FILE = "sae_weights.safetensors"
ARRAYS = {
    "encoder.weight": R["W_enc"].T,
    "encoder.bias": R["b_enc"],
    "decoder.weight": R["W_dec"].T,
    "decoder.bias": R["b_dec"],
    "log_jumprelu_threshold": np.log(R["threshold"] * 2),
    f"dataset_average_activation_norm.{HOOK}": np.array(LENGTH),
}
CONFIG: dict[str, Any] = {"d_model": D, "expansion_factor": F / D, "hook_point_in": HOOK, "hook_point_out": HOOK}


def write(folder: Path, arrays: dict[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    writers.config(folder / "config.json", config)
    return writers.tensors(folder / FILE, arrays).parent


def cases() -> list[Case]:
    s = np.sqrt(D) / float(LENGTH)
    n = np.linalg.norm(R["W_dec"].astype(float), axis=1)
    theta = np.exp(np.log(R["threshold"] * 2).astype(float))

    def encode(x: Array) -> Array:
        """In units of x, as every later value."""
        pre = (x * s) @ R["W_enc"] + R["b_enc"]
        return np.asarray(pre * (pre * n > theta) / s)

    def decode(f: Array, x: Array) -> Array:
        return np.asarray(((f * s) @ R["W_dec"] + R["b_dec"]) / s)

    def ungated(x: Array) -> Array:
        pre = (x * s) @ R["W_enc"] + R["b_enc"]
        return np.asarray(pre * (pre > theta) / s)

    facts = {"activation": "jumprelu", "feature_unit": "raw", "site_in": "resid_post.15", "site_out": "resid_post.15"}
    one_hook = {key: CONFIG[key] for key in CONFIG if key != "hook_point_out"}
    plain = CONFIG | {"sae_type": "sae", "sparsity_include_decoder_norm": False}
    return [
        Case("llama_scope_r1-ungated", lambda folder: write(folder, ARRAYS, plain), ungated, decode, facts),
        Case("llama_scope_r1-r", lambda folder: write(folder, ARRAYS), encode, decode, facts),
        Case("llama_scope_r1-one-hook", lambda folder: write(folder, ARRAYS, one_hook), encode, decode, facts),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, arrays: dict[str, Any] = ARRAYS, **config: Any) -> Row:
        return f"llama_scope_r1-{name}", lambda folder: write(folder, arrays, CONFIG | config), words

    length = f"dataset_average_activation_norm.{HOOK}"
    return [
        row("norm", "norm_activation: 'token-wise'; expected 'dataset-wise'", norm_activation="token-wise"),
        row("act", "config.json: act_fn: 'topk'; expected 'jumprelu'", act_fn="topk"),
        row("factor", "config.json: expansion_factor: '8'; expected a number above 0", expansion_factor="8"),
        row("width", "expected [d_model * expansion_factor, d_model] = [41, 25]", d_model=25),
        row("length", f"{length}: holds 0.0; expected values above 0", ARRAYS | {length: np.zeros(1, np.float32)}),
        row("other-hook", f"{FILE}: dataset_average_activation_norm.blocks.1.x: missing", hook_point_in="blocks.1.x"),
    ]


SAMPLE = Sample(FILE, write, ARRAYS, config="config.json")
