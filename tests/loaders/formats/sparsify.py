"""Files of sparsify and what they mean: W_dec is [F, d], and only a config that says transcode subtracts nothing."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, Told, relu, topk
from tests.loaders.writers import D, F

R = writers.raw(seed=17)
FILE, K = "sae.safetensors", 5
ARRAYS = {"encoder.weight": R["W_enc"].T, "encoder.bias": R["b_enc"], "W_dec": R["W_dec"], "b_dec": R["b_dec"]}
CONFIG: dict[str, Any] = {"d_in": D, "activation": "topk", "expansion_factor": 32, "num_latents": F, "k": K}
LLAMA = "EleutherAI/sae-llama-3.1-8b-64x"


def write(folder: Path, arrays: dict[str, Any], config: dict[str, Any] = CONFIG, model: str | None = None) -> Path:
    writers.config(folder / "cfg.json", config)
    if model:
        run = folder.parent.parent if folder.name.startswith("seed") else folder.parent
        writers.config(run / "config.json", {"model": model, "sae": config})
    return writers.tensors(folder / FILE, arrays).parent


def groupmax(pre: Array, k: int) -> Array:
    groups = relu(pre).reshape(*pre.shape[:-1], k, F // k)
    f = np.zeros_like(groups)
    best = groups.argmax(-1)[..., None]
    np.put_along_axis(f, best, np.take_along_axis(groups, best, -1), -1)
    return f.reshape(pre.shape)


def abstopk(pre: Array, k: int) -> Array:
    keep = np.zeros_like(pre)
    np.put_along_axis(keep, np.argsort(-np.abs(pre), axis=-1)[..., :k], 1, axis=-1)
    return pre * keep


def cases() -> list[Case]:
    acts = {"topk": topk, "groupmax": groupmax, "abstopk": abstopk}

    def case(name: str, place: str, sites: tuple[Any, Any], act: str = "topk", model: Any = None, **more: Any) -> Case:
        config = {key: value for key, value in (CONFIG | more).items() if value is not None}
        subtracted = 0 if more.get("transcode") else R["b_dec"]
        return Case(
            f"sparsify-{name}",
            lambda folder: write(folder / place, ARRAYS, config, model),
            lambda x: acts[act]((x - subtracted) @ R["W_enc"] + R["b_enc"], K),
            lambda f, x: f @ R["W_dec"] + R["b_dec"],
            {"activation": act, "k": K, "site_in": sites[0], "site_out": sites[1], "model": model},
        )

    post, cached = ("resid_post.10", "resid_post.10"), "models--EleutherAI--sae-SmolLM2-135M-64x/snapshots/abc"
    mlp, through = ("mlp_out.3", "mlp_out.3"), ("mlp_in.3", "mlp_out.3")
    return [
        case("topk", f"{LLAMA}/layers.10", post),
        case("groupmax", f"{LLAMA}/layers.10", post, "groupmax", activation="groupmax"),
        case("signed", f"{LLAMA}/layers.10", post, "abstopk", signed=True, activation=None),
        case("mlp", f"{cached}/layers.3.mlp", mlp),
        case("attention", "sae-pythia-70m-32k/layers.3.attention", ("attn_out.3", "attn_out.3")),
        case("gpt2", "mine/h.3.mlp", mlp, model="openai-community/gpt2"),
        case("post-norm", "mine/layers.3.mlp", ("mlp_out_raw.3", "mlp_out_raw.3"), model="google/gemma-2-2b"),
        case("unknown-model", "mine/layers.3.mlp", ("mlp_out_raw.3", "mlp_out_raw.3")),
        case("seed", f"{LLAMA}/layers.10/seed1", post),
        case("seed-model", "mine/h.3.mlp/seed2", mlp, model="openai-community/gpt2"),
        case("elsewhere", f"{LLAMA}/embed_tokens", (None, None)),
        case("transcoder", f"{LLAMA}/layers.3.mlp", through, transcode=True),
        case("among-transcoders", f"transcoders/{LLAMA}/layers.3.mlp", mlp, transcode=False),
        case("old-among-transcoders", f"transcoders/{LLAMA}/layers.3.mlp", mlp),
        case("below-llamas", "llamas/sae-glm-4-9b/layers.3.mlp", ("mlp_out_raw.3", "mlp_out_raw.3")),
        case("old-transcoder", "skip-transcoder-Llama-3.2-1B-131k/layers.3.mlp", through),
    ]


def wrong() -> list[Row]:
    def row(name: str, words: str, arrays: dict[str, Any] = ARRAYS, **config: Any) -> Row:
        return f"sparsify-{name}", lambda folder: write(folder, arrays, CONFIG | config), words

    skip = ARRAYS | {"W_skip": np.ones((D + 1, D), np.float32)}
    return [
        row("skip", f"{FILE}: W_skip: shape [25, 24]; expected [d_in, d_in] = [24, 24]", skip, transcode=True),
        row("activation", "cfg.json: activation: 'relu'; expected one of topk, groupmax", activation="relu"),
        row("no-k", "cfg.json: k: None; expected a whole number", k=None),
        row("large-k", "cfg.json: k: 41; expected at most num_latents = 40", k=41),
        row("groups", "groups of 40 features, not of equal size", activation="groupmax", k=3),
        row("factor", "expected [num_latents, d_in] = [768, 24]", num_latents=0),
        row("no-factor", "cfg.json: expansion_factor: None", num_latents=None, expansion_factor=None),
        row("flag", "cfg.json: transcode: 'yes'; expected true or false", transcode="yes"),
    ]


def described() -> list[Told]:
    arrays = ARRAYS | {"W_skip": np.triu(np.ones((D, D), np.float32))}

    def told(name: str, place: str, **config: Any) -> Told:
        facts = {"site_in": "mlp_in.3", "site_out": "mlp_out.3", "k": K, "w_skip": arrays["W_skip"]}
        return f"sparsify-{name}", lambda folder: write(folder / place, arrays, CONFIG | config), facts

    return [
        told("skip", f"{LLAMA}/layers.3.mlp", transcode=True, skip_connection=True),
        told("old-skip", "skip-transcoder-Llama-3.2-1B-131k/layers.3.mlp", skip_connection=True),
    ]


SAMPLE = Sample(FILE, write, ARRAYS, config="cfg.json")
