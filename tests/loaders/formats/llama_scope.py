"""Files of Llama Scope 1 and what they mean: scaled by average lengths, gated on unit decoder rows by one number."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample
from tests.loaders.writers import D, F

R = writers.raw(seed=14)
FILE = "final.safetensors"
ARRAYS = {
    "encoder.weight": R["W_enc"].T,
    "encoder.bias": R["b_enc"],
    "decoder.weight": R["W_dec"].T,
    "decoder.bias": R["b_dec"],
}
CONFIG: dict[str, Any] = {
    "d_model": D,
    "d_sae": F,
    "act_fn": "jumprelu",
    "jump_relu_threshold": 3.5,
    "norm_activation": "dataset-wise",
    "sparsity_include_decoder_norm": True,
    "apply_decoder_bias_to_pre_encoder": False,
    "dataset_average_activation_norm": {"in": 10.8125, "out": 4.5},
    "hook_point_in": "blocks.15.hook_resid_post",
    "hook_point_out": "blocks.15.hook_resid_post",
}


def write(folder: Path, arrays: dict[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    writers.tensors(folder / "checkpoints" / FILE, arrays)
    writers.config(folder / "hyperparams.json", config)
    return folder


def cases() -> list[Case]:
    fi, fo = np.sqrt(D) / 10.8125, np.sqrt(D) / 4.5
    w_dec = R["W_dec"].astype(float) * fi / fo
    n = np.linalg.norm(w_dec, axis=1)

    def encode(x: Array) -> Array:
        pre = x @ (R["W_enc"] * n) + R["b_enc"] / fi * n
        return np.asarray(pre * (pre > 3.5))

    def case(name: str, read: str, written: str | None, sites: tuple[Any, Any], bias: bool = True, **more: Any) -> Case:
        arrays = ARRAYS if bias else {key: ARRAYS[key] for key in ARRAYS if key != "decoder.bias"}
        config = CONFIG | {"hook_point_in": read, "hook_point_out": written} | more
        facts = {"site_in": sites[0], "site_out": sites[1], "activation": "jumprelu", "feature_unit": "raw"}
        return Case(
            f"llama_scope-{name}",
            lambda folder: write(folder, arrays, config),
            encode,
            lambda f, x: f @ (w_dec / n[:, None]) + (R["b_dec"] / fo if bias else 0),
            facts | {"model": "meta-llama/Llama-3.1-8B"},
        )

    def same(name: str, hook: str, site: str) -> Case:
        return case(name, hook, hook, (site, site))

    return [
        same("r", "blocks.15.hook_resid_post", "resid_post.15"),
        same("m", "blocks.3.hook_mlp_out", "mlp_out.3"),
        same("a", "blocks.3.hook_attn_out", "attn_out.3"),
        case("tc", "blocks.3.ln2.hook_normalized", "blocks.3.hook_mlp_out", ("mlp_in_pregain.3", "mlp_out.3")),
        case("converted-topk", "blocks.3.hook_mlp_out", None, ("mlp_out.3", "mlp_out.3"), act_fn="topk", top_k=50),
        case("no-bias", "elsewhere", "elsewhere", (None, None), bias=False),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, **config: Any) -> Row:
        return (
            f"llama_scope-{name}",
            lambda folder: write(folder, ARRAYS, CONFIG | config),
            f"hyperparams.json: {words}",
        )

    return [
        row("relu", "act_fn: 'relu'; expected jumprelu, or topk with a threshold", act_fn="relu"),
        row("topk", "jump_relu_threshold: 0.0; expected a number above 0", act_fn="topk", jump_relu_threshold=0.0),
        row("glu", "use_glu_encoder: True; expected False: nothing else is served", use_glu_encoder=True),
        row("no-norm", "sparsity_include_decoder_norm: False; expected True", sparsity_include_decoder_norm=False),
        row("subtract", "apply_decoder_bias_to_pre_encoder: True", apply_decoder_bias_to_pre_encoder=True),
        row("lengths", "dataset_average_activation_norm: None", dataset_average_activation_norm=None),
        row("length", "in: 0; expected a number above 0", dataset_average_activation_norm={"in": 0, "out": 1}),
        row("threshold", "jump_relu_threshold: nan; expected a number above 0", jump_relu_threshold=float("nan")),
    ]


SAMPLE = Sample(f"checkpoints/{FILE}", write, ARRAYS, config="hyperparams.json", optional={"decoder.bias"})
