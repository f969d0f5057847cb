"""Files of Gemma Scope 1 and what they mean: the path alone names model and sites."""

from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Case, Row, Sample, jumprelu
from tests.loaders.writers import D, F

R = writers.raw()


def cases() -> list[Case]:
    def case(name: str, place: str, d_out: int, lower: bool, facts: dict[str, Any], **more: Any) -> Case:
        r = writers.raw(d_out=d_out, seed=len(name))
        names = {"W_enc": "w_enc", "W_dec": "w_dec"} if lower else {}
        stored = {names.get(key, key): value for key, value in r.items()}
        return Case(
            f"gemma_scope-{name}",
            lambda folder: writers.gemma_scope(folder / place, stored, **more),
            lambda x: jumprelu(x @ r["W_enc"] + r["b_enc"], r["threshold"]),
            lambda f, x: f @ r["W_dec"] + r["b_dec"],
            {"activation": "jumprelu", "d_in": D, "d_out": d_out, "features": F, "in_norm": "none"} | facts,
        )

    def sites(first: str | None, second: str | None, model: str | None = "google/gemma-2-2b") -> dict[str, Any]:
        return {"site_in": first, "site_out": second, "model": model}

    leaf = "width_16k/average_l0_71"
    cached = f"models--google--gemma-scope-9b-it-mlp/snapshots/abc/layer_3/{leaf}"
    return [
        case("res", f"gemma-scope-2b-pt-res/layer_0/{leaf}", D, False, sites("resid_post.0", "resid_post.0")),
        case("att", f"gemma-scope-2b-pt-att/layer_3/{leaf}", D, False, sites("z.3", "z.3")),
        case("mlp", cached, D, False, sites("mlp_out.3", "mlp_out.3", "google/gemma-2-9b-it")),
        case(
            "transcoder",
            f"gemma-scope-2b-pt-transcoders/layer_19/{leaf}",
            12,
            False,
            sites("mlp_in_pregain.19", "mlp_out.19"),
        ),
        case("embedding", "gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6", D, False, sites("embed", "embed")),
        case(
            "below-embedding",
            "embedding/gemma-scope-2b-pt-res/layer_3/width_16k/average_l0_6",
            D,
            False,
            sites("resid_post.3", "resid_post.3"),
        ),
        case("no-layer", "gemma-scope-2b-pt-res/copied", D, False, sites(None, None)),
        case("no-name", "some/layer_4/folder", D, False, sites(None, None, None)),
        case("lower-case", "some/folder", D, True, sites(None, None, None), scaling_factor=np.ones(F, np.float32)),
    ]


def wrong() -> list[Row]:
    def row(name: str, arrays: dict[str, Any], words: str, place: str = "g", **more: Any) -> Row:
        return f"gemma_scope-{name}", lambda folder: writers.gemma_scope(folder / place, arrays, **more), words

    square = writers.raw(features=D)
    other_name = "gemma-scope-2b-pt-res/layer_1"
    return [
        row("scalar-threshold", R | {"threshold": np.float32(0.4)}, "threshold: shape []"),
        row("one-threshold", R | {"threshold": np.ones(1, np.float32)}, "threshold: shape [1]; expected [F] = [40]"),
        row("square", square, "W_enc: shape [24, 24]; expected F other than d_in"),
        row("big-endian", R | {"W_enc": R["W_enc"].astype(">f4")}, "W_enc: dtype >f4"),
        row("scaled", R, "scaling_factor: not all ones", scaling_factor=np.full(F, 2, np.float32)),
        row("widths", writers.raw(d_out=12), "W_dec: width 12 for an input of 24", place=other_name),
        row("empty", {}, "params.npz: W_dec: missing"),
    ]


SAMPLE = Sample("params.npz", lambda folder, arrays: writers.gemma_scope(folder, arrays), R)
