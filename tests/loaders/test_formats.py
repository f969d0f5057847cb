"""Every format, architecture and generation of config against its formula written out in numpy, in float64.

The formulas here know no loader and no torch; each case is one row of CASES.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saesteer.loaders import FORMATS, describe, load
from tests.loaders import writers
from tests.loaders.case import Array, Case, jumprelu, relu, topk
from tests.loaders.formats import (
    circuit_tracer,
    dictionary_learning,
    gemma_scope_2,
    llama_scope,
    llama_scope_r1,
    llamascopium,
    sparsify,
    torch_files,
)
from tests.loaders.writers import SEEN, D, F

X = writers.tokens()


def gemma_scope_cases() -> list[Case]:
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
        case("no-layer", "gemma-scope-2b-pt-res/copied", D, False, sites(None, None)),
        case("no-name", "some/layer_4/folder", D, False, sites(None, None, None)),
        case("lower-case", "some/folder", D, True, sites(None, None, None), scaling_factor=np.ones(F, np.float32)),
    ]


def saelens_cases() -> list[Case]:
    cases = []

    def add(name: str, cfg: dict[str, Any], arrays: dict[str, Any], **how: Any) -> None:
        facts = {"d_in": D, "features": F, "site_in": "resid_post.3", "model": "gpt2-small"} | how.pop("facts", {})
        encode, decode = saelens_formula(arrays, **how)
        cases.append(
            Case(f"saelens-{name}", lambda folder: writers.saelens(folder, cfg, arrays), encode, decode, facts)
        )

    full = writers.raw(seed=3)
    plain = {key: full[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
    draw = np.random.default_rng(4)
    gated = {key: full[key] for key in ("W_enc", "W_dec", "b_dec")}
    gated |= {key: draw.normal(0, 0.6, F).astype(np.float32) for key in ("b_gate", "b_mag", "r_mag")}
    negative = full | {"threshold": np.where(np.arange(F) % 3, full["threshold"], np.float32(-1))}
    logs = {key: value for key, value in full.items() if key != "threshold"} | {
        "log_threshold": np.log(full["threshold"])
    }
    v6, old = writers.saelens_cfg, writers.old_saelens_cfg
    add("v6-standard", v6("standard"), plain, kind="relu", facts={"activation": "relu"})
    add("v6-standard-no-subtraction", v6("standard", apply_b_dec_to_input=False), plain, kind="relu", subtract=False)
    add("v6-jumprelu", v6("jumprelu"), full, kind="jumprelu", facts={"activation": "jumprelu"})
    add("v6-jumprelu-negative", v6("jumprelu"), negative, kind="jumprelu")
    add("v6-jumprelu-log", v6("jumprelu"), logs, kind="jumprelu")
    add("v6-gated", v6("gated"), gated, kind="gated", facts={"activation": "jumprelu"})
    add("v6-topk", v6("topk", k=5), plain, kind="topk", k=5, facts={"activation": "topk", "k": 5})
    add("v6-topk-rescaled", v6("topk", k=5, rescale_acts_by_decoder_norm=True), plain, kind="topk", k=5, rescale=True)
    add("v6-abstopk", v6("abstopk", k=5), plain, kind="abstopk", k=5, facts={"activation": "abstopk", "k": 5})
    add(
        "v6-abstopk-rescaled",
        v6("abstopk", k=5, rescale_acts_by_decoder_norm=True),
        plain,
        kind="abstopk",
        k=5,
        rescale=True,
    )
    wide = writers.raw(d_out=12, seed=7)
    for name, kind in (("transcoder", "relu"), ("jumprelu_transcoder", "jumprelu")):
        # apply_b_dec_to_input is true in this cfg, and b_dec is of the output.
        cfg = v6(name, hook="blocks.3.mlp.hook_in", d_out=12)
        cfg["metadata"] |= {"hook_name_out": "blocks.3.hook_mlp_out"}
        arrays = wide if kind == "jumprelu" else {key: wide[key] for key in plain}
        facts = {"site_in": "mlp_in.3", "site_out": "mlp_out.3", "d_out": 12, "activation": kind}
        add(f"v6-{name}", cfg, arrays, kind=kind, subtract=False, facts=facts)
    for norm, ours in (("layer_norm", "layer_norm"), ("constant_norm_rescale", "l2_sqrt_d")):
        facts = {"in_norm": ours, "feature_unit": "normalised"}
        cfg = {"normalize_activations": norm}
        add(f"v6-standard-{norm}", v6("standard", **cfg), plain, kind="relu", norm=norm, facts=facts)
        add(f"v6-gated-{norm}", v6("gated", **cfg), gated, kind="gated", norm=norm, facts=facts)
        add(
            f"old-topk-{norm}",
            old(activation_fn="topk", activation_fn_kwargs={"k": 4}, **cfg),
            plain,
            kind="topk",
            k=4,
            norm=norm,
        )
    z = v6("standard", hook="blocks.3.attn.hook_z", reshape_activations="hook_z")
    add("v6-z", z, plain, kind="relu", facts={"site_in": "z.3", "site_out": "z.3"})
    add("old-standard", old(), plain, kind="relu")
    add("old-standard-bool-norm", old(normalize_activations=False), plain, kind="relu")
    add("oldest-standard", old(oldest=True), plain | {"scaling_factor": np.ones(F, np.float32)}, kind="relu")
    add("old-jumprelu", old(architecture="jumprelu", apply_b_dec_to_input=False), full, kind="jumprelu", subtract=False)
    add("old-gated", old(architecture="gated"), gated, kind="gated")
    return cases


def saelens_formula(
    r: dict[str, Any], *, kind: str, k: int = 0, rescale: bool = False, subtract: bool = True, norm: str = "none"
) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    lengths = np.sqrt((r["W_dec"].astype(float) ** 2).sum(1)) if rescale else np.ones(F)

    def statistics(x: Array) -> tuple[Array, Array]:
        """(shift, scale) with xn = (x - shift) / scale, and their use on the way out."""
        if norm == "layer_norm":
            return x.mean(-1, keepdims=True), x.std(-1, ddof=1, keepdims=True)
        if norm == "constant_norm_rescale":
            return np.zeros(1), np.sqrt((x**2).sum(-1, keepdims=True)) / np.sqrt(D)
        return np.zeros(1), np.ones(1)

    def encode(x: Array) -> Array:
        shift, scale = statistics(x)
        xs = (x - shift) / (scale + (1e-5 if norm == "layer_norm" else 0)) - (r["b_dec"] if subtract else 0)
        if kind == "gated":
            gate = xs @ r["W_enc"] + r["b_gate"] > 0
            return np.asarray(gate * relu(xs @ (r["W_enc"] * np.exp(r["r_mag"].astype(float))) + r["b_mag"]))
        pre = (xs @ r["W_enc"] + r["b_enc"]) * lengths
        if kind == "jumprelu":
            theta = r["threshold"] if "threshold" in r else np.exp(r["log_threshold"])
            return np.asarray(relu(pre) * (pre > theta))
        if kind == "abstopk":
            return np.sign(pre) * topk(np.abs(pre), k)
        return topk(pre, k) if kind == "topk" else relu(pre)

    def decode(f: Array, x: Array) -> Array:
        shift, scale = statistics(x)
        return np.asarray(((f / lengths) @ r["W_dec"] + r["b_dec"]) * scale + shift)

    return encode, decode


def manifest_cases() -> list[Case]:
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


def own_cases() -> list[Case]:
    r = writers.raw(seed=6)
    tensors = writers.own_tensors(r)
    bare = {key: value for key, value in tensors.items() if key not in ("threshold", "max_act")}
    one = tensors | {"threshold": np.array([0.4], np.float32)}

    def case(
        name: str, arrays: dict[str, Any], act: Callable[[Array], Array], facts: dict[str, Any], **said: str
    ) -> Case:
        file = "saesteer.safetensors" if name == "folder" else "any name.safetensors"
        return Case(
            f"own-{name}",
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


MORE = [
    gemma_scope_2,
    dictionary_learning,
    llama_scope,
    llama_scope_r1,
    llamascopium,
    sparsify,
    circuit_tracer,
    torch_files,
]
CASES = [*gemma_scope_cases(), *saelens_cases(), *manifest_cases(), *own_cases()]
CASES += [case for module in MORE for case in module.cases()]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(ours: torch.Tensor, truth: Array, x: NDArray[np.float32]) -> None:
    """Within 1e-5 of each token's own size."""
    size = 1 + np.abs(x).max(-1, keepdims=True)
    assert ours.dtype == torch.float32
    assert ours.shape == truth.shape
    np.testing.assert_array_less(np.abs(ours.numpy() - truth) / size, 2e-5)


