"""Sets of circuit-tracer and what they mean: W_enc is [F, d], thresholds may be below 0, hooks stand in the config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, Told, jumprelu, relu, topk
from tests.loaders.writers import D

R = writers.raw(d_out=12, seed=19)
THETA = np.where(np.arange(len(R["threshold"])) % 5, R["threshold"], -R["threshold"])
K = 5
ARRAYS = {"W_enc": R["W_enc"].T, "W_dec": R["W_dec"], "b_enc": R["b_enc"], "b_dec": R["b_dec"]}
JUMP = {"activation_function.threshold": THETA}
SAME: dict[str, Any] = dict.fromkeys(("feature_input_hook", "feature_output_hook"), "hook_resid_post")
CONFIG: dict[str, Any] = {
    "model_name": "Qwen/Qwen3-4B",
    "model_kind": "transcoder_set",
    "feature_input_hook": "mlp.hook_in",
    "feature_output_hook": "mlp.hook_out",
    "scan": "mwhanna/qwen3-4b-transcoders",
}


def write(folder: Path, arrays: dict[str, Any], layers: tuple[int, ...] = (3,), **config: Any) -> Path:
    """Each layer has another width of features, and other values."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | config))
    for layer in layers:
        less = layer - layers[-1]
        cut = {key: value if key == "b_dec" or not less else value[:less] for key, value in arrays.items()}
        writers.tensors(folder / f"layer_{layer}.safetensors", cut)
    return folder


def unsaid(folder: Path, arrays: dict[str, Any], layers: tuple[int, ...] = (3,)) -> Path:
    """A set without its config."""
    (write(folder, arrays, layers) / "config.yaml").unlink()
    return folder


def cases() -> list[Case]:
    def case(name: str, act: str, sites: tuple[Any, Any], suffix: str = "", **more: Any) -> Case:
        arrays = ARRAYS | (JUMP if act == "jumprelu" else {})
        facts = {"activation": act, "site_in": sites[0], "site_out": sites[1], "d_in": D, "d_out": 12}

        def encode(x: Array) -> Array:
            pre = x @ R["W_enc"] + R["b_enc"]
            return relu(pre) if act == "relu" else topk(pre, K) if act == "topk" else jumprelu(pre, THETA)

        return Case(
            f"circuit_tracer-{name}",
            lambda folder: Path(f"{write(folder, arrays, **more)}{suffix}"),
            encode,
            lambda f, x: f @ R["W_dec"] + R["b_dec"],
            facts | {"model": more.get("model_name", "Qwen/Qwen3-4B")},
        )

    def hooks(read: str, written: str = "hook_mlp_out") -> dict[str, Any]:
        return {"feature_input_hook": read, "feature_output_hook": written}

    def bare(name: str, place: str, act: str, sites: tuple[Any, Any], model: str | None) -> Case:
        one = case(name, act, sites, model_name=model)
        arrays = ARRAYS | (JUMP if act == "jumprelu" else {})
        return replace(one, write=lambda folder: Path(f"{unsaid(folder / place, arrays, (1, 3))}#layer_3"))

    both, gemma = ("mlp_in.3", "mlp_out.3"), "google/gemma-3-1b-it"
    named = "models--mwhanna--qwen3-14b-transcoders-lowl0/snapshots/abc"
    return [
        bare("no-config", "any", "relu", (None, None), None),
        bare("no-config-jumprelu", "any", "jumprelu", (None, None), None),
        bare("qwen3-14b", named, "relu", both, "Qwen/Qwen3-14B"),
        case("relu", "relu", both),
        case("jumprelu", "jumprelu", both),
        case("topk", "topk", both, activation="topk", k=K),
        case("chosen", "relu", both, "#layer_3", layers=(1, 3)),
        case("by-file", "relu", both, "/layer_3.safetensors", layers=(1, 3)),
        case("resid_mid", "relu", ("resid_mid.3", "mlp_out.3"), **hooks("hook_resid_mid")),
        case("pregain", "relu", ("mlp_in_pregain.3", "mlp_out.3"), **hooks("ln2.hook_normalized")),
        case("post-norm", "relu", ("mlp_in.3", "mlp_out_raw.3"), model_name=gemma),
        case("no-output", "relu", ("resid_mid.3", None), feature_input_hook="hook_resid_mid", feature_output_hook=None),
        case("ambiguous", "relu", (None, "mlp_out.3"), **hooks("hook_mlp_in")),
    ]


