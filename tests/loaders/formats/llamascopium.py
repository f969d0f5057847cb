"""Files of llamascopium and what they mean: three activations, three norms, gated by row lengths or not."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, jumprelu, relu, topk
from tests.loaders.writers import D, F

R = writers.raw(seed=16)
READ, WRITTEN = "blocks.5.ln2.hook_normalized", "blocks.5.hook_mlp_out"
POST = "blocks.5.hook_resid_post"
AVERAGE = "dataset_average_activation_norm"
LENGTHS = {READ: np.array(7.25, np.float32), WRITTEN: np.array(3.5, np.float32), POST: np.array(6.5, np.float32)}
FILE, K = "sae_weights.safetensors", 5
PLAIN = {"W_E": R["W_enc"], "b_E": R["b_enc"], "W_D": R["W_dec"], "b_D": R["b_dec"]}
LOGS = {"activation_function.log_jumprelu_threshold": np.log(R["threshold"] * 2)}
CONFIG: dict[str, Any] = {
    "sae_type": "sae",
    "d_model": D,
    "expansion_factor": F / D,
    "act_fn": "jumprelu",
    "top_k": K,
    "norm_activation": "inference",
    "sparsity_include_decoder_norm": True,
    "use_decoder_bias": True,
    "use_glu_encoder": False,
    "hook_point_in": POST,
    "hook_point_out": POST,
}


def write(folder: Path, arrays: dict[str, Any], config: dict[str, Any] = CONFIG) -> Path:
    writers.config(folder / "config.json", config)
    return writers.tensors(folder / FILE, arrays).parent


def case(act: str, norm: str, gate: bool, *, transcoder: bool = False, bias: bool = True) -> Case:
    read, written = (READ, WRITTEN) if transcoder else (POST, POST)
    n = np.linalg.norm(R["W_dec"].astype(float), axis=1) if gate else np.ones(F)
    arrays = PLAIN | (LOGS if act == "jumprelu" else {})
    # The library saves them whatever the norm is, and uninitialised where it has none.
    unset = np.array(np.nan, np.float32)
    lengths = {f"{AVERAGE}.{hook}": LENGTHS[hook] if norm == "dataset-wise" else unset for hook in (read, written)}
    arrays = arrays | lengths
    if not bias:
        arrays = {key: arrays[key] for key in arrays if key != "b_D"}
    config = CONFIG | {"act_fn": act, "norm_activation": norm, "sparsity_include_decoder_norm": gate}
    config |= {"hook_point_in": read, "hook_point_out": written, "use_decoder_bias": bias}

    def scales(x: Array) -> tuple[Array, Array]:
        if norm == "token-wise":
            c = np.sqrt(D) / np.linalg.norm(x, axis=-1, keepdims=True)
            return c, c
        fixed = (LENGTHS[read], LENGTHS[written]) if norm == "dataset-wise" else (np.sqrt(D), np.sqrt(D))
        return np.asarray(np.sqrt(D) / fixed[0]), np.asarray(np.sqrt(D) / fixed[1])

    # What a value is told in: raw inputs where the scale is fixed; and on unit decoder rows where they are ranked.
    def unit(x: Array) -> Array:
        s_in, s_out = scales(x)
        if norm != "dataset-wise":
            return n if act == "topk" else np.ones(F)
        return n / s_out if act == "topk" and gate else np.asarray(np.ones(F) / s_in)

    def encode(x: Array) -> Array:
        pre = (x * scales(x)[0]) @ R["W_enc"] + R["b_enc"]
        g = pre * n
        f = relu(g) if act == "relu" else topk(g, K) if act == "topk" else jumprelu(g, R["threshold"] * 2)
        return np.asarray(f / n * unit(x))

    def decode(f: Array, x: Array) -> Array:
        return np.asarray(((f / unit(x)) @ R["W_dec"] + (R["b_dec"] if bias else 0)) / scales(x)[1])

    sites = ("mlp_in_pregain.5", "mlp_out.5") if transcoder else ("resid_post.5", "resid_post.5")
    token = norm == "token-wise"
    facts = {"activation": act, "k": K if act == "topk" else None, "site_in": sites[0], "site_out": sites[1]}
    facts |= {"in_norm": "l2_sqrt_d" if token else "none", "feature_unit": "normalised" if token else "raw"}
    name = f"llamascopium-{act}-{norm}{'-gate' * gate}{'-transcoder' * transcoder}{'-no-bias' * (not bias)}"
    return Case(name, lambda folder: write(folder, arrays, config), encode, decode, facts)


def cases() -> list[Case]:
    norms = ("inference", "token-wise", "dataset-wise")
    return [
        *(case(*one) for one in product(("relu", "jumprelu", "topk"), norms, (False, True))),
        case("jumprelu", "dataset-wise", True, transcoder=True),
        case("topk", "inference", True, transcoder=True),
        case("jumprelu", "inference", True, bias=False),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, **config: Any) -> Row:
        name = f"llamascopium-{name}"
        return name, lambda folder: write(folder, PLAIN | LOGS, CONFIG | config), f"config.json: {words}"

    return [
        row(
            "clt",
            "hook_points_in: None; expected a list of hooks, one for each layer",
            sae_type="clt",
        ),
        row("lorsa", "sae_type: 'lorsa' (its features attend over earlier", sae_type="lorsa"),
        row("crosscoder", "sae_type: 'crosscoder' (it reads several places", sae_type="crosscoder"),
        row("glu", "use_glu_encoder: True; expected False", use_glu_encoder=True),
        row("batch", "act_fn: 'batchtopk'; expected one of relu, jumprelu, topk", act_fn="batchtopk"),
        row("norm", "norm_activation: 'batch-wise'; expected one of", norm_activation="batch-wise"),
        row("token", "norm_activation: token-wise in a", norm_activation="token-wise", hook_point_out=WRITTEN),
        row("flag", "sparsity_include_decoder_norm: 1; expected true or false", sparsity_include_decoder_norm=1),
    ]


SAMPLE = Sample(FILE, write, PLAIN | LOGS, config="config.json")
