"""The edit kernel against the design's formulas, written once more in float64 numpy, with the reference as yardstick.

Hypothesis draws the shape of a case, a seed its numbers. In the interpreter fp16 and fp32 and small sizes; on a GPU
bf16 too and full sizes. Numbers near a threshold are left out of the comparison: test_exact.py has those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saesteer.kernels.configs import EditConfig, blocks
from saesteer.kernels.edit import edit_triton
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import edit_ref_, rms_norm_ref
from saesteer.testing import END, Entry, assert_as_accurate, make_table, make_work

GPU = torch.cuda.is_available()
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if GPU else [])]  # the interpreter truncates to bf16
MOST_EDITS, MOST_TOKENS, WIDEST = (1024, 300, 8192) if GPU else (64, 6, 1024)
WIDTHS = [w for w in (1, 2, 3, 17, 37, 64, 127, 130, 576, 768, 1000, 1024, 2304, 3000, 5376, 8191, 8192) if w <= WIDEST]
NEAR = 1e-4  # nearer to a threshold than this fp32 may fall on the other side than float64
LAUNCH: Any = edit_triton  # its arguments come as one list
EPS = 1e-6
OFFSET = 1.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clamp:
    """An edit in the design's words."""

    feature: int
    mode: str  # set, add, scale, min, max, band
    value: float
    upper: float = 0.0  # of a band
    only_if_active: bool = False
    window: tuple[int, int] = (0, END)
    use_scale: float = 1.0

    def entry(self, dictionary: Dictionary) -> Entry:
        v, i = self.value, self.feature
        law = {
            "set": {"scale": 0.0, "shift": v},
            "add": {"shift": v},
            "scale": {"scale": v},
            "min": {"low": v},
            "max": {"high": v},
            "band": {"low": v, "high": self.upper},
        }[self.mode]
        return Entry(
            slot=i,
            lo=self.window[0],
            hi=self.window[1],
            only_if_active=self.only_if_active,
            bias=float(dictionary.b[i]),
            threshold=float(dictionary.threshold[i]),
            gain=self.use_scale,
            topk=(0, len(dictionary.b), dictionary.k) if dictionary.k else None,
            **law,
        )

    def new_activation(self, f: float) -> float:
        """f' of section 3."""
        if self.only_if_active and f == 0:
            return f
        match self.mode:
            case "set":
                return self.value
            case "add":
                return f + self.value
            case "scale":
                return f * self.value
            case "min":
                return max(f, self.value)
            case "max":
                return min(f, self.value)
            case _:
                return min(max(f, self.value), self.upper)


@dataclass(frozen=True, eq=False)
class Dictionary:
    e: Tensor  # [F, d]
    d: Tensor  # [F, d]
    b: Tensor  # [F] fp32
    threshold: Tensor  # [F] fp32
    k: int = 0

    def activations(self, x: Array) -> tuple[Array, float]:
        """f of all features, and how near the nearest decision was."""
        pre = self.e.double().numpy() @ x + self.b.double().numpy()
        threshold = self.threshold.double().numpy()
        f = np.where(pre > threshold, pre, 0.0)
        margin = float(np.min(np.abs(pre - threshold)))
        if self.k:
            order = np.argsort(-pre, kind="stable")
            f[order[self.k :]] = 0.0
            if self.k < len(pre):
                margin = min(margin, float(pre[order[self.k - 1]] - pre[order[self.k]]))
        return f, margin


def edited(x: Array, groups: list[list[Clamp]], position: int, dictionary: Dictionary) -> tuple[Array, bool, float]:
    """x' of section 3, whether anything was added, and the margin of the nearest decision."""
    any_delta, nearest = False, float("inf")
    for group in groups:
        f, margin = dictionary.activations(x)
        nearest = min(nearest, margin)
        total = np.zeros_like(x)
        for clamp in group:
            if clamp.window[0] <= position < clamp.window[1]:
                delta = clamp.use_scale * (clamp.new_activation(f[clamp.feature]) - f[clamp.feature])
                any_delta |= delta != 0
                total += delta * dictionary.d[clamp.feature].double().numpy()
        x = x + total
    return x, any_delta, nearest


