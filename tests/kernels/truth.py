"""What edits mean, stated once more in float64 numpy and in the words of the request language: no tables, no torch.

Beside x' it says how near each token came to a decision that fp32 may take the other way: thresholds, ranks, gates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

ALWAYS = ((0, 2**31 - 1),)  # windows of an edit without a scope


@dataclass(frozen=True, eq=False)
class Dictionary:
    """f = act(norm(x) · e + b); decode(f) = what the norm took out of (f · d + b_dec)."""

    e: Array  # [F, width]
    d: Array  # [F, width]
    b: Array  # [F]
    b_dec: Array  # [width]
    threshold: Array  # [F], of jumprelu
    activation: str = "relu"  # jumprelu topk abstopk groupmax
    k: int = 0
    norm: str = "none"  # layer_norm l2

    def read(self, x: Array) -> Array:
        """The input norm."""
        if self.norm == "layer_norm":
            centred = x - x.mean(1, keepdims=True)
            return centred / (x.std(1, ddof=1, keepdims=True) + 1e-5)
        if self.norm == "l2":
            return x * np.sqrt(x.shape[1]) / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        return x

    def unread(self, y: Array, x: Array) -> Array:
        """Out of the norm again, with the statistics of x."""
        if self.norm == "layer_norm":
            return y * x.std(1, ddof=1, keepdims=True) + x.mean(1, keepdims=True)
        if self.norm == "l2":
            return y * np.linalg.norm(x, axis=1, keepdims=True) / np.sqrt(x.shape[1])
        return y

    def activations(self, x: Array) -> tuple[Array, Array, Array]:
        """f, how near each feature is to being active or not, and the same where a change would be a jump."""
        inside = self.read(x)
        pre = inside @ self.e.T + self.b
        # Rounding errors grow with the lengths of what is multiplied.
        unit = 1 + 0.03 * np.linalg.norm(inside, axis=1)[:, None] * np.linalg.norm(self.e, axis=1).max()
        above = pre - (self.threshold if self.activation == "jumprelu" else 0.0)
        rank = np.full_like(pre, np.inf)  # above 0: among the first
        if self.activation in ("topk", "abstopk"):
            rank = lead(np.abs(pre) if self.activation == "abstopk" else pre, self.k)
        elif self.activation == "groupmax":
            parts = pre.reshape(len(pre) * self.k, -1)
            rank = lead(parts, 1).reshape(pre.shape)
        if self.activation == "abstopk":
            above = np.full_like(pre, np.inf)
        active = (above > 0) & (rank > 0)
        near = np.where(active, np.minimum(above, rank), np.maximum(-above, -rank)) / unit
        if self.activation == "jumprelu":
            jump = np.where(self.threshold == 0, np.inf, np.abs(above))
        else:
            jump = np.where(above > 0, np.abs(rank), np.inf)
        return np.where(active, pre, 0.0), near, jump / unit


def lead(key: Array, k: int) -> Array:
    """How far each column is ahead of the first that is not among the k largest; negative: behind the last that is."""
    if k >= key.shape[1]:
        return np.full_like(key, np.inf)
    order = np.argsort(-key, axis=1, kind="stable")  # of equals the lower index comes first
    last = np.take_along_axis(key, order[:, k - 1 : k], 1)
    first_out = np.take_along_axis(key, order[:, k : k + 1], 1)
    among = np.zeros(key.shape, dtype=bool)
    np.put_along_axis(among, order[:, :k], True, 1)
    return np.where(among, np.maximum(key - first_out, 5e-324), np.minimum(key - last, -5e-324))


@dataclass(frozen=True, eq=False)
class Probe:
    v: Array  # [width]
    bias: float


@dataclass(frozen=True, eq=False)
class When:
    """A condition on a feature or a probe, of x as it comes to `site`."""

    site: int
    of: Dictionary | Probe
    feature: int = 0
    above: float = -np.inf
    below: float = np.inf

    def holds(self, x: Array) -> tuple[Bools, Array]:
        """For each token whether it holds, and how near that was."""
        if isinstance(self.of, Probe):
            f = x @ self.of.v + self.of.bias
            near = np.full_like(f, np.inf)
            unit = 1 + 0.03 * np.linalg.norm(x, axis=1) * np.linalg.norm(self.of.v)
            exact = np.zeros(len(x), dtype=bool)
        else:
            every, nears, _ = self.of.activations(x)
            f, near, unit = every[:, self.feature], nears[:, self.feature], np.ones(len(x))
            exact = f == 0
        for bound in (self.above, self.below):
            near = np.where(exact, near, np.minimum(near, np.abs(f - bound) / unit))
        return (f > self.above) & (f < self.below), near


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    windows: tuple[tuple[int, int], ...] = ALWAYS
    when: tuple[When, ...] = ()
    use: float = 1.0  # the scale of the `use` that it came with
    module: int = 0  # which use that was; clamps of two are no neighbours


@dataclass(frozen=True, eq=False, kw_only=True)
class Clamp(Edit):
    dictionary: Dictionary
    feature: int
    mode: str  # set add scale min max band
    value: float
    upper: float = 0.0  # of a band
    only_if_active: bool = False

    def changed(self, f: Array) -> Array:
        """f'."""
        v = self.value
        after = {
            "set": np.full_like(f, v),
            "add": f + v,
            "scale": f * v,
            "min": np.maximum(f, v),
            "max": np.minimum(f, v),
            "band": np.minimum(np.maximum(f, v), self.upper),
        }[self.mode]
        return np.where(f == 0, f, after) if self.only_if_active else after

    def nearness(self, f: Array) -> Array:
        """How near f is to a value where nothing changes."""
        bounds = [self.value] if self.mode in ("set", "min", "max", "band") else []
        bounds += [self.upper] if self.mode == "band" else []
        return np.min([np.where(f == 0, np.inf, np.abs(f - bound)) for bound in [*bounds, np.inf]], axis=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Edit):
    v: Array  # of unit length when matched
    scale: float
    match: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Cap(Edit):
    v: Array  # of unit length
    low: float
    high: float
    strength: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Ablate(Edit):
    v: Array  # of unit length
    strength: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Reconstruct(Edit):
    """Takes the group of clamps that stands directly before it."""

    dictionary: Dictionary
    error: str = "drop"  # or keep


