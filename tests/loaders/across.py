"""Cross-layer transcoders in the files of each format that has them, and what they mean in numpy. Knows no loader."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.loaders import writers
from tests.loaders.case import Array, jumprelu, relu
from tests.loaders.writers import D, F

LAYERS = 3
HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
CLT: dict[str, Any] = {"model_name": "Qwen/Qwen3-4B", "model_kind": "cross_layer_transcoder"} | HOOKS


@dataclass(frozen=True)
class Layer:
    """The features of one layer, and their decoder rows for each layer that they write."""

    w_enc: Any  # [D, F]
    b_enc: Any  # [F]
    threshold: Any  # [F]
    w_dec: dict[int, Any]  # layer → [F, D]
    b_dec: Any  # [D], of this layer's output


def layers(count: int = LAYERS, features: int = F, width: int = D, seed: int = 40) -> list[Layer]:
    """A transcoder of this many layers; two thresholds of each layer are below 0."""
    found = []
    for layer in range(count):
        one = writers.raw(d_in=width, d_out=width, features=features, seed=seed + layer)
        one["threshold"][:2] *= -1
        draw = np.random.default_rng(seed + 100 + layer)
        w_dec = {to: draw.normal(0, 0.5, (features, width)).astype(np.float32) for to in range(layer, count)}
        found.append(Layer(one["W_enc"], one["b_enc"], one["threshold"], w_dec, one["b_dec"]))
    return found


def circuit_tracer(folder: Path, found: list[Layer], first: int = 0, act: str = "jumprelu", **config: Any) -> Path:
    """Layers behind ``first``; decoders are [F, later layers, D], relative to their own layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CLT | config))
    for at, one in enumerate(found, first):
        arrays = {f"W_enc_{at}": one.w_enc.T, f"b_enc_{at}": one.b_enc, f"b_dec_{at}": one.b_dec}
        if act == "jumprelu":
            arrays[f"threshold_{at}"] = one.threshold
        writers.tensors(folder / f"W_enc_{at}.safetensors", arrays)
        decoders = np.stack([one.w_dec[to] for to in sorted(one.w_dec)], axis=1)
        writers.tensors(folder / f"W_dec_{at}.safetensors", {f"W_dec_{at}": decoders})
    return folder


def gemma_scope_2(folder: Path, found: list[Layer], config: dict[str, Any] | None = None, affine: bool = False) -> Path:
    """Decoders are [F, all layers, D]; what stands for earlier layers is junk."""
    for at, one in enumerate(found):
        w_dec = np.full((len(one.b_enc), len(found), one.w_enc.shape[0]), 77, np.float32)
        for to, rows in one.w_dec.items():
            w_dec[:, to] = rows
        arrays = {"w_enc": one.w_enc, "b_enc": one.b_enc, "threshold": one.threshold, "b_dec": one.b_dec}
        arrays |= {"w_dec": w_dec} | ({"affine_skip_connection": np.ones((D, D), np.float32)} if affine else {})
        writers.tensors(folder / f"params_layer_{at}.safetensors", arrays)
    if config is not None:
        writers.config(folder / "config.json", config)
    return folder


READS, WRITES = ([f"blocks.{n}.{hook}" for n in range(LAYERS)] for hook in ("mlp.hook_in", "hook_mlp_out"))
LENGTHS_IN, LENGTHS_OUT = [7.25, 6.5, 5.0], [3.5, 4.25, 2.0]


def llamascopium(
    folder: Path, found: list[Layer], act: str = "jumprelu", norm: str = "inference", gate: bool = True, **config: Any
) -> Path:
    """One file for all; W_D.{m} has the rows that each layer writes at layer m."""
    document = {
        "sae_type": "clt",
        "d_model": D,
        "expansion_factor": F / D,
        "act_fn": act,
        "norm_activation": norm,
        "sparsity_include_decoder_norm": gate,
        "hook_points_in": READS,
        "hook_points_out": WRITES,
    }
    writers.config(folder / "config.json", document | config)
    arrays = {"W_E": np.stack([one.w_enc for one in found]), "b_E": np.stack([one.b_enc for one in found])}
    if act == "jumprelu":
        logs = np.log(np.abs(np.stack([one.threshold for one in found])))
        arrays["activation_function.log_jumprelu_threshold"] = logs
    for to, one in enumerate(found):
        arrays[f"W_D.{to}"] = np.stack([source.w_dec[to] for source in found[: to + 1]])
        arrays[f"b_D.{to}"] = one.b_dec
    for hooks, lengths in ((READS, LENGTHS_IN), (WRITES, LENGTHS_OUT)):
        unset = [np.nan] * LAYERS
        for hook, length in zip(hooks, lengths if norm == "dataset-wise" else unset, strict=True):
            arrays[f"dataset_average_activation_norm.{hook}"] = np.array(length, np.float32)
    return writers.tensors(folder / "sae_weights.safetensors", arrays).parent


@dataclass(frozen=True)
class Case:
    """Files, and what the features of a layer add to another layer's output for x [..., D]: [F, ..., D]."""

    name: str
    write: Callable[[Path], Path]
    adds: Callable[[int, int, Array], Array]


def _adds(found: list[Layer], act: Callable[[Layer, Array], Array]) -> Callable[[int, int, Array], Array]:
    def adds(layer: int, to: int, x: Array) -> Array:
        one = found[layer]
        f = act(one, x @ one.w_enc.astype(float) + one.b_enc)
        return np.stack([f[..., i, None] * one.w_dec[to][i].astype(float) for i in range(f.shape[-1])])

    return adds