def normed(x: Array, weight: Tensor | None) -> Array:
    y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    return y if weight is None else y * (weight.double().numpy() + OFFSET)


def a_dictionary(rng: torch.Generator, features: int, width: int, dtype: torch.dtype, k: int = 0) -> Dictionary:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    e, d = normal(features, width) / width**0.5, normal(features, width) / width**0.5
    threshold = normal(features).abs() * torch.tensor([0.0, 1.0])[torch.randint(2, (features,), generator=rng)]
    return Dictionary(e.to(dtype), d.to(dtype), normal(features) / 4, threshold, k)


def some_clamps(rng: np.random.Generator, features: list[int]) -> list[Clamp]:
    clamps = []
    for feature in features:
        lo = int(rng.integers(0, 8))
        clamps.append(
            Clamp(
                feature,
                str(rng.choice(["set", "add", "scale", "min", "max", "band"])),
                value=float(np.float32(rng.uniform(-2, 4))),
                upper=float(np.float32(rng.uniform(4, 6))),
                only_if_active=bool(rng.random() < 0.3),
                window=(0, END) if rng.random() < 0.5 else (lo, lo + int(rng.integers(1, 8))),
                use_scale=float(rng.choice([1.0, 1.0, 0.5, -2.0])),
            )
        )
    return clamps


def run(*args: Any, has_topk: bool, config: EditConfig | None = None) -> None:
    """The kernel on CPU tensors: in the interpreter, or over a copy on the GPU."""
    moved = [a.cuda() if GPU and isinstance(a, Tensor) else a for a in args]
    LAUNCH(*moved, has_topk=has_topk, config=config)
    for mine, theirs in zip(args[:2], moved[:2], strict=True):
        if mine is not None:
            mine.copy_(theirs)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check(
    width: int,
    dtype: torch.dtype,
    form: int,
    rows: list[tuple[int, int, int]],  # of each request: its edits, its groups, its tokens
    seed: int,
    *,
    k: int = 0,
    config: EditConfig | None = None,
    features: int = MOST_EDITS,
) -> None:
    """One batch with those requests, an unsteered one and padding, through kernel, reference and truth."""
    torch_rng, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    dictionary = a_dictionary(torch_rng, features, width, dtype, k)
    requests = []
    for edits, groups, _ in rows:
        clamps = some_clamps(rng, rng.permutation(features)[:edits].tolist())
        cuts = sorted(rng.integers(0, edits + 1, size=max(groups - 1, 0)).tolist())
        parts = [clamps[a:b] for a, b in zip([0, *cuts], [*cuts, edits], strict=True)]
        requests.append([part for part in parts if part])
    entries = [[[clamp.entry(dictionary) for clamp in group] for group in groups] for groups in requests]
    table = make_table([[[[Entry(0, shift=9.0)]], groups] for groups in entries], sites=2)

    # Tokens of nobody stand first, between and last, and are NaN.
    items, at = [], 1
    for row, (_, _, tokens) in enumerate(rows):
        start = int(rng.integers(0, 8))
        items += [(at + t, row + 1, start + t) for t in range(tokens)]
        at += tokens + 1
    listed = torch.tensor([token for token, _, _ in items], dtype=torch.long)
    stream = torch.full((at, width), torch.nan, dtype=dtype)
    stream[listed] = (2 * torch.randn(len(items), width, generator=torch_rng)).to(dtype)
    second = None if form == BARE else torch.full_like(stream, torch.nan)
    weight = torch.rand(width, generator=torch_rng).to(dtype) if form == NORMED and seed % 2 else None
    if second is not None:
        second[listed] = torch.randn(len(items), width, generator=torch_rng).to(dtype)

    # Weights that no entry names are NaN: a gather that strays shows.
    used = torch.tensor([c.feature for groups in requests for group in groups for c in group] or [0])
    w_enc, w_dec = (w if k else torch.full_like(w, torch.nan) for w in (dictionary.e, dictionary.d))
    w_enc[used], w_dec[used] = dictionary.e[used], dictionary.d[used]

    site = torch.tensor([1], dtype=torch.int32)
    rest: Any = (weight, table, site, make_work(items, at), w_enc, w_dec, dictionary.b, form, EPS, OFFSET)
    ours = (stream.clone(), None if second is None else second.clone())
    run(*ours, *rest, has_topk=k > 0, config=config)
    theirs = (stream.clone(), None if second is None else second.clone())
    edit_ref_(*theirs, *rest)

    safe, want = [], []
    untouched = torch.ones(at, dtype=torch.bool)
    for token, row, position in items:
        x = stream[token]
        if form == PAIR:
            assert second is not None
            x = x + second[token]
        out, touched, margin = edited(x.double().numpy(), requests[row - 1], position, dictionary)
        untouched[token] = not touched and margin > NEAR
        if margin > NEAR and touched:
            safe.append(token)
            want.append(out)

    assert torch.equal(bits(ours[0])[untouched], bits(stream)[untouched])
    if second is not None and ours[1] is not None:
        assert torch.equal(bits(ours[1])[untouched], bits(second)[untouched])
    if not want:
        return
    truth = np.stack(want)
    assert_as_accurate(ours[0][safe], theirs[0][safe], torch.from_numpy(truth))
    if form == NORMED:
        assert ours[1] is not None
        assert theirs[1] is not None
        assert_as_accurate(ours[1][safe], theirs[1][safe], torch.from_numpy(normed(truth, weight)))
        # From the stream as it was rounded, not from what it was before.
        anew = normed(ours[0][safe].double().numpy(), weight)
        assert_as_accurate(ours[1][safe], rms_norm_ref(ours[0][safe], weight, EPS, OFFSET), torch.from_numpy(anew))
    if form == PAIR:
        assert ours[1] is not None
        assert not ours[1][safe].any()

    # The last request alone, at the start of another batch: the same bits.
    last = [item for item in items if item[1] == len(rows)]
    places = [token for token, _, _ in last]
    alone = (stream[places], None if second is None else second[places])
    own = make_work([(i, row, position) for i, (_, row, position) in enumerate(last)], len(last))
    run(*alone, *rest[:3], own, *rest[4:], has_topk=k > 0, config=config)
    assert torch.equal(bits(alone[0]), bits(ours[0][places]))
    if alone[1] is not None and ours[1] is not None:
        assert torch.equal(bits(alone[1]), bits(ours[1][places]))


