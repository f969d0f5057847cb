"""Attention SAEs of Kissane and Krzyzanowski: a .pt file of z, with its config beside it."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, relu
from tests.loaders.writers import D, F

R = writers.raw(seed=18)
ARRAYS = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
CONFIG: dict[str, Any] = {
    "act_size": D,
    "dict_size": F,
    "act_name": "blocks.3.attn.hook_z",
    "model_name": "gpt2-small",
}


def write(folder: Path, arrays: dict[str, Any], **config: Any) -> Path:
    writers.config(folder / "gpt2-small_L3_cfg.json", CONFIG | config)
    return writers.torch_file(folder / "gpt2-small_L3.pt", arrays)


def pre(x: Array) -> Array:
    return np.asarray(x @ R["W_enc"] + R["b_enc"])


def plain(f: Array, x: Array) -> Array:
    return np.asarray(f @ R["W_dec"] + R["b_dec"])


def cases() -> list[Case]:
    facts = {"activation": "relu", "site_in": "z.3", "site_out": "z.3", "model": "gpt2-small"}
    return [
        Case("connor_rob-z", lambda folder: write(folder, ARRAYS), lambda x: relu(pre(x - R["b_dec"])), plain, facts)
    ]


def wrong() -> list[Row]:
    return [("connor_rob-size", lambda folder: write(folder, ARRAYS, act_size=0), "L3_cfg.json: act_size: 0; expected")]


SAMPLE = Sample("gpt2-small_L3.pt", write, ARRAYS, config="gpt2-small_L3_cfg.json")
