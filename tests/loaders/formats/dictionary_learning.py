"""Files of dictionary_learning and what they mean: seven classes, whose names alone say which formula holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, relu, topk
from tests.loaders.writers import D, F

R = writers.raw(seed=12)
K, THETA = 5, np.float32(1.2)  # about half of the positive values lie below
COUNT, NEVER = np.array(K, np.int32), np.array(-1, np.float32)
draw = np.random.default_rng(13)
B_GATE, B_MAG, R_MAG = (draw.normal(0, 0.6, F).astype(np.float32) for _ in range(3))

# nn.Linear stores [out, in]; the classes begin with one matrix as a view of the other, so one is in Fortran order.
LINEAR = {"encoder.weight": R["W_enc"].T, "decoder.weight": np.ascontiguousarray(R["W_dec"].T)}
BIASED = LINEAR | {"encoder.bias": R["b_enc"]}
PLAIN = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
GROUPS = {"group_sizes": np.array([10, 30])}
TOP_K = BIASED | {"b_dec": R["b_dec"], "k": COUNT, "threshold": np.array(THETA)}
FILES: dict[str, dict[str, Any]] = {
    "AutoEncoder": BIASED | {"bias": R["b_dec"]},
    "AutoEncoderNew": BIASED | {"decoder.bias": R["b_dec"]},
    "GatedAutoEncoder": LINEAR | {"decoder_bias": R["b_dec"], "r_mag": R_MAG, "gate_bias": B_GATE, "mag_bias": B_MAG},
    "JumpReluAutoEncoder": PLAIN | {"threshold": R["threshold"]},
    "AutoEncoderTopK": TOP_K,
    "BatchTopKSAE": TOP_K,
    "MatryoshkaBatchTopKSAE": PLAIN | {"k": COUNT, "threshold": np.array(THETA)} | GROUPS,
}


def config(dict_class: str, **trainer: Any) -> dict[str, Any]:
    about = {"activation_dim": D, "dict_size": F, "k": K, "layer": 12, "lm_name": "Qwen/Qwen3-8B"}
    about |= {"dict_class": dict_class, "submodule_name": "resid_post_layer_12"} | trainer
    return {"trainer": about, "buffer": {"d_submodule": D, "io": "out", "ctx_len": 1024}}


def write(folder: Path, arrays: dict[str, Any], cfg: dict[str, Any]) -> Path:
    writers.config(folder / "config.json", cfg)
    return writers.torch_file(folder / "ae.pt", arrays).parent


def checkpoint(folder: Path) -> Path:
    """As training writes it: one of several, below the folder with the config."""
    place = write(folder, TOP_K, config("BatchTopKSAE"))
    (place / "checkpoints").mkdir()
    return (place / "ae.pt").rename(place / "checkpoints" / "ae_1000.pt")


def cases() -> list[Case]:
    subtracted: dict[str, Callable[[Array], Array]] = {
        "AutoEncoder": relu,
        "AutoEncoderTopK": lambda pre: topk(pre, K),
        "BatchTopKSAE": lambda pre: relu(pre) * (pre > THETA),
        "MatryoshkaBatchTopKSAE": lambda pre: relu(pre) * (pre > THETA),
    }
    whole: dict[str, Callable[[Array], Array]] = {
        "AutoEncoderNew": relu,
        "JumpReluAutoEncoder": lambda pre: relu(pre * (pre > R["threshold"])),
    }

    def gated(x: Array) -> Array:
        z = (x - R["b_dec"]) @ R["W_enc"]
        return np.asarray((z + B_GATE > 0) * relu(np.exp(R_MAG.astype(float)) * z + B_MAG))

    def case(dict_class: str, name: str = "", arrays: Any = None, cfg: Any = None, **more: Any) -> Case:
        def encode(x: Array) -> Array:
            if dict_class == "GatedAutoEncoder":
                return gated(x)
            if dict_class in whole:
                return np.asarray(whole[dict_class](x @ R["W_enc"] + R["b_enc"]))
            pre = (x - R["b_dec"]) @ R["W_enc"] + R["b_enc"]
            return relu(pre) if "never" in name else np.asarray(subtracted[dict_class](pre))

        activation = {"AutoEncoderTopK": "topk", "AutoEncoder": "relu", "AutoEncoderNew": "relu"}
        site, place = more.pop("site", "resid_post.12"), more.pop("place", "trainer_0")
        return Case(
            f"dictionary_learning-{dict_class}{name}",
            lambda folder: write(folder / place, arrays or FILES[dict_class], cfg or config(dict_class)),
            encode,
            lambda f, x: f @ R["W_dec"] + R["b_dec"],
            {
                "activation": activation.get(dict_class, "jumprelu"),
                "k": K if dict_class == "AutoEncoderTopK" else None,
                "site_in": site,
                "site_out": site,
                "model": "Qwen/Qwen3-8B",
            },
        )

    no_name, entered = config("AutoEncoder", submodule_name=None), config("AutoEncoder")
    entered["buffer"] |= {"io": "in"}
    return [
        *map(case, FILES),
        replace(case("BatchTopKSAE"), name="dictionary_learning-checkpoint", write=checkpoint),
        case("BatchTopKSAE", "-never-set", TOP_K | {"threshold": NEVER}),
        case("MatryoshkaBatchTopKSAE", "-never-set", FILES["MatryoshkaBatchTopKSAE"] | {"threshold": NEVER}),
        case("AutoEncoder", "-by-folder", cfg=no_name, place="resid_post_layer_3/trainer_0", site="resid_post.3"),
        case("AutoEncoder", "-no-name", cfg=no_name, site=None),
        case("AutoEncoder", "-input", cfg=entered, site=None),
        case("AutoEncoder", "-mlp", cfg=config("AutoEncoder", submodule_name="mlp_layer_12"), site=None),
    ]


def wrong() -> list[Row]:
    def row(
        name: str, words: str, arrays: dict[str, Any] = TOP_K, dict_class: str = "BatchTopKSAE", **more: Any
    ) -> Row:
        return f"dictionary_learning-{name}", lambda folder: write(folder, arrays, config(dict_class, **more)), words

    # A view into a storage, which claims the same bytes over and over.
    wide = torch.ones(1).expand(F)
    return [
        row("class", "config.json: trainer.dict_class: 'Other'; expected one of AutoEncoder,", dict_class="Other"),
        row("other-class", "ae.pt: W_dec: missing among", dict_class="MatryoshkaBatchTopKSAE"),
        row("no-k", "config.json: k: None; expected a whole number", dict_class="AutoEncoderTopK", k=None),
        row("large-k", "config.json: k: 41; expected at most dict_size = 40", dict_class="AutoEncoderTopK", k=41),
        row("size", "expected [dict_size, activation_dim] = [41, 24]", dict_size=F + 1),
        row("strides", "ae.pt: encoder.bias: shape [40] with strides [0]", TOP_K | {"encoder.bias": wide}),
        (
            "dictionary_learning-trainer",
            lambda folder: write(folder, TOP_K, {}),
            "config.json: trainer: None; expected",
        ),
        ("dictionary_learning-list", lambda folder: write_list(folder), "ae.pt: data.pkl: a list; expected a dict of"),
    ]


def write_list(folder: Path) -> Path:
    place = write(folder, TOP_K, config("BatchTopKSAE"))
    torch.save([1], place / "ae.pt")
    return place


SAMPLE = Sample(
    "ae.pt",
    lambda folder, arrays: write(folder, arrays, config("BatchTopKSAE")),
    {key: value for key, value in TOP_K.items() if key != "k"},
    config="config.json",
)