def cases() -> list[Case]:
    found = layers()
    jump = _adds(found, lambda one, pre: jumprelu(pre, one.threshold))
    raised = _adds(found, lambda one, pre: np.asarray(relu(pre) * (pre > one.threshold)))
    plain = _adds(found, lambda _, pre: relu(pre))

    def llama(norm: str, gate: bool) -> Callable[[int, int, Array], Array]:
        def adds(layer: int, to: int, x: Array) -> Array:
            fixed = norm == "dataset-wise"
            s_in = np.sqrt(D) / LENGTHS_IN[layer] if fixed else 1.0
            s_out = np.sqrt(D) / LENGTHS_OUT[to] if fixed else 1.0

            def act(one: Layer, pre: Array) -> Array:
                every = np.stack([rows.astype(float) for rows in one.w_dec.values()])
                n = np.sqrt((every**2).sum((0, 2))) if gate else 1.0
                return np.asarray(pre * (pre * n > np.abs(one.threshold)))

            return _adds(found, act)(layer, to, x * s_in) / s_out

        return adds

    def gated(norm: str, gate: bool) -> Case:
        name = f"llamascopium-{norm}{'-gate' * gate}"
        return Case(name, lambda folder: llamascopium(folder, found, norm=norm, gate=gate), llama(norm, gate))

    def gemma(folder: Path) -> Path:
        return gemma_scope_2(folder / "gemma-scope-2-1b-pt" / "clt" / "width_262k_l0_big", found)

    config = {"architecture": "jump_relu", "type": "clt", "model_name": "gemma-v3-1b-pt"}
    return [
        Case("circuit_tracer-jumprelu", lambda folder: circuit_tracer(folder, found), jump),
        Case("circuit_tracer-relu", lambda folder: circuit_tracer(folder, found, act="relu"), plain),
        Case("gemma_scope_2-path", gemma, raised),
        Case("gemma_scope_2-affine", lambda folder: gemma_scope_2(folder, found, config, affine=True), raised),
        *(gated(norm, gate) for norm in ("inference", "dataset-wise") for gate in (False, True)),
        Case("llamascopium-relu", lambda folder: llamascopium(folder, found, act="relu"), plain),
    ]


def wrong() -> list[tuple[str, Callable[[Path], Path], str]]:
    """Name, what writes faulty files, and words of the message."""
    found = layers()

    def without(folder: Path, write: Callable[[Path], Path], name: str) -> Path:
        place = write(folder)
        (place / name).unlink()
        return place

    def ct(folder: Path) -> Path:
        return circuit_tracer(folder, found)

    def gemma(folder: Path) -> Path:
        return gemma_scope_2(folder, found, {"type": "clt"})

    def flat(folder: Path) -> Path:
        place = ct(folder)
        writers.tensors(place / "W_dec_1.safetensors", {"W_dec_1": found[1].w_dec[1]})
        return place

    def narrow(folder: Path) -> Path:
        place = ct(folder)
        writers.tensors(place / "W_dec_1.safetensors", {"W_dec_1": np.ones((F - 1, 2, D), np.float32)})
        return place

    def short(folder: Path) -> Path:
        place = ct(folder)
        writers.tensors(place / "W_dec_1.safetensors", {"W_dec_1": np.ones((F, 1, D), np.float32)})
        return place

    last = "config.json: hook_points_out: "
    return [
        ("a layer missing", lambda f: without(f, ct, "W_enc_1.safetensors"), "layer 1: missing; expected every layer"),
        ("the last layer missing", lambda f: without(f, ct, "W_enc_2.safetensors"), "layer 2: missing; expected every"),
        ("decoders missing", lambda f: without(f, ct, "W_dec_1.safetensors"), "W_dec_1.safetensors: missing next to"),
        ("decoders of one layer", flat, "W_dec_1.safetensors: W_dec_1: shape [40, 24]; expected 3 sizes"),
        ("too few decoders", narrow, "W_dec_1.safetensors: W_dec_1[:, 0]: shape [39, 24]; expected [F, d_out]"),
        ("too few layers", short, "W_enc_1.safetensors: last site that it writes: mlp_out.1; expected mlp_out.2, as"),
        ("of google, a layer missing", lambda f: without(f, gemma, "params_layer_1.safetensors"), "layer 1: missing"),
        ("a crosscoder", lambda f: gemma_scope_2(f, found, {"type": "crosscoder"}), "type: 'crosscoder', by config"),
        (
            "nobody says",
            lambda f: gemma_scope_2(f, found),
            "type: None, by config.json or the folders' names; expected",
        ),
        (
            "hooks missing",
            lambda f: llamascopium(f, found, hook_points_in=None),
            "hook_points_in: None; expected a list",
        ),
        ("hooks apart", lambda f: llamascopium(f, found, hook_points_out=WRITES[::-1]), last),
        ("too few hooks", lambda f: llamascopium(f, found, hook_points_out=WRITES[:2]), last),
        ("topk", lambda f: llamascopium(f, found, act="topk"), "act_fn: 'topk'; expected one of relu, jumprelu"),
        ("other layers", lambda f: llamascopium(f, found, hook_points_in=READS[:2], hook_points_out=WRITES[:2]), "W_E"),
    ]