def groups(edits: Sequence[Edit]) -> Iterator[list[int]]:
    """Numbers of neighbouring clamps of one dictionary, with the reconstruction behind them; others stand alone."""
    group: list[int] = []
    for number, edit in enumerate(edits):
        last = edits[group[-1]] if group else None
        together = (
            isinstance(edit, Clamp | Reconstruct)
            and isinstance(last, Clamp)
            and last.dictionary is edit.dictionary
            and last.module == edit.module
        )
        if group and not together:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the tokens of one request at one site."""

    x: Array  # [T, width]
    touched: Bools  # [T, edits]
    margin: Array  # [T]


Conditions = Mapping[When, tuple[Bools, Array]]


def outcome(x: Array, positions: Ints, edits: Sequence[Edit], conditions: Conditions) -> Outcome:
    """x' of each token, which edits changed it, and how near the nearest decision was.

    Args:
        x: [T, width], what comes to the site.
        positions: [T], in the request.
        edits: of this site, in list order.
        conditions: what became of those that the edits name.
    """
    margin = np.full(len(x), np.inf)
    touched = np.zeros((len(x), len(edits)), dtype=bool)
    lost, peak = np.zeros(len(x), dtype=bool), np.linalg.norm(x, axis=1)
    for numbers in groups(edits):
        applies = {}
        for number in numbers:
            edit = edits[number]
            applies[number] = np.zeros(len(x), dtype=bool)
            for lo, hi in edit.windows:
                applies[number] |= (lo <= positions) & (positions < hi)
            for when in edit.when:
                held, near = conditions[when]
                margin = np.where(applies[number], np.minimum(margin, near), margin)
                applies[number] &= held
        first = edits[numbers[0]]
        if isinstance(first, Clamp | Reconstruct):
            after, changed, near = _decoded(x, [edits[n] for n in numbers], [applies[n] for n in numbers])
        else:
            after, changed, near = _directed(x, first, applies[numbers[0]])
        touched[:, numbers] = changed
        margin = np.minimum(margin, near)
        x = after
        # Near the end of fp16, or where almost all of a sum cancelled, there is nothing to compare.
        length = np.linalg.norm(x, axis=1)
        peak = np.maximum(peak, length)
        lost |= (np.abs(x) > 3e4).any(1) | (peak > 8 * length)
    return Outcome(x, touched, np.where(lost, 0.0, margin))


def dosed(x: Array, y: Array, limit: float) -> tuple[Array, Array]:
    """Of tokens that edits took from x to y: x' within the limit (0: any), [T, width], and the doses before, [T]."""
    dose = np.linalg.norm(y - x, axis=1) / np.maximum(np.linalg.norm(x, axis=1), 1e-12)
    share = limit / np.maximum(dose, limit) if limit else np.ones_like(dose)
    return x + (y - x) * share[:, None], dose


