"""What a spec means, written a second time from the definition: float64, one token at a time. Knows no plan, no table,
no op and no coder class: it reads the JSON, and weights as plain arrays.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Of a bound or a rival: there float32 may fall on the other side. A GPU's products of float32 are rounded to tf32.
NEAR = 1e-2 if torch.cuda.device_count() else 1e-3


@dataclass
class Dict:
    """A dictionary's weights and rules."""

    site: str
    w_enc: Array
    b_enc: Array
    w_dec: Array
    b_dec: Array
    activation: str
    k: int = 0
    threshold: Array | None = None
    in_norm: str = "none"
    max_act: Array | None = None
    skip_first: int = 1
    reads: str = ""  # where it reads, if that is another site
    w_skip: Array | None = None  # [d_out, d_in]
    later: Mapping[str, Array] = field(default_factory=dict)  # of a cross-layer transcoder: w_dec at each later site

    def __post_init__(self) -> None:
        self.reads = self.reads or self.site


@dataclass
class World:
    """What a spec may name."""

    sites: list[str]  # in the order of the forward pass
    dictionaries: Mapping[str, Dict]  # a cross-layer transcoder's by name@layer
    vectors: Mapping[str, Mapping[int | None, Array]]
    biases: Mapping[str, float]
    modules: Mapping[str, Any]