@every_case
def test_encode_and_decode_are_the_formula(case: Case, tmp_path: Path) -> None:
    coder = load(str(case.write(tmp_path)))
    x = X.astype(float)
    f = case.encode(x)
    assert (f == 0).any()
    assert (f != 0).any()
    ours = coder.encode(torch.from_numpy(X))
    close(ours, f, X)
    assert np.array_equal(ours.numpy() == 0, f == 0)
    close(coder.decode(ours, like=torch.from_numpy(X)), case.decode(f, x), X)


@every_case
def test_describe_says_what_read_says_and_the_facts(case: Case, tmp_path: Path) -> None:
    place = str(case.write(tmp_path))
    info = describe(place)
    assert info == load(place).info
    assert info.source == place
    assert {name: getattr(info, name) for name in case.facts} == case.facts
    assert type(info).from_json(info.to_json()) == info


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrices_come_in_the_dtype_asked_for_and_the_rest_in_float32(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    place = str(case.write(tmp_path))
    wide, narrow = load(place), load(place, dtype=dtype)
    assert wide.w_enc.dtype == wide.w_dec.dtype == torch.float32
    assert torch.equal(narrow.w_enc, wide.w_enc.to(dtype))
    assert torch.equal(narrow.w_dec, wide.w_dec.to(dtype))
    for name in ("b_dec", "threshold", "max_act"):
        ours, theirs = getattr(narrow, name), getattr(wide, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_every_format_has_cases() -> None:
    assert {case.name.split("-")[0].replace("own", "saesteer") for case in CASES} == set(FORMATS)