LISTED = (
    "a list of files of other repositories, which is not served; expected the place of one of them, such as "
    "google/gemma-scope-2b-pt-transcoders/layer_0/width_16k/average_l0_76/params.npz, with the site that it reads"
)


def wrong() -> list[Row]:
    def row(name: str, words: str, arrays: dict[str, Any] = ARRAYS, **config: Any) -> Row:
        return f"circuit_tracer-{name}", lambda folder: write(folder, arrays, **config), words

    def text(folder: Path, content: str) -> Path:
        write(folder, ARRAYS)
        (folder / "config.yaml").write_text(content)
        return folder

    listed = ["hf://google/gemma-scope-2b-pt-transcoders/layer_0/width_16k/average_l0_76/params.npz"]
    skip = ARRAYS | {"W_skip": np.ones((D, 12), np.float32)}
    return [
        row("skip", "layer_3.safetensors: W_skip: shape [24, 12]; expected", skip),
        row("logs", "log_thresholds: an unknown key", ARRAYS | {"log_thresholds": R["threshold"]}),
        row("clt", "W_enc_*.safetensors: 0 files and none chosen", model_kind="cross_layer_transcoder"),
        row("kind", "config.yaml: model_kind: 'lorsa'; expected transcoder_set or cross_layer_tr", model_kind="lorsa"),
        row("list", f"config.yaml: transcoders: {LISTED}", transcoders=listed),
        row("list-of-one", f"config.yaml: transcoders: {LISTED}", transcoders=listed[0] + "?revision=main"),
        row("none-chosen", ": 2 dictionaries and none chosen; expected one of", layers=(0, 1)),
        row("widths", "W_dec: width 12 for an input of 24; expected equal widths at resid_post.3", **SAME),
        row("topk", "config.yaml: k: None; expected a whole number", activation="topk"),
        row("unsaid-topk", "layer_3.safetensors: k: an unknown key", ARRAYS | {"k": np.array(5)}),
        (
            "circuit_tracer-no-config-topk",
            lambda folder: unsaid(folder, ARRAYS | {"k": np.array(5)}),
            "layer_3.safetensors: k: an unknown key",
        ),
        (
            "circuit_tracer-no-config-none-chosen",
            lambda folder: unsaid(folder, ARRAYS, (1, 3)),
            ": 2 dictionaries and none chosen; expected one of",
        ),
        (
            "circuit_tracer-crv",
            lambda folder: write(folder / "models--facebook--crv-8b-instruct-transcoders" / "snapshots", ARRAYS),
            "config.yaml: k: 128; expected at most F = 40",
        ),
        (
            "circuit_tracer-missing",
            lambda folder: Path(f"{write(folder, ARRAYS, (1, 3))}#layer_2"),
            "no file layer_2.safetensors in",
        ),
        ("circuit_tracer-yaml", lambda folder: text(folder, "{"), "config.yaml: not readable; expected keys"),
        ("circuit_tracer-object", lambda folder: text(folder, "!!python/object:os.x {}"), "config.yaml: not readable"),
        ("circuit_tracer-yaml-list", lambda folder: text(folder, "- 1"), "config.yaml: holds a YAML list; expected"),
        ("circuit_tracer-long", lambda folder: text(folder, "#" * (2 << 20)), "2097152 bytes of YAML"),
    ]


def described() -> list[Told]:
    arrays = ARRAYS | {"W_skip": np.triu(np.ones((12, D), np.float32))}
    hooks: dict[str, Any] = {"feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}
    facts = {"site_in": "resid_mid.3", "site_out": "mlp_out.3", "d_out": 12, "w_skip": arrays["W_skip"]}
    return [("circuit_tracer-skip", lambda folder: write(folder, arrays, **hooks), facts)]


SAMPLE = Sample("layer_3.safetensors", write, ARRAYS | JUMP, config="config.yaml", optional=set(JUMP))