@st.composite
def request(draw: st.DrawFn) -> tuple[int, int, int]:
    edits = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 31, MOST_EDITS]) | st.integers(0, MOST_EDITS))
    return edits, draw(st.integers(1, 4)), draw(st.integers(0, MOST_TOKENS if edits <= 32 else 3))


@settings(
    max_examples=30 if GPU else 25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    width=st.sampled_from(WIDTHS) | st.integers(1, WIDEST),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from([BARE, NORMED, PAIR]),
    rows=st.lists(request(), min_size=0, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_the_kernel_is_as_accurate_as_torch(
    width: int, dtype: torch.dtype, form: int, rows: list[tuple[int, int, int]], seed: int
) -> None:
    check(width, dtype, form, rows, seed)


@pytest.mark.parametrize("form", [BARE, NORMED, PAIR], ids=["bare", "normed", "pair"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_edits_in_several_groups(dtype: torch.dtype, form: int) -> None:
    check(WIDTHS[-1], dtype, form, [(MOST_EDITS, 3, 2), (9, 9, 3), (1, 1, 3)], seed=form + 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(width: int) -> None:
    check(width, DTYPES[-1], NORMED, [(5, 2, 3), (1, 1, 2)], seed=width)


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("split", [False, True])
def test_every_way_to_launch(chunk: int, split: bool) -> None:
    config = EditConfig(num_warps=1, chunk=chunk, programs=2, split=split)
    assert (blocks(576, config)[1] > 0) == split
    check(576, torch.float32, NORMED, [(7, 2, 5), (1, 1, 3), (12, 1, 2)], seed=chunk, config=config)


@pytest.mark.parametrize("k", [1, 5, 37])
@pytest.mark.parametrize("width", [3, 130])
def test_topk_ranks_in_the_whole_dictionary(k: int, width: int) -> None:
    check(width, torch.float32, BARE, [(9, 2, 4), (1, 1, 2)], seed=k, k=k, features=37)