@dataclass
class Token:
    """One token on its way through the sites."""

    world: World
    position: int
    prompt_len: int
    before: dict[str, Array] = field(default_factory=dict)  # x at each site, before its edits
    sure: bool = True  # no bound was near

    def visit(self, site: str, edits: list[Any], x: Array) -> Array:
        """x' at one site; the sites must be visited in order."""
        self.before[site] = x.copy()
        group: list[tuple[Any, Any]] = []
        runs: list[tuple[str, int] | None] = []
        for edit, scale, run in [*flat(edits, self.world.modules), (None, (), -1)]:
            if edit is not None and site not in places(edit, self.world):
                continue
            mine = (edit["dictionary"], run) if edit is not None and edit["op"] in ("clamp", "reconstruct") else None
            if group and (mine is None or runs[-1] != mine):
                x = self.clamps(group, site, x)
                group = []
            if edit is None:
                break
            runs.append(mine)
            if edit["op"] == "clamp":
                group.append((edit, scale))
            elif edit["op"] == "reconstruct":
                x = self.clamps(group, site, x, (edit, scale))
                group = []
            elif self.applies(edit, site):
                x = self.along(edit, scale, site, x)
        return x

    def clamps(self, group: list[tuple[Any, Any]], site: str, x: Array, whole: tuple[Any, Any] | None = None) -> Array:
        """Clamps of one dictionary, or of all layers of a cross-layer transcoder, and a reconstruction behind them."""
        delta = np.zeros_like(x)
        for name in dict.fromkeys(key(edit) for edit, _ in [*group, *([whole] if whole else [])]):
            delta += self.change([pair for pair in group if key(pair[0]) == name], name, site, x, whole)
        return x + delta

    def change(self, group: list[tuple[Any, Any]], name: str, site: str, x: Array, whole: Any) -> Array:
        one = self.world.dictionaries[name]
        dropped = whole is not None and whole[0].get("error", "drop") == "drop"
        arriving = x if one.reads == one.site else self.before[one.reads]
        f = self.encode(one, arriving, None if dropped else [edit["feature"] for edit, _ in group])
        grow = {"none": 1.0, "layer_norm": x.std(ddof=1), "l2_sqrt_d": np.linalg.norm(x) / np.sqrt(x.size)}[one.in_norm]
        if one.reads != one.site:  # what it writes is no image of what it reads
            grow = 1.0
        delta = np.zeros_like(x)
        bands: dict[int, float] = {}
        # min and max of one feature make a band, whichever stands first
        for edit, scale in sorted(group, key=lambda pair: pair[0].get("mode") == "max"):
            i, mode = edit["feature"], edit.get("mode", "set")
            if not self.applies(edit, one.site, one.skip_first) or (edit.get("only_if_active") and f[i] == 0):
                continue
            v = self.number(edit["value"], one.site) * (
                one.max_act[i] if edit.get("unit") == "max_act" and one.max_act is not None else 1
            )
            now = bands.get(i, f[i])
            changed = {"set": v, "add": f[i] + v, "scale": f[i] * v, "min": max(now, v), "max": min(now, v)}[mode]
            row = one.w_dec[i] if site == one.site else one.later[site][i]
            delta += self.number(scale, one.site) * (changed - now) * row * grow
            bands[i] = changed
        if whole and dropped and self.applies(whole[0], one.site, one.skip_first):
            mean = x.mean() if one.in_norm == "layer_norm" else 0.0
            made = f @ one.w_dec + one.b_dec
            if one.w_skip is not None:
                size = np.sqrt(arriving.size) / np.linalg.norm(arriving)
                made = made + one.w_skip @ (arriving * size if one.in_norm == "l2_sqrt_d" else arriving)
            delta += self.number(whole[1], one.site) * (grow * made + mean - x)
        return delta

    def along(self, edit: Any, scale: Any, site: str, x: Array) -> Array:
        vector = self.row(edit["vector"], layer_of(edit, site, self.world))
        unit = vector / np.linalg.norm(vector)
        p = x @ unit
        scale = self.number(scale, site)
        if edit["op"] == "add":
            v = unit * np.linalg.norm(x) if edit.get("norm") == "match" else vector
            if edit.get("scales"):
                v = v * edit["scales"][places(edit, self.world).index(site)]
            return x + scale * self.number(edit.get("scale", 1.0), site) * v
        strength = scale * edit.get("strength", 1.0)
        if edit["op"] == "ablate":
            return x - strength * p * unit
        low, high = edit.get("min"), edit.get("max")
        clipped = min(max(p, -np.inf if low is None else low), np.inf if high is None else high)
        return x + strength * (clipped - p) * unit

    def encode(self, one: Dict, x: Array, needed: list[int] | None) -> Array:
        """All features; whether those that are needed are surely on their side of a bound is noted."""
        if one.in_norm == "layer_norm":
            x = (x - x.mean()) / (x.std(ddof=1) + 1e-5)
        elif one.in_norm == "l2_sqrt_d":
            x = x * np.sqrt(x.size) / np.linalg.norm(x)
        asked = range(len(one.b_enc)) if needed is None else needed
        pre = np.zeros(len(one.b_enc))
        rows = sorted(set(asked)) if one.activation in ("relu", "jumprelu") else slice(None)  # else all are rivals
        pre[rows] = one.w_enc[rows] @ x + one.b_enc[rows]
        key, sets, k = pre, [list(range(len(pre)))], one.k
        if one.activation == "abstopk":
            key = np.abs(pre)
        if one.activation == "groupmax":
            sets, k = [list(part) for part in np.arange(len(pre)).reshape(one.k, -1)], 1
        active = np.full(len(pre), True) if one.activation == "abstopk" else pre > self.bound(one)
        if one.activation in ("topk", "abstopk", "groupmax"):
            for members in sets:
                order = sorted(members, key=lambda i: (-key[i], i))
                for rank, i in enumerate(order):
                    active[i] &= rank < k
                    rivals = order[:rank] + order[rank + 1 :]
                    rival = rivals[k - 1] if k <= len(rivals) else None
                    if i in asked and rival is not None and abs(key[i] - key[rival]) < NEAR:
                        self.sure = False
        if one.activation != "abstopk":
            self.sure &= all(abs(pre[i] - self.bound(one)[i]) > NEAR for i in asked)
        return np.where(active, pre, 0.0)

    def bound(self, one: Dict) -> Array:
        return np.zeros(len(one.b_enc)) if one.threshold is None else one.threshold

    def applies(self, edit: Any, site: str, skip_first: int = 1) -> bool:
        when = edit.get("when") or []
        for gate in when if isinstance(when, list) else [when]:
            value = self.read(gate, site)
            low, high = gate.get("above"), gate.get("below")
            self.sure &= all(abs(value - one) > NEAR or value == 0 != one for one in (low, high) if one is not None)
            if not ((low is None or value > low) and (high is None or value < high)):
                return False
        return within(edit.get("scope"), self.position, self.prompt_len, skip_first)

    def read(self, source: Any, site: str) -> float:
        """What a gate or a strength reads."""
        if "probe" in source:
            place, layer = probe(source["probe"], site, self.world)
            return float(self.before[place] @ self.row(source["probe"], layer) + self.world.biases[source["probe"]])
        one = self.world.dictionaries[key(source)]
        return float(self.encode(one, self.before[one.reads], [source["feature"]])[source["feature"]])

    def number(self, scale: Any, site: str) -> float:
        """A scale, or the product of several, of which each may be read."""
        if isinstance(scale, tuple):
            return float(np.prod([self.number(one, site) for one in scale]))
        if not isinstance(scale, dict):
            return float(scale)
        low, high = scale.get("min"), scale.get("max")
        value = scale.get("slope", 1.0) * self.read(scale, site) + scale.get("bias", 0.0)
        return min(max(value, -np.inf if low is None else low), np.inf if high is None else high)

    def row(self, vector: Any, layer: int | None) -> Array:
        if isinstance(vector, str):
            rows = self.world.vectors[vector]
            return rows[layer] if layer in rows else rows[None]
        return np.array(vector, np.float64)