def _directed(x: Array, edit: Edit, applies: Bools) -> tuple[Array, Bools, Array]:
    """An edit along one direction: x', whether it changed, the margin."""
    near = np.full(len(x), np.inf)
    if isinstance(edit, Add):
        length = np.linalg.norm(x, axis=1) if edit.match else np.ones(len(x))
        after = x + edit.use * edit.scale * length[:, None] * edit.v
        changed = applies & (edit.use * edit.scale != 0)
    elif isinstance(edit, Cap):
        p = x @ edit.v
        strength = edit.use * edit.strength
        after = x + (strength * (np.clip(p, edit.low, edit.high) - p))[:, None] * edit.v
        changed = applies & (strength != 0) & ((p < edit.low) | (p > edit.high))
        near = np.minimum(np.abs(p - edit.low), np.abs(p - edit.high))
    else:
        assert isinstance(edit, Ablate)
        p = x @ edit.v
        after = x - (edit.use * edit.strength * p)[:, None] * edit.v
        changed = applies & (edit.use * edit.strength != 0)
        near = np.abs(p)
    near = near / (1 + 0.03 * np.linalg.norm(x, axis=1))
    return np.where(applies[:, None], after, x), changed[:, None], np.where(applies, near, np.inf)


def _decoded(x: Array, edits: Sequence[Edit], applies: Sequence[Bools]) -> tuple[Array, Bools, Array]:
    """Clamps of one dictionary, and its reconstruction behind them: x', which changed it, the margin."""
    assert isinstance(edits[0], Clamp | Reconstruct)
    dictionary = edits[0].dictionary
    f, near, jump = dictionary.activations(x)
    after, changed = f.copy(), np.zeros((len(x), len(edits)), dtype=bool)
    total = np.zeros_like(x)  # every delta times the scale of its use
    margin = np.full(len(x), np.inf)
    for at, (edit, here) in enumerate(zip(edits, applies, strict=True)):
        if isinstance(edit, Clamp):
            i = edit.feature
            delta = np.where(here, edit.changed(f[:, i]) - f[:, i], 0.0)
            after[:, i] += delta
            total += edit.use * delta[:, None] * dictionary.d[i]
            changed[:, at] = edit.use * delta != 0
            margin = np.where(here, np.minimum(margin, np.minimum(near[:, i], edit.nearness(f[:, i]))), margin)
    # The norm of the output takes deltas back without its mean.
    nothing = dictionary.unread(np.zeros_like(x), x)
    out = x + dictionary.unread(total, x) - nothing
    last = edits[-1]
    if isinstance(last, Reconstruct):
        here = applies[-1]
        if last.error == "drop":
            whole = dictionary.unread(after @ dictionary.d + dictionary.b_dec, x)
            out = np.where(here[:, None], x + last.use * (whole - x), out)
            changed[:, -1] = here & (last.use != 0)
            margin = np.where(here, np.minimum(margin, jump.min(1)), margin)
    return out, changed, margin
