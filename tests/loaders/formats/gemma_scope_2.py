"""Files of Gemma Scope 2 and what they mean: lower-case keys, sites by config or path, transcoders behind the gain."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, Told, relu
from tests.loaders.writers import D, F

NAMES = {"W_enc": "w_enc", "W_dec": "w_dec"}
LEAF = "layer_7_width_16k_l0_small"
CONFIG = {"architecture": "jump_relu", "type": "sae", "width": F, "l0": 20, "model_name": "gemma-v3-1b-pt"}
FILE = "params.safetensors"


def arrays(d_out: int = D) -> dict[str, Any]:
    """Two thresholds are below 0, where relu takes over."""
    r = writers.raw(d_out=d_out, seed=11)
    r["threshold"][:2] = -1
    return {NAMES.get(key, key): value for key, value in r.items()}


def write(folder: Path, r: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    writers.tensors(folder / FILE, r)
    if config is not None:
        writers.config(folder / "config.json", config)
    return folder


def cases() -> list[Case]:
    def case(
        name: str, place: str, sites: tuple[Any, Any], model: str | None, config: Any = None, d_out: int = D
    ) -> Case:
        r = arrays(d_out)

        def encode(x: Array) -> Array:
            pre = x @ r["w_enc"] + r["b_enc"]
            return np.asarray(relu(pre) * (pre > r["threshold"]))

        return Case(
            f"gemma_scope_2-{name}",
            lambda folder: write(folder / place, r, config),
            encode,
            lambda f, x: f @ r["w_dec"] + r["b_dec"],
            {"site_in": sites[0], "site_out": sites[1], "model": model, "d_out": d_out, "activation": "jumprelu"},
        )

    def config(read: str, written: str | None = None, **more: Any) -> dict[str, Any]:
        layer = "model.layers.7"
        out = f"{layer}.{written}.output" if written else None
        return CONFIG | {"hf_hook_point_in": f"{layer}.{read}", "hf_hook_point_out": out} | more

    pt, z = "google/gemma-3-1b-pt", ("z.7", "z.7")
    mlp, both = "post_feedforward_layernorm", ("mlp_in.7", "mlp_out.7")
    repository, cached = "gemma-scope-2-1b-pt", "models--google--gemma-scope-2-12b-it/snapshots/abc"
    transcoder = config("pre_feedforward_layernorm.output", mlp, type="transcoder", affine_connection=False)
    into = config("pre_feedforward_layernorm.output", type="transcoder")
    return [
        case("res", "any", ("resid_post.7", "resid_post.7"), pt, config("output")),
        case("attn", f"attn_out/{LEAF}", z, pt, config("self_attn.o_proj.input")),
        case("mlp", "any", ("mlp_out.7", "mlp_out.7"), pt, config(f"{mlp}.output", mlp)),
        case("transcoder", "any", both, pt, transcoder, d_out=12),
        case("smallest", "any", (None, None), "google/gemma-3-270m", CONFIG | {"model_name": "google/gemma-3-270m-pt"}),
        case("half-config", f"{repository}/resid_post/{LEAF}", ("resid_post.7", "resid_post.7"), pt, {"type": "sae"}),
        case("no-output", "any", ("mlp_in.7", None), pt, into, d_out=12),
        case("path-res", f"{cached}/resid_post_all/{LEAF}", ("resid_post.7", "resid_post.7"), "google/gemma-3-12b-it"),
        case("path-attn", f"{repository}/attn_out/{LEAF}", z, pt),
        case("path-transcoder", f"{repository}/transcoder_all/{LEAF}", both, pt, d_out=12),
        case("path-smallest", "gemma-scope-2-270m-pt/copied/there", (None, None), "google/gemma-3-270m"),
        case("nowhere", "there", (None, None), None),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, more: dict[str, Any], **config: Any) -> Row:
        return f"gemma_scope_2-{name}", lambda folder: write(folder, arrays() | more, CONFIG | config), words

    affine = {"affine_skip_connection": np.ones((D, D + 1), np.float32)}
    one_of_a_set = "params_layer_0.safetensors: type: 'crosscoder', by config.json or the folders' names; expected"
    return [
        row(
            "affine",
            f"{FILE}: affine_skip_connection: shape [24, 25]; expected",
            affine,
        ),
        row("clt", "config.json: type: 'clt'; expected sae or transcoder", {}, type="clt"),
        row("architecture", "config.json: architecture: 'relu'; expected jump_relu", {}, architecture="relu"),
        row("hook", "config.json: hf_hook_point_in: 3; expected a string", {}, hf_hook_point_in=3),
        (
            "gemma_scope_2-set",
            lambda folder: writers.tensors(folder / "params_layer_0.safetensors", arrays()).parent,
            "params_layer_0.safetensors: type: None, by config.json or the folders' names; expected 'clt'",
        ),
        (
            "gemma_scope_2-of-a-set",
            lambda folder: writers.tensors(folder / "crosscoder" / "params_layer_0.safetensors", arrays()),
            one_of_a_set,
        ),
    ]


def described() -> list[Told]:
    def told(name: str, place: str, config: Any, **facts: Any) -> Told:
        affine = np.triu(np.ones((D, 12), np.float32))
        more = {"affine_skip_connection": affine}
        facts["w_skip"] = affine.T
        return f"gemma_scope_2-{name}", lambda folder: write(folder / place, arrays(12) | more, config), facts

    both: dict[str, Any] = {"site_in": "mlp_in.7", "site_out": "mlp_out.7", "d_in": D, "d_out": 12}
    norms = {"in": "pre_feedforward_layernorm", "out": "post_feedforward_layernorm"}
    hooks = {f"hf_hook_point_{side}": f"model.layers.7.{norm}.output" for side, norm in norms.items()}
    return [
        told("affine", "any", CONFIG | hooks | {"type": "transcoder", "affine_connection": True}, **both),
        told("path-affine", f"gemma-scope-2-1b-pt/transcoder_all/{LEAF}_affine", None, **both),
    ]


SAMPLE = Sample(FILE, lambda folder, r: write(folder, r, CONFIG), arrays(), config="config.json")