def flat(edits: list[Any], modules: Mapping[str, Any]) -> Iterator[tuple[Any, Any, int]]:
    """Edits without `use`, the scales of their modules, and a number that changes at every `use`."""
    run = 0

    def walk(edits: list[Any], scales: tuple[Any, ...]) -> Iterator[tuple[Any, Any, int]]:
        nonlocal run
        for edit in edits:
            if edit["op"] == "use":
                run += 1
                yield from walk(modules[edit["module"]]["edits"], (*scales, edit.get("scale", 1.0)))
                run += 1
            else:
                yield edit, scales, run

    return walk(edits, ())


def key(source: Any) -> str:
    """The dictionary that an edit, a gate or a strength names."""
    return f"{source['dictionary']}@{source['layer']}" if "layer" in source else str(source["dictionary"])


def places(edit: Any, world: World) -> list[str]:
    """The sites of an edit."""
    if "dictionary" in edit:
        one = world.dictionaries[key(edit)]
        return [one.site, *one.later]
    site = edit["site"]
    if isinstance(site, str) and "." not in site:
        return [f"{site}.{layer}" for layer in world.vectors[edit["vector"]]]
    return [site] if isinstance(site, str) else list(site)


def layer_of(edit: Any, site: str, world: World) -> int | None:
    """The row of the edit's vector for a site."""
    named = isinstance(edit["vector"], str) and None not in world.vectors[edit["vector"]]
    return int(site.split(".")[1]) if named else None


def probe(name: str, site: str, world: World) -> tuple[str, int | None]:
    """Where a probe is read for an edit at a site."""
    rows = world.vectors[name]
    here = int(site.split(".")[1])
    if None in rows or here in rows:
        return site, None if None in rows else here
    (layer,) = rows
    return f"resid_post.{layer}", layer


def within(scope: Any, t: int, prompt_len: int, skip_first: int = 1) -> bool:
    """Whether a scope holds a position."""
    scope = scope or {}
    prompt, generated = scope.get("prompt"), scope.get("generated")
    prompt = (not generated if generated is not None else True) if prompt is None else prompt
    generated = (not scope["prompt"] if scope.get("prompt") is not None else True) if generated is None else generated
    if not (prompt if t < prompt_len else generated) or t < scope.get("skip_first", 0):
        return False
    if "positions" not in scope:
        return t >= max(1, skip_first)
    for a, b in scope["positions"]:
        if b is None:  # open after a start in the prompt's count, the prompt's end after one counted from there
            b = prompt_len if a < 0 else 10**9
        if (a + prompt_len if a < 0 else a) <= t < (b + prompt_len if b < 0 else b):
            return True
    return False
