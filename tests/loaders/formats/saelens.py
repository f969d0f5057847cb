"""Files of SAELens and what they mean: every architecture, in both generations of cfg."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.loaders import writers
from tests.loaders.case import Array, Case, Row, Sample, Told, relu, topk
from tests.loaders.writers import D, F

R = writers.raw()
CHANGING = ("fold_ln", "fold_value_biases", "refactor_factored_attn_matrices")  # TransformerLens' options
PLAIN = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in R.items() if name != key}


def cases() -> list[Case]:
    cases = []

    def add(name: str, cfg: dict[str, Any], arrays: dict[str, Any], **how: Any) -> None:
        facts = {"d_in": D, "features": F, "site_in": "resid_post.3", "model": "gpt2-small"} | how.pop("facts", {})
        place = how.pop("place", "any")
        encode, decode = saelens_formula(arrays, **how)
        cases.append(
            Case(f"saelens-{name}", lambda folder: writers.saelens(folder / place, cfg, arrays), encode, decode, facts)
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
    centring = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    for name in ("standard", "jumprelu", "gated", "topk"):
        k: dict[str, Any] = {"k": 5} if name == "topk" else {}
        cfg = v6(name, **k)
        cfg["metadata"] |= centring
        arrays = {"jumprelu": full, "gated": gated}.get(name, plain)
        kind = "relu" if name == "standard" else name
        add(f"v6-centred-{name}", cfg, arrays, kind=kind, centred=True, **k)
    cfg = v6("standard", normalize_activations="layer_norm")
    cfg["metadata"] |= centring  # which a layer norm does as well
    add("v6-centred-layer_norm", cfg, plain, kind="relu", norm="layer_norm")
    cfg = v6("standard", normalize_activations="constant_norm_rescale")
    cfg["metadata"] |= centring | {"model_name": "google/gemma-2-2b"}  # which TransformerLens ignores for RMSNorm
    facts = {"in_norm": "l2_sqrt_d", "model": "google/gemma-2-2b"}
    add("v6-uncentred-l2", cfg, plain, kind="relu", norm="constant_norm_rescale", facts=facts)
    cfg = v6("standard")
    cfg["metadata"] |= centring | {"model_name": "meta-llama/Llama-3.1-8B"}
    add("v6-uncentred", cfg, plain, kind="relu", facts={"model": "meta-llama/Llama-3.1-8B"})
    cfg = v6("standard")
    cfg["metadata"] |= {
        "model_from_pretrained_kwargs": dict.fromkeys(CHANGING, True)
    }  # none of which changes the stream
    add("v6-options", cfg, plain, kind="relu")
    hooks = {"model.layers.4": "resid_post.4", "transformer.h.3": "resid_post.3", "blocks.3.hook_in": "resid_pre.3"}
    hooks |= {"model.layers.2.mlp": "mlp_out.2", "blocks.5.hook_out": "resid_post.5"}
    for name, site in hooks.items():
        add(f"v6-{name}", v6("standard", hook=name), plain, kind="relu", facts={"site_in": site})
    for name, said in {"true": True, "ids": [0, 2]}.items():
        cfg = v6("standard")
        cfg["metadata"] |= {"seqpos_slice": [5, None], "exclude_special_tokens": said}
        facts = {"skip_first": 5, "exclude_special_tokens": True}
        add(f"v6-trained-on-{name}", cfg, plain, kind="relu", facts=facts)
    anywhere: dict[str, Any] = {"seqpos_slice": [None], "exclude_special_tokens": False}
    facts = {"skip_first": 1, "exclude_special_tokens": False}
    add("old-trained-anywhere", old(**anywhere), plain, kind="relu", facts=facts)
    add("old-trained-until", old(seqpos_slice=[9]), plain, kind="relu", facts={"skip_first": 1})
    z["metadata"] |= centring  # which does not change z
    add("v6-centred-z", z, plain, kind="relu", facts={"site_in": "z.3", "site_out": "z.3"})
    cached = "models--jbloom--GPT2-Small-SAEs-Reformatted/snapshots/abc/blocks.3.hook_resid_post"
    add("old-centred", old(), plain, kind="relu", centred=True, place=cached)
    add("old-copied", old(), plain, kind="relu", centred=True, place="GPT2-Small-SAEs-Reformatted/layer_3")
    add("old-other-repository", old(), plain, kind="relu", place=cached.replace("/snapshots", "-v2/snapshots"))
    old_topk = old(architecture="topk", activation_fn="topk", activation_fn_kwargs={"k": 4})
    add("old-topk-architecture", old_topk, plain, kind="topk", k=4, facts={"activation": "topk", "k": 4})
    cached = "models--JoshEngels--Mistral-7B-Residual-Stream-SAEs/snapshots/abc/mistral_7b_layer_8"
    facts = {"in_norm": "l2_sqrt_d", "feature_unit": "normalised"}
    unsaid = old(normalize_activations=False)
    other = cached.replace("/snapshots", "-v2/snapshots")
    add("old-unnormed", unsaid, plain, kind="relu", place=other)
    add("old-normed", unsaid, plain, kind="relu", norm="constant_norm_rescale", place=cached, facts=facts)
    add("old-standard-bool-norm", old(normalize_activations=False), plain, kind="relu")
    add("oldest-standard", old(oldest=True), plain | {"scaling_factor": np.ones(F, np.float32)}, kind="relu")
    add("old-jumprelu", old(architecture="jumprelu", apply_b_dec_to_input=False), full, kind="jumprelu", subtract=False)
    add("old-gated", old(architecture="gated"), gated, kind="gated")
    return cases


def saelens_formula(
    r: dict[str, Any],
    *,
    kind: str,
    k: int = 0,
    rescale: bool = False,
    subtract: bool = True,
    norm: str = "none",
    centred: bool = False,
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
        x = x - x.mean(-1, keepdims=True) if centred else x
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


def wrong() -> list[Row]:
    def row(name: str, cfg: dict[str, Any], words: str, arrays: dict[str, Any] = R) -> Row:
        return f"saelens-{name}", lambda folder: writers.saelens(folder, cfg, arrays), words

    def meta(**more: Any) -> dict[str, Any]:
        cfg = v6("jumprelu")
        return cfg | {"metadata": cfg["metadata"] | more}

    v6, old = writers.saelens_cfg, writers.old_saelens_cfg
    refused = ["matching_pursuit", "temporal", "batchtopk", "matryoshka_batchtopk", "new"]
    head = "blocks.1.attn.hook_z"
    centred_l2 = meta(model_from_pretrained_kwargs={"center_writing_weights": True})
    hooks = {"fold_ln": "blocks.1.attn.hook_in"} | dict.fromkeys(CHANGING[1:], head)
    folded = v6("transcoder", hook="blocks.1.mlp.hook_in", d_out=D)
    folded["metadata"] |= {"model_from_pretrained_kwargs": {"fold_ln": True}}
    centred_l2 |= {"normalize_activations": "constant_norm_rescale"}
    return [
        *(row(name, v6(name), f"cfg.json: architecture: '{name}' (", PLAIN) for name in refused),
        row("no-d_out", v6("transcoder"), "d_out: None; expected a whole number", PLAIN),
        row(
            "normed", v6("transcoder", d_out=D, normalize_activations="layer_norm"), "layer_norm; expected none", PLAIN
        ),
        row("written", v6("transcoder", d_out=12), "W_dec: shape [40, 24]; expected [d_sae, d_out] = [40, 12]", PLAIN),
        row("no-architecture", {k: v for k, v in v6("standard").items() if k != "architecture"}, "architecture: None"),
        row(
            "average",
            v6("jumprelu", normalize_activations="expected_average_only_in"),
            "its constant is not in the files",
        ),
        row("average-bool", old(normalize_activations=True), "its constant is not in the files", PLAIN),
        row(
            "whitening", v6("jumprelu", normalize_activations="covariance_whitening"), "the whitening is not folded in"
        ),
        row("norm", v6("jumprelu", normalize_activations="other"), "normalize_activations: 'other'"),
        row("norm-number", v6("jumprelu", normalize_activations=3), "normalize_activations: 3"),
        row(
            "subtract",
            v6("jumprelu", apply_b_dec_to_input="yes"),
            "apply_b_dec_to_input: 'yes'; expected true or false",
        ),
        row("no-k", v6("topk"), "k: None; expected a whole number", PLAIN),
        row("k-bool", v6("topk", k=True), "k: True; expected a whole number", PLAIN),
        row("large-k", v6("topk", k=F + 1), "k: 41; expected at most d_sae = 40", PLAIN),
        row("old-no-k", old(activation_fn="topk"), "activation_fn_kwargs: None", PLAIN),
        row("tanh", old(activation_fn="tanh-relu"), "activation_fn: 'tanh-relu'; expected relu", PLAIN),
        row("square", v6("standard", d_sae=D), "F other than d_in", {k: writers.raw(features=D)[k] for k in PLAIN}),
        row("unsaid-threshold", v6("standard"), "threshold: an unknown key"),
        row("scaled", old(), "scaling_factor: not all ones", PLAIN | {"scaling_factor": R["b_enc"]}),
        row("overflow", v6("standard"), "b_enc: outside the range", PLAIN | {"b_dec": np.full(D, 3e38, np.float32)}),
        row("one-head", meta(hook_name=head, hook_head_index=3), "hook_head_index: 3; expected null"),
        row("mlp_in", meta(hook_name="blocks.1.hook_mlp_in"), "hook_name: blocks.1.hook_mlp_in, on either side"),
        row("two-places", meta(hf_hook_name="model.layers.4.output"), "is resid_post.4, hook_name"),
        row("positions", meta(seqpos_slice=[-5, None]), "seqpos_slice: [-5, None]; expected [start, end]"),
        row("reshape", v6("jumprelu", reshape_activations="hook_z"), "reshape_activations: 'hook_z'"),
        row(
            "centred-l2", centred_l2, "model_from_pretrained_kwargs: center_writing_weights, with a norm of the centred"
        ),
        row(
            "centred",
            meta(model_from_pretrained_kwargs={"center_writing_weights": 1}),
            "center_writing_weights: 1; exp",
        ),
        *(
            row(
                f"centred-{name}",
                meta(model_name=name, model_from_pretrained_kwargs={"center_writing_weights": True}),
                f"cfg.json: model_name: {name!r}; expected a name that tells the model's norm",
            )
            for name in (None, "bigscience/bloom-560m", "mine", "runs/gpt2/llama")
        ),
        *(
            row(
                key,
                meta(hook_name=hook, model_from_pretrained_kwargs={key: True}),
                f"model_from_pretrained_kwargs: {key} at ",
            )
            for key, hook in hooks.items()
        ),
        row("folded", folded, "model_from_pretrained_kwargs: fold_ln at mlp_in.1; expected false there", PLAIN),
        row("name", meta(hook_name=7), "hook_name: 7; expected a string"),
        row("metadata", v6("jumprelu") | {"metadata": []}, "metadata: []; expected a JSON object"),
        row(
            "log-overflow",
            v6("jumprelu"),
            "finite",
            without("threshold") | {"log_threshold": np.full(F, np.inf, np.float32)},
        ),
    ]


def described() -> list[Told]:
    wide = writers.raw(d_out=12, seed=7) | {"W_skip": np.triu(np.ones((12, D), np.float32))}

    def told(name: str, activation: str, arrays: dict[str, Any]) -> Told:
        cfg = writers.saelens_cfg(name, hook="blocks.3.mlp.hook_in", d_out=12)
        cfg["metadata"] |= {"hook_name_out": "blocks.3.hook_mlp_out"}
        facts = {"activation": activation, "site_in": "mlp_in.3", "site_out": "mlp_out.3", "d_out": 12}
        facts["w_skip"] = arrays["W_skip"]
        return f"saelens-{name}", lambda folder: writers.saelens(folder, cfg, arrays), facts

    return [
        told("skip_transcoder", "relu", {key: wide[key] for key in (*PLAIN, "W_skip")}),
        told("jumprelu_skip_transcoder", "jumprelu", wide),
    ]


SAMPLE = Sample(
    "sae_weights.safetensors",
    lambda folder, arrays: writers.saelens(folder, writers.saelens_cfg("jumprelu"), arrays),
    R,
    config="cfg.json",
)
