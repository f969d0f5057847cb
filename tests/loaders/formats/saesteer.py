"""Our own files and what they mean: with metadata, and the first ones without."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, jumprelu, relu, topk
from tests.loaders.writers import D, F

R = writers.raw()
ACROSS = {"format": "saesteer", "in_norm": "layer_norm", "site_in": "mlp_in.3", "site_out": "mlp_out.3"}
PLAIN = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}


def cases() -> list[Case]:
    r = writers.raw(seed=6)
    tensors = writers.own_tensors(r)
    bare = {key: value for key, value in tensors.items() if key not in ("threshold", "max_act")}
    one = tensors | {"threshold": np.array([0.4], np.float32)}

    def case(
        name: str, arrays: dict[str, Any], act: Callable[[Array], Array], facts: dict[str, Any], **said: str
    ) -> Case:
        file = "saesteer.safetensors" if name == "folder" else "any name.safetensors"
        return Case(
            f"saesteer-{name}",
            lambda folder: (
                writers.own(folder / file, arrays, said or None)
                if name != "folder"
                else writers.own(folder / file, arrays).parent
            ),
            lambda x: act(x @ r["W_enc"] + r["b_enc"]),
            lambda f, x: f @ r["W_dec"] + r["b_dec"],
            {"d_in": D, "features": F, "format": "saesteer"} | facts,
        )

    def jump(pre: Array) -> Array:
        return jumprelu(pre, np.asarray(r["threshold"], float))

    site = {"site_in": "resid_post.15", "site_out": "resid_post.15"}
    return [
        case("no-metadata", tensors, jump, {"site_in": None, "has_max_act": True, "activation": "jumprelu"}),
        case("folder", tensors, jump, {"site_in": None}),
        case(
            "one-threshold",
            one,
            lambda pre: jumprelu(pre, np.full(F, np.float32(0.4), float)),
            {"activation": "jumprelu"},
        ),
        case("relu", bare, relu, {"has_max_act": False, **site}, format="saesteer", activation="relu", **site),
        case("topk", bare, lambda pre: topk(pre, 3), {"k": 3}, format="saesteer", activation="topk", k="3"),
    ]


def wrong() -> list[Row]:
    tensors = writers.own_tensors(R)
    bare = {key: value for key, value in tensors.items() if key != "threshold"}

    def row(name: str, words: str, arrays: dict[str, Any], **said: str) -> Row:
        return (
            f"saesteer-{name}",
            lambda folder: writers.own(folder / "saesteer.safetensors", arrays, said or None),
            words,
        )

    narrow = writers.own_tensors(writers.raw(d_out=12))
    square = writers.own_tensors(writers.raw(features=D), max_act=False) | {"max_act": np.ones(D, np.float32)}
    return [
        row(
            "others-orientation",
            "b_enc: shape [40]; expected [F] of W_enc [F, d_in] = [24]",
            tensors | {"W_enc": R["W_enc"]},
        ),
        row("square", "no metadata; expected format: saesteer", square),
        row("max_act", "max_act: holds -1.0", tensors | {"max_act": -np.ones(F, np.float32)}),
        row("max_act-shape", "max_act: shape [1]; expected [F] = [40]", tensors | {"max_act": np.ones(1, np.float32)}),
        row("threshold", "threshold: shape [2]", tensors | {"threshold": np.ones(2, np.float32)}),
        row("no-threshold", "threshold: missing", bare, format="saesteer", activation="jumprelu"),
        row("relu-threshold", "threshold: there", tensors, format="saesteer", activation="relu"),
        row("activation", "activation: 'gelu'", tensors, format="saesteer", activation="gelu"),
        row("l0", "l0: 'nan'; expected a number of features", bare, format="saesteer", activation="relu", l0="nan"),
        row("no-l0", "l0: 'few'; expected a number of features", bare, format="saesteer", activation="relu", l0="few"),
        row("k", "__metadata__", bare, format="saesteer", activation="topk", k="many"),
        row("large-k", "__metadata__", bare, format="saesteer", activation="topk", k="41"),
        row("site", "site_in: '../x'; expected a site", tensors, format="saesteer", site_in="../x"),
        row("ids", "feature_ids", tensors, format="saesteer", feature_ids="[1, true]"),
        row("deep-ids", "feature_ids", tensors, format="saesteer", feature_ids="[" * 100_000),
        row("few-ids", "__metadata__", tensors, format="saesteer", feature_ids="[1, 2]"),
        row("format", "format: 'other'; expected 'saesteer'", tensors, format="other"),
        row("norm-across", "a transcoder's output has no input statistics", narrow, **ACROSS),
        row("skip", "W_skip: shape [24, 40]; expected [d_out, d_in] = [24, 24]", tensors | {"W_skip": R["W_enc"]}),
    ]


SAMPLE = Sample(
    "saesteer.safetensors",
    lambda folder, arrays: writers.own(folder / "saesteer.safetensors", arrays, {"format": "saesteer"}),
    writers.own_tensors(R),
    optional={"max_act", "threshold"},
)
