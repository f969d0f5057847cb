"""Checkpoints of Apollo's SAEs and what they mean: x has no mean, and the decoder's rows are made unit."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, relu

R = writers.raw(seed=18)
HOOK = "blocks-5-hook_resid_pre"
ARRAYS = {
    f"{HOOK}.encoder.0.weight": R["W_enc"].T,
    f"{HOOK}.encoder.0.bias": R["b_enc"],
    f"{HOOK}.decoder.weight": R["W_dec"].T,
    f"{HOOK}.decoder.bias": R["b_dec"],
}
# The other hook's dictionary has other values.
TWO = ARRAYS | {key.replace("5", "6", 1): value + np.float32(1) for key, value in ARRAYS.items()}


def pre(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) @ R["W_enc"] + R["b_enc"])


def plain(f: Array, x: Array) -> Array:
    return np.asarray(f @ R["W_dec"] + R["b_dec"])


def write(folder: Path, arrays: dict[str, Any]) -> Path:
    return writers.torch_file(folder / "samples_100.pt", arrays)


def cases() -> list[Case]:
    lengths = np.linalg.norm(R["W_dec"].astype(float), axis=1)[:, None]
    facts = {"activation": "relu", "site_in": "resid_pre.5", "site_out": "resid_pre.5", "model": None}
    return [
        Case(
            "apollo-pre",
            lambda folder: write(folder, ARRAYS),
            lambda x: relu(pre(x)),
            lambda f, x: f @ (R["W_dec"] / lengths) + R["b_dec"],
            facts,
        )
    ]


def wrong() -> list[Row]:
    two = "samples_100.pt: 2 dictionaries and none chosen; expected one of"
    return [("apollo-two", lambda folder: write(folder, TWO), two)]


SAMPLE = Sample("samples_100.pt", write, ARRAYS, tells={f"{HOOK}.encoder.0.weight"})
