"""A small world with everything that a spec may name, and random edits in it. Knows no plan and no engine."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from saesteer.dictionaries.coder import CoderInfo, SparseCoder

WIDTH, FEATURES, TOKENS = 24, 12, 14
SITES = ["resid_mid.1", "mlp_in.1", "resid_post.1", "resid_mid.2", "mlp_in.2", "mlp_out.2", "resid_post.2"]
# name → activation, k, input norm, site; where it reads at another site, both
KINDS: dict[str, tuple[Any, int | None, Any, str]] = {
    "rect": ("relu", None, "none", "resid_post.1"),
    "jump": ("jumprelu", None, "none", "resid_post.1"),
    "top": ("topk", 3, "none", "resid_post.1"),
    "abs": ("abstopk", 4, "none", "resid_mid.2"),
    "group": ("groupmax", 4, "none", "resid_mid.2"),
    "layer": ("jumprelu", None, "layer_norm", "resid_post.2"),
    "length": ("topk", 4, "l2_sqrt_d", "resid_post.2"),
    "inside": ("jumprelu", None, "none", "mlp_in.1"),
    "across": ("jumprelu", None, "none", "mlp_in.1:mlp_out.1"),
    "best": ("topk", 3, "none", "mlp_in.1:mlp_out.1"),
    "pregain": ("relu", None, "none", "mlp_in_pregain.1:mlp_out.1"),
    "over": ("topk", 3, "none", "mlp_in.2:mlp_out.2"),
    "under": ("jumprelu", None, "none", "mlp_in_pregain.2:mlp_out.2"),
    "ahead": ("relu", None, "none", "resid_post.1:resid_post.2"),
}
CALM = {"edits": [{"op": "ablate", "vector": "any", "site": "resid_mid.1"},
                  {"op": "clamp", "dictionary": "rect", "feature": 2, "value": 1.5}]}  # fmt: skip
MODULES = {
    "calm": CALM,
    "half": {"edits": [{"op": "reconstruct", "dictionary": "over"}]},
    "rebuilt": {"edits": [{"op": "reconstruct", "dictionary": "jump"}]},
    "nested": {
        "edits": [
            {"op": "use", "module": "calm", "scale": -0.5},
            {"op": "add", "vector": "each", "site": "resid_post"},
        ]
    },
}


def coder(seed: int, activation: Any, k: int | None, in_norm: Any, skip: bool) -> SparseCoder:
    draw = torch.Generator().manual_seed(seed)
    info = CoderInfo(
        "saesteer", WIDTH, WIDTH, FEATURES, activation, k, in_norm, has_max_act=True, skip_first=seed % 3, skip=skip
    )
    return SparseCoder(
        w_enc=torch.randn(FEATURES, WIDTH, generator=draw) / WIDTH**0.5 + 0.1,
        b_enc=torch.randn(FEATURES, generator=draw) * 0.3,
        w_dec=torch.randn(FEATURES, WIDTH, generator=draw) / WIDTH**0.5,
        b_dec=torch.randn(WIDTH, generator=draw),
        info=info,
        threshold=torch.rand(FEATURES, generator=draw) if activation == "jumprelu" else None,
        max_act=torch.rand(FEATURES, generator=draw) + 1,
        w_skip=torch.randn(WIDTH, WIDTH, generator=draw) if skip else None,
    )


SKIP = "across", "over", "under"
CODERS = {name: coder(seed, *kind[:3], skip=name in SKIP) for seed, (name, kind) in enumerate(KINDS.items())}
_DRAW = np.random.default_rng(5)
VECTORS: dict[str, dict[int | None, Any]] = {
    "any": {None: _DRAW.normal(size=WIDTH).astype(np.float32)},
    "each": {layer: (3 * _DRAW.normal(size=WIDTH)).astype(np.float32) for layer in (1, 2)},
    "one": {1: _DRAW.normal(size=WIDTH).astype(np.float32)},
}
INLINE = [[float(np.float32(x)) for x in _DRAW.normal(size=WIDTH)] for _ in range(2)]
BIASES = {"any": 0.0, "each": 0.0, "one": -0.4}
STEP = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / WIDTH**0.5


# What may be reconstructed: it writes where there is an op.
WHOLE = [name for name, kind in KINDS.items() if name != "group" and kind[3].rpartition(":")[2] in SITES]
values = st.integers(-40, 40).filter(bool).map(lambda n: n / 10)
scopes = st.one_of(
    st.none(),
    st.none(),
    st.fixed_dictionaries({}, optional={"prompt": st.booleans(), "skip_first": st.integers(0, 6)}),
    st.just({"positions": [[0, 3], [-2, None]]}),
)
names = st.sampled_from(list(KINDS))
features = st.integers(0, FEATURES - 1)


@st.composite
def gates(draw: Any) -> Any:
    low, high = draw(values), draw(values)
    bounds = draw(
        st.sampled_from([{"above": low}, {"below": high}, {"above": min(low, high), "below": max(low, high) + 1}])
    )
    if draw(st.booleans()):
        return {"probe": draw(st.sampled_from(list(VECTORS))), **bounds}
    return {"dictionary": draw(names), "feature": draw(features), **bounds}


@st.composite
def strengths(draw: Any) -> Any:
    """A number, or what is read to make one."""
    if draw(st.integers(0, 2)):
        return draw(values)
    source = draw(st.sampled_from([{"probe": name} for name in VECTORS] + [{"dictionary": "rect", "feature": 1}]))
    return source | draw(
        st.fixed_dictionaries({}, optional={"slope": values, "bias": values, "min": st.just(-1.5), "max": st.just(2.5)})
    )


@st.composite
def edits(draw: Any) -> Any:
    op = draw(st.sampled_from(["clamp", "clamp", "clamp", "add", "cap", "ablate", "reconstruct", "use"]))
    if op == "use":
        return {"op": op, "module": draw(st.sampled_from(list(MODULES))), "scale": draw(strengths())}
    found: dict[str, Any] = {"op": op}
    if op in ("clamp", "reconstruct"):
        found["dictionary"] = draw(names)
    else:
        found["vector"] = draw(st.sampled_from([*VECTORS, *INLINE]))
        site = st.sampled_from([*SITES, "mlp_out.1", "resid_post", ["resid_mid.1", "resid_post.2"]])
        found["site"] = draw(site)
    if op == "clamp":
        mode = draw(st.sampled_from(["set", "add", "scale", "min", "max"]))
        unit = "raw" if mode == "scale" else draw(st.sampled_from(["raw", "max_act"]))
        value = draw(strengths() if mode == "add" else values)
        found |= {"feature": draw(features), "value": value, "mode": mode, "unit": unit}
        found["only_if_active"] = draw(st.booleans())
    elif op == "add":
        found |= {"scale": draw(strengths()), "norm": draw(st.sampled_from(["none", "match"]))}
        if found["site"] == "resid_post":
            found["scales"] = draw(st.none() | st.lists(values, min_size=2, max_size=2))
    elif op == "cap":
        low, high = sorted((draw(values), draw(values)))
        found |= draw(st.sampled_from([{"min": low}, {"max": high}, {"min": low, "max": high}]))
    elif op == "reconstruct":
        found["error"] = draw(st.sampled_from(["keep", "drop", "drop"]))
    if op in ("cap", "ablate"):
        found["strength"] = draw(values)
    if draw(st.integers(0, 3)) == 0:
        found["when"] = draw(st.one_of(gates(), st.lists(gates(), min_size=1, max_size=2)))
    scope = draw(scopes)
    return found | ({"scope": scope} if scope else {})
