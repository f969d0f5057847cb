"""Files of Qwen-Scope and what they mean: W_enc is [F, d] and W_dec [d, F], under others' names."""

from pathlib import Path
from typing import Any

from tests.loaders import writers
from tests.loaders.case import Case, Row, Sample, affine, topk
from tests.loaders.writers import D, F

R = writers.raw(seed=18)
K = 5
ARRAYS = {"W_enc": R["W_enc"].T, "W_dec": R["W_dec"].T, "b_enc": R["b_enc"], "b_dec": R["b_dec"]}
CONFIG: dict[str, Any] = {
    "model_type": "topk_sae",
    "base_model": "Qwen/Qwen3-8B-Base",
    "d_model": D,
    "d_sae": F,
    "k": K,
    "num_layers": 36,
    "hook_point": "resid_post",
}


def write(folder: Path, arrays: dict[str, Any], layers: tuple[int, ...] = (12,), **config: Any) -> Path:
    writers.config(folder / "config.json", CONFIG | config)
    for layer in layers:
        writers.torch_file(folder / f"layer{layer}.sae.pt", arrays)
    return folder


pre, plain = affine(R)


def cases() -> list[Case]:
    facts = {"activation": "topk", "k": K, "site_in": "resid_post.12", "site_out": "resid_post.12"}
    facts |= {"model": "Qwen/Qwen3-8B-Base"}
    places = {"folder": lambda at: write(at, ARRAYS), "one-of-two": lambda at: write(at, ARRAYS, (3, 12)) / FILE}
    return [Case(f"qwen_scope-{name}", at, lambda x: topk(pre(x), K), plain, facts) for name, at in places.items()]


def wrong() -> list[Row]:
    def row(name: str, words: str, **more: Any) -> Row:
        return f"qwen_scope-{name}", lambda folder: write(folder, ARRAYS, **more), words

    return [
        row("none-chosen", ": 2 dictionaries and none chosen; expected one of", layers=(0, 1)),
        row("none", "layer*.sae.pt: 0 files and none chosen; expected", layers=()),
        row("hook", "config.json: hook_point: 'resid_pre'; expected 'resid_post'", hook_point="resid_pre"),
        row("k", "config.json: k: True; expected a whole number", k=True),
        row("size", "expected [d_sae, d_model] = [41, 24]", d_sae=F + 1),
    ]


FILE = "layer12.sae.pt"
SAMPLE = Sample(FILE, write, ARRAYS, config="config.json", tells={"model_type"})
