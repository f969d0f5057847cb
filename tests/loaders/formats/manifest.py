"""Manifests and what they mean: some features of a dictionary in their own order, or all of them."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, jumprelu, relu, topk
from tests.loaders.writers import SEEN, D, F

R = writers.raw()
ONE = ((20, "post_block"),)


def cases() -> list[Case]:
    r = writers.raw(seed=5)
    everything, turned = list(range(F)), [*range(7, F), *range(7)]
    one = ((20, "post_block"),)

    def case(name: str, rows: list[int], facts: dict[str, Any], *, full: bool = False, **more: Any) -> Case:
        activation = more.setdefault("activation", "jumprelu")
        tensors = writers.manifest_tensors(
            r, everything if full else rows, jumprelu=activation == "jumprelu", full=full
        )
        layers, suffix = more.pop("layers", one), more.pop("suffix", "")
        more |= {"clampable_features": rows} | ({"kind": "sae_full_reconstruction"} if full else {})
        # The record has the dictionary's own order whenever it has all features.
        kept = np.array(sorted(rows) if len(rows) == F else rows) if not full else np.arange(F)

        def encode(x: Array) -> Array:
            pre = x @ r["W_enc"] + r["b_enc"]
            f = {
                "jumprelu": lambda: jumprelu(pre, r["threshold"]),
                "relu": lambda: relu(pre),
                "topk": lambda: topk(pre, 5),
            }
            return np.asarray(f[activation]()[..., kept])

        def decode(f: Array, x: Array) -> Array:
            return np.asarray(f @ r["W_dec"][kept] + (r["b_dec"] if full else 0))

        def write(folder: Path) -> Path:
            return Path(f"{writers.manifest(folder, tensors, layers=layers, **more)}{suffix}")

        facts = {"d_in": D, "features": len(kept), "can_reconstruct": full} | facts
        return Case(f"manifest-{name}", write, encode, decode, facts)

    post = {"site_in": "resid_post.20", "site_out": "resid_post.20"}
    two = ((20, "post_block"), (4, "pre_attn"))
    topk_params: dict[str, Any] = {"activation": "topk", "activation_params": {"k": 5}}
    return [
        case("jumprelu", SEEN, {"feature_ids": tuple(SEEN), **post}),
        case("relu", SEEN, {"feature_ids": tuple(SEEN)}, activation="relu"),
        case("prefix", [0, 1, 2], {"feature_ids": None}),
        case("old-hook", SEEN, {"site_in": "resid_post.7"}, layers=((7, "post_mlp"),)),
        case("mid", SEEN, {"site_in": "resid_mid.7"}, layers=((7, "post_attn"),)),
        case("branch", SEEN, {"site_in": None, "site_out": None}, layers=((7, "mlp_out"),)),
        case("one-of-two", SEEN, post, layers=two, suffix="#layer_20_post_block"),
        case("by-file", SEEN, post, layers=two, suffix="/layer_20_post_block.safetensors"),
        case("by-manifest-file", SEEN, post, suffix="/manifest.json"),
        case("full", SEEN, {"feature_ids": None}, full=True),
        case("full-topk", SEEN, {"feature_ids": None, "activation": "topk", "k": 5}, full=True, **topk_params),
        case("all-turned", turned, {"feature_ids": None}),
        case("all-turned-topk", turned, {"feature_ids": None, "k": 5}, **topk_params),
    ]


def wrong() -> list[Row]:
    tensors = writers.manifest_tensors(R, SEEN)

    def row(name: str, words: str, arrays: dict[str, Any] = tensors, place: str = "", **more: Any) -> Row:
        more = {"layers": ONE} | more
        return f"manifest-{name}", lambda folder: Path(f"{writers.manifest(folder, arrays, **more)}{place}"), words

    def lacks(key: str) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if name != key}

    two = ((20, "post_block"), (4, "pre_attn"))
    topk: dict[str, Any] = {"activation": "topk", "activation_params": {"k": 2}}
    everything = list(range(F))
    return [
        row("d_model", "d_model: 0; expected a whole number", d_model=0),
        row("d_sae", "d_sae: 40.0; expected a whole number", d_sae=40.0),
        row("activation", "activation: 'gelu'", activation="gelu"),
        row("topk-subset", "topk over a part of the features; expected every feature", lacks("threshold"), **topk),
        row(
            "topk-k",
            "expected k alone, from 1 to 40",
            clampable_features=everything,
            activation="topk",
            activation_params={"k": 41},
        ),
        row("topk-no-k", "expected k alone", clampable_features=everything, activation="topk"),
        row("scalar-threshold", "activation_params.threshold: 0.5", activation_params={"threshold": 0.5}),
        row("params", "activation_params: [1]", activation_params=[1]),
        row("range", "clampable_features: 40; expected whole numbers from 0 to 39", clampable_features=[0, 40]),
        row("bool", "clampable_features: True", clampable_features=[True, 3]),
        row("twice", "clampable_features: a feature twice", clampable_features=[1, 2, 1]),
        row(
            "more-rows",
            "decoder_weight: shape [3, 24]; expected [features, d_model] = [4, 24]",
            clampable_features=[1, 2, 3, 4],
        ),
        row("hook", "layers: [3, 'somewhere']", layers=((3, "somewhere"),)),
        row("site-twice", "layers: a site twice", layers=(ONE[0], ONE[0])),
        row("no-layers", "layers: []", layers=()),
        row("two-sites", ": 2 dictionaries and none chosen; expected one of", layers=two),
        row("no-such-site", "no file layer_9_post_block.safetensors", place="#layer_9_post_block"),
        row("none", "clampable_features: []", clampable_features=[]),
        row("layer", "layers: [-1, 'post_block']", layers=((-1, "post_block"),)),
        row("unknown", "in_norm: an unknown key", in_norm="layer_norm"),
        row("kind", "kind: 'other'", kind="other"),
        row("uri", "weights_uri: 's3://x'; expected null", weights_uri="s3://x"),
        row(
            "full-rows",
            "decoder_weight: shape [3, 24]",
            tensors | {"decoder_bias": R["b_dec"]},
            kind="sae_full_reconstruction",
        ),
        row("negative-threshold", "threshold: holds -1.0", tensors | {"threshold": -np.ones(3, np.float32)}),
    ]


SAMPLE = Sample(
    "layer_20_post_block.safetensors",
    lambda folder, arrays: writers.manifest(folder, arrays, layers=ONE),
    writers.manifest_tensors(R, SEEN),
    config="manifest.json",
)
