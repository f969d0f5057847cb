"""A small world with everything that a spec may name, and random edits in it. Knows no plan and no engine."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from saesteer.dictionaries.coder import CoderInfo, SparseCoder

WIDTH, HEADS, FEATURES, TOKENS = 24, 40, 12, 14  # HEADS: the width of z
SITES = ["resid_mid.1", "mlp_in.1", "resid_post.1", "z.2", "resid_mid.2", "mlp_in.2", "mlp_out.2", "resid_post.2"]
NARROW = [site for site in SITES if site != "z.2"]  # as wide as the stream
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
    "heads": ("jumprelu", None, "none", "z.2"),
    "best heads": ("topk", 3, "l2_sqrt_d", "z.2"),
}
CLAMP = {"op": "clamp", "dictionary": "rect", "feature": 3, "value": 1.5}
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


def coder(seed: int, activation: Any, k: int | None, in_norm: Any, site: str, skip: bool) -> SparseCoder:
    draw, width = torch.Generator().manual_seed(seed), HEADS if site.startswith("z.") else WIDTH
    info = CoderInfo(
        "saesteer", width, width, FEATURES, activation, k, in_norm, has_max_act=True, skip_first=seed % 3, skip=skip
    )
    return SparseCoder(
        w_enc=torch.randn(FEATURES, width, generator=draw) / width**0.5 + 0.1,
        b_enc=torch.randn(FEATURES, generator=draw) * 0.3,
        w_dec=torch.randn(FEATURES, width, generator=draw) / width**0.5,
        b_dec=torch.randn(width, generator=draw),
        info=info,
        threshold=torch.rand(FEATURES, generator=draw) if activation == "jumprelu" else None,
        max_act=torch.rand(FEATURES, generator=draw) + 1,
        w_skip=torch.randn(width, width, generator=draw) if skip else None,
    )


SKIP = "across", "over", "under"
CODERS = {name: coder(seed, *kind, skip=name in SKIP) for seed, (name, kind) in enumerate(KINDS.items())}
_DRAW = np.random.default_rng(5)
VECTORS: dict[str, dict[int | None, Any]] = {
    "any": {None: _DRAW.normal(size=WIDTH).astype(np.float32)},
    "each": {layer: (3 * _DRAW.normal(size=WIDTH)).astype(np.float32) for layer in (1, 2)},
    "one": {1: _DRAW.normal(size=WIDTH).astype(np.float32)},
}
INLINE = [[float(np.float32(x)) for x in _DRAW.normal(size=WIDTH)] for _ in range(2)]
INLINE_WIDE = [float(np.float32(x)) for x in _DRAW.normal(size=HEADS)]
WIDE: dict[str, dict[int | None, Any]] = {
    "wide": {None: _DRAW.normal(size=HEADS).astype(np.float32)},
    "wide each": {2: (3 * _DRAW.normal(size=HEADS)).astype(np.float32)},
}
VECTORS["twin"] = VECTORS["any"]  # the same numbers with another bias
PROBES = [*VECTORS]  # of the stream
VECTORS |= WIDE
BIASES = {"any": 0.0, "each": 0.0, "one": -0.4, "twin": 0.9, "wide": 0.0, "wide each": 0.3}
STEP = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / WIDTH**0.5
UP = torch.randn(WIDTH, HEADS, generator=torch.Generator().manual_seed(10)) / WIDTH**0.5  # the stream to z
DOWN = torch.randn(HEADS, WIDTH, generator=torch.Generator().manual_seed(11)) / HEADS**0.5  # and back


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
def gates(draw: Any, wide: bool = False) -> Any:
    low, high = draw(values), draw(values)
    bounds = draw(
        st.sampled_from([{"above": low}, {"below": high}, {"above": min(low, high), "below": max(low, high) + 1}])
    )
    if draw(st.booleans()):
        return {"probe": draw(st.sampled_from(_probes(wide))), **bounds}
    return {"dictionary": draw(names), "feature": draw(features), **bounds}


def _probes(wide: bool) -> list[str]:
    """Those that an edit can name; "one" reads resid_post.1 wherever the edit is at layer 2."""
    return [*WIDE, "one"] if wide else PROBES


@st.composite
def strengths(draw: Any, wide: bool = False) -> Any:
    """A number, or what is read to make one."""
    if draw(st.integers(0, 2)):
        return draw(values)
    source = draw(st.sampled_from([{"probe": name} for name in _probes(wide)] + [{"dictionary": "rect", "feature": 1}]))
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
        wide = "heads" in found["dictionary"]
    elif wide := draw(st.integers(0, 4)) == 0:
        found["vector"] = draw(st.sampled_from([*WIDE, INLINE_WIDE]))
        found["site"] = draw(st.sampled_from(["z.2", ["z.2"]] + ["z"] * (found["vector"] == "wide each")))
    else:
        found["vector"] = draw(st.sampled_from([*PROBES, *INLINE]))
        site = st.sampled_from([*NARROW, "mlp_out.1", "resid_post", ["resid_mid.1", "resid_post.2"]])
        found["site"] = draw(site)
    if op == "clamp":
        mode = draw(st.sampled_from(["set", "add", "scale", "min", "max"]))
        unit = "raw" if mode == "scale" else draw(st.sampled_from(["raw", "max_act"]))
        value = draw(strengths(wide) if mode == "add" else values)
        found |= {"feature": draw(features), "value": value, "mode": mode, "unit": unit}
        found["only_if_active"] = draw(st.booleans())
    elif op == "add":
        found |= {"scale": draw(strengths(wide)), "norm": draw(st.sampled_from(["none", "match"]))}
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
        found["when"] = draw(st.one_of(gates(wide), st.lists(gates(wide), min_size=1, max_size=2)))
    scope = draw(scopes)
    return found | ({"scope": scope} if scope else {})
