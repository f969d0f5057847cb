"""Formats that are one .pt file: Qwen-Scope, connor_rob's, OpenAI's, Goodfire's and Apollo's, and what they mean."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, relu, topk, wrong_arrays
from tests.loaders.writers import D, F

R = writers.raw(seed=18)
K = 5
QWEN = {"W_enc": R["W_enc"].T, "W_dec": R["W_dec"].T, "b_enc": R["b_enc"], "b_dec": R["b_dec"]}
QWEN_CONFIG: dict[str, Any] = {
    "model_type": "topk_sae",
    "base_model": "Qwen/Qwen3-8B-Base",
    "d_model": D,
    "d_sae": F,
    "k": K,
    "num_layers": 36,
    "hook_point": "resid_post",
}
Z = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
Z_CONFIG: dict[str, Any] = {
    "act_size": D,
    "dict_size": F,
    "act_name": "blocks.3.attn.hook_z",
    "model_name": "gpt2-small",
}
OPENAI = {
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
APOLLO_HOOK = "blocks-5-hook_resid_pre"
APOLLO = {
    f"{APOLLO_HOOK}.encoder.0.weight": R["W_enc"].T,
    f"{APOLLO_HOOK}.encoder.0.bias": R["b_enc"],
    f"{APOLLO_HOOK}.decoder.weight": R["W_dec"].T,
    f"{APOLLO_HOOK}.decoder.bias": R["b_dec"],
}


def linear(encoder: str, decoder: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {f"{encoder}.weight": R["W_enc"].T, f"{encoder}.bias": R["b_enc"]}
    return arrays | {f"{decoder}.weight": R["W_dec"].T, f"{decoder}.bias": R["b_dec"]}


GOODFIRE = linear("encoder_linear", "decoder_linear")


def qwen(folder: Path, arrays: dict[str, Any], layers: tuple[int, ...] = (12,), **config: Any) -> Path:
    writers.config(folder / "config.json", QWEN_CONFIG | config)
    for layer in layers:
        writers.torch_file(folder / f"layer{layer}.sae.pt", arrays)
    return folder


def kissane(folder: Path, arrays: dict[str, Any], **config: Any) -> Path:
    writers.config(folder / "gpt2-small_L3_cfg.json", Z_CONFIG | config)
    return writers.torch_file(folder / "gpt2-small_L3.pt", arrays)


def single(name: str, folder: Path, arrays: dict[str, Any]) -> Path:
    return writers.torch_file(folder / name, arrays)


def layer_norm(x: Array) -> tuple[Array, Array, Array]:
    mean, std = x.mean(-1, keepdims=True), x.std(-1, ddof=1, keepdims=True)
    return (x - mean) / (std + 1e-5), mean, std


def cases() -> list[Case]:
    def pre(x: Array) -> Array:
        return np.asarray(x @ R["W_enc"] + R["b_enc"])

    def plain(f: Array, x: Array) -> Array:
        return np.asarray(f @ R["W_dec"] + R["b_dec"])

    def said(activation: str, site: str | None, **more: Any) -> dict[str, Any]:
        return {"activation": activation, "site_in": site, "site_out": site} | more

    def normed(x: Array) -> Array:
        return topk(pre(layer_norm(x)[0] - R["b_dec"]), K)

    def un_normed(f: Array, x: Array) -> Array:
        _, mean, std = layer_norm(x)
        return np.asarray(plain(f, x) * std + mean)

    def openai(name: str, place: str, site: str | None, top_k: bool = False) -> Case:
        norm = {"in_norm": "layer_norm", "feature_unit": "normalised", "k": K} if top_k else {"in_norm": "none"}
        return Case(
            f"openai_gpt2-{name}",
            lambda folder: single(f"gpt2-small/{place}", folder, OPENAI | STATISTICS | (TOP_K if top_k else {})),
            normed if top_k else lambda x: relu(pre(x - R["b_dec"])),
            un_normed if top_k else plain,
            said("topk" if top_k else "relu", site, model="openai-community/gpt2", **norm),
        )

    def goodfire(name: str, file: str, arrays: dict[str, Any], site: str | None, model: str | None) -> Case:
        facts = said("relu", site, model=model)
        return Case(
            f"goodfire-{name}", lambda folder: single(file, folder, arrays), lambda x: relu(pre(x)), plain, facts
        )

    lengths = np.linalg.norm(R["W_dec"].astype(float), axis=1)[:, None]
    qwen_facts = said("topk", "resid_post.12", k=K, model="Qwen/Qwen3-8B-Base")
    llama, r1 = "Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Llama-8B"
    return [
        Case("qwen_scope-folder", lambda folder: qwen(folder, QWEN), lambda x: topk(pre(x), K), plain, qwen_facts),
        Case(
            "qwen_scope-one-of-two",
            lambda folder: qwen(folder, QWEN, (3, 12)) / "layer12.sae.pt",
            lambda x: topk(pre(x), K),
            plain,
            qwen_facts,
        ),
        Case(
            "connor_rob-z",
            lambda folder: kissane(folder, Z),
            lambda x: relu(pre(x - R["b_dec"])),
            plain,
            said("relu", "z.3", model="gpt2-small"),
        ),
        openai("topk", "resid_post_mlp_v5_32k/autoencoders/7.pt", "resid_post.7", top_k=True),
        openai("relu", "resid_delta_attn_v4/autoencoders/0.pt", "attn_out.0"),
        openai("hidden", "mlp_post_act/autoencoders/11.pt", "mlp_hidden.11"),
        openai("copied", "mine.pt", None),
        goodfire("8b", f"{llama}-SAE-l19.pth", GOODFIRE, "resid_post.19", llama),
        goodfire("qresearch", f"{r1}-SAE-l19.pt", linear("encoder", "decoder"), "resid_post.19", r1),
        goodfire("copied", "mine.pt", GOODFIRE, None, None),
        Case(
            "apollo-pre",
            lambda folder: single("samples_100.pt", folder, APOLLO),
            lambda x: relu(pre(x)),
            lambda f, x: f @ (R["W_dec"] / lengths) + R["b_dec"],
            said("relu", "resid_pre.5", model=None),
        ),
    ]


def wrong() -> list[Row]:
    def file(name: str, arrays: dict[str, Any], words: str, of: str) -> Row:
        return name, lambda folder: single(of, folder, arrays), words

    def config(name: str, words: str, **more: Any) -> Row:
        return f"qwen_scope-{name}", lambda folder: qwen(folder, QWEN, **more), words

    two = APOLLO | {key.replace("5", "6", 1): value for key, value in APOLLO.items()}
    gelu = {"activation_state_dict": {"k": K, "postact_fn": "GELU"}}
    # What tells these formats apart is a key; without it, a file is of no known format.
    unnamed = ("no-pre_bias", "no-latent_bias", f"no-{APOLLO_HOOK}.encoder.0.weight")
    rows = [
        *wrong_arrays("qwen_scope", "layer12.sae.pt", qwen, QWEN),
        *wrong_arrays("connor_rob", "gpt2-small_L3.pt", kissane, Z),
        *wrong_arrays("openai_gpt2", "7.pt", lambda folder, r: single("7.pt", folder, r), OPENAI),
        *wrong_arrays("goodfire", "a.pth", lambda folder, r: single("a.pth", folder, r), GOODFIRE),
        *wrong_arrays("apollo", "a.pt", lambda folder, r: single("a.pt", folder, r), APOLLO),
    ]
    return [
        *(row for row in rows if not row[0].endswith(unnamed)),
        config("none-chosen", "layer*.sae.pt: 2 files and none chosen; expected", layers=(0, 1)),
        config("none", "layer*.sae.pt: 0 files and none chosen; expected", layers=()),
        config("hook", "config.json: hook_point: 'resid_pre'; expected 'resid_post'", hook_point="resid_pre"),
        config("k", "config.json: k: True; expected a whole number", k=True),
        config("size", "expected [d_sae, d_model] = [41, 24]", d_sae=F + 1),
        (
            "connor_rob-size",
            lambda folder: kissane(folder, Z, act_size=0),
            "L3_cfg.json: act_size: 0; expected",
        ),
        file("openai_gpt2-act", OPENAI | {"activation": "Tanh"}, "7.pt: activation: 'Tanh'; expected", "7.pt"),
        file("openai_gpt2-no-k", OPENAI | {"activation": "TopK"}, "7.pt: k: None; expected a whole number", "7.pt"),
        file("openai_gpt2-post", OPENAI | TOP_K | gelu, "7.pt: postact_fn: 'GELU'; expected 'ReLU'", "7.pt"),
        file(
            "openai_gpt2-state", OPENAI | {"activation_state_dict": "[1]"}, "7.pt: activation_state_dict: '[1]'", "7.pt"
        ),
        file("openai_gpt2-broken", OPENAI | {"activation_state_dict": "{"}, "activation_state_dict: '{'; exp", "7.pt"),
        file("apollo-two", two, "2 dictionaries in one file; expected one", "a.pt"),
        file("goodfire-objects", GOODFIRE | {"cfg": Path()}, "a.pt: data.pkl: Python objects; expected", "a.pt"),
    ]


def good(folder: Path) -> Path:
    return single("7.pt", folder, OPENAI | STATISTICS | TOP_K)
