"""The strongest features of rows, and chosen ones: against sorting in Python, and against what edits and dictionaries
call a feature's activation. Knows no request."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.kernels import layout
from saesteer.kernels.read.features import Encoder, Found, read_features
from saesteer.kernels.read.rows import Probes, read_probes, reduce_rows
from saesteer.kernels.reference import _encode, _input_norm, _ranked

GPU = torch.cuda.is_available()
EDGES = [0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-40, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "topk": {"groups": 1},
    "abstopk": {"groups": 1, "magnitude": True},
    "groupmax": {"groups": True, "k": 1},
}


def encoder(w_enc: Tensor, kind: str, k: int = 3, threshold: float | Tensor = 0.0, **more: Any) -> Encoder:
    """An encoder of a kind; a group of groupmax has about k features."""
    features = len(w_enc)
    fields = {**KINDS[kind]}
    if kind == "groupmax":
        fields["groups"] = next(groups for groups in range(max(1, features // k), 0, -1) if features % groups == 0)
    elif kind != "plain":
        fields["k"] = k
        threshold = -math.inf if kind == "abstopk" else 0.0
    limits = torch.as_tensor(threshold, dtype=torch.float32).expand(features).contiguous().to(w_enc.device)
    return Encoder(
        w_enc, **{"b_enc": torch.zeros(features, device=w_enc.device), "threshold": limits, **fields, **more}
    )


def listed(f: Tensor, active: Tensor, top_k: int, *, magnitude: bool) -> list[list[tuple[int, float]]]:
    """The strongest features of each row, by sorting in Python."""
    rows = []
    for row, its in zip(f.tolist(), active.tolist(), strict=True):
        held = [(-(abs(value) if magnitude else value), i, value) for i, value in enumerate(row) if its[i]]
        rows.append([(i, value) for _, i, value in sorted(held)[:top_k]])
    return rows


def pairs(found: Found) -> list[list[tuple[int, float]]]:
    """What is listed, without what stands behind it."""
    rows = []
    for indices, values in zip(found[0].tolist(), found[1].tolist(), strict=True):
        count = next((at for at, index in enumerate(indices) if index < 0), len(indices))
        assert not any(values[count:]) and set(indices[count:]) <= {-1}
        rows.append(list(zip(indices[:count], values[:count], strict=True)))
    return rows


@settings(deadline=None, max_examples=200)
@given(
    values=st.lists(st.sampled_from(EDGES), min_size=1, max_size=150),
    kind=st.sampled_from(list(KINDS)),
    k=st.integers(1, 40),
    top_k=st.integers(0, 40),
    factors=st.lists(st.sampled_from([1.0, -1.0, 0.5]), min_size=0, max_size=3),
    limits=st.lists(st.sampled_from([0.0, 0.5, -1.0, math.inf, -math.inf]), min_size=1, max_size=3),
    named=st.lists(st.integers(0, 149), max_size=20),
)
@example(values=[1.0] * 150, kind="topk", k=5, top_k=9, factors=[1.0], limits=[0.0], named=[3, 4, 5, 6, 149])
@example(values=[-math.inf, 2.0], kind="abstopk", k=1, top_k=3, factors=[1.0], limits=[0.0], named=[0, 1])
@example(values=[math.nan, 2.0], kind="topk", k=1, top_k=3, factors=[1.0], limits=[0.0], named=[0, 1])
def test_every_order_of_edges(
    values: list[float],
    kind: str,
    k: int,
    top_k: int,
    factors: list[float],
    limits: list[float],
    named: list[int],
) -> None:
    """A width of 1 makes the pre-activations what the test says."""
    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    w_enc = torch.tensor(values, device=device)[:, None]
    threshold = torch.tensor([limits[i % len(limits)] for i in range(len(values))])
    one = encoder(w_enc, kind, min(k, len(values)), threshold)
    chosen = torch.tensor([i for i in named if i < len(values)], dtype=torch.int64, device=device)
    x = torch.tensor(factors, device=device).view(-1, 1)
    found = read_features(x, one, top_k, chosen)
    pre = x * w_enc.T
    active = pre > one.threshold
    key = torch.where(active, pre.abs() if one.magnitude else pre, -math.inf)
    if one.groups:
        grouped = key.view(len(x), one.groups, len(values) // one.groups)
        order = grouped.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        active &= (order < one.k).reshape(active.shape)
    assert pairs(found) == listed(pre, active, top_k, magnitude=one.magnitude)
    assert torch.equal(found[2], torch.where(active, pre, 0.0)[:, chosen])


@pytest.mark.parametrize("norm", [0, layout.LAYER_NORM, layout.L2_NORM])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_that_edits_see(
    kind: str, dtypes: tuple[torch.dtype, torch.dtype], norm: int, device: torch.device
) -> None:
    """_encode defines them where features are ranked among all or not at all, _ranked for each named one."""
    torch.manual_seed(norm)
    x = torch.randn(3, 24, device=device).to(dtypes[0])
    w_enc = torch.randn(30, 24, device=device).to(dtypes[1])
    one = encoder(w_enc, kind, 6, 0.3, b_enc=torch.randn(30, device=device), norm=norm)
    named = torch.arange(30, device=device)
    indices, values, every = (part.cpu() for part in read_features(x, one, 8, named))
    ranked = (layout.RANKED if one.groups else 0) | (layout.MAGNITUDE if one.magnitude else 0)
    entry = torch.zeros(layout.ENTRY, dtype=torch.int32)
    entry[[layout.SIZE, layout.TOP_K, layout.FLAGS]] = torch.tensor(
        [30 // max(1, one.groups), one.k, ranked], dtype=torch.int32
    )
    wide = x.float().cpu()
    wide = wide * _input_norm(wide, norm)[0][:, None]
    weights, bias, threshold = (part.cpu() for part in (w_enc, one.b_enc, one.threshold))
    if one.groups > 1:
        pre = wide @ weights.float().T + bias
        expected = torch.zeros_like(pre)
        for feature in range(30):
            entry[layout.SLOT] = feature
            among = _ranked(wide, entry, 0, weights, bias)[0]
            expected[:, feature] = torch.where(among & (pre > threshold)[:, feature], pre[:, feature], 0.0)
    else:
        expected = _encode(wide, weights, bias, threshold, entry)
    assert torch.allclose(every, expected, atol=1e-4)
    assert torch.equal(every != 0, expected != 0)
    order = expected.abs().argsort(dim=1, descending=True, stable=True)[:, :8]
    strongest = expected.gather(1, order)
    assert torch.allclose(values, strongest, atol=1e-4)
    assert torch.equal(indices, torch.where(strongest != 0, order, -1).to(torch.int32))


@pytest.mark.parametrize("in_norm", ["none", "layer_norm", "l2_sqrt_d"])
@pytest.mark.parametrize("activation", ["relu", "jumprelu", "topk", "abstopk", "groupmax"])
def test_features_are_those_of_the_dictionary(activation: Any, in_norm: Any) -> None:
    torch.manual_seed(5)
    d, features, k = 16, 48, 6
    info = CoderInfo(
        "test", d, d, features, activation, k if activation in ("topk", "abstopk", "groupmax") else None, in_norm
    )
    threshold = torch.rand(features) if activation == "jumprelu" else None
    w_enc = torch.randn(features, d)
    coder = SparseCoder(w_enc, torch.randn(features), torch.randn(features, d), torch.zeros(d), info, threshold)
    x = torch.randn(7, d)
    norm = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2_sqrt_d": layout.L2_NORM}[in_norm]
    limits = torch.zeros(features) if threshold is None else threshold
    groups = {"topk": 1, "abstopk": 1, "groupmax": k}.get(activation, 0)
    one = Encoder(
        w_enc - w_enc.mean(1, keepdim=True) if norm == layout.LAYER_NORM else w_enc,
        coder.b_enc,
        limits - math.inf if activation == "abstopk" else limits,
        norm,
        groups,
        {0: 0, 1: k}.get(groups, 1),
        activation == "abstopk",
    )
    found = read_features(x, one, features, torch.arange(features))
    f = coder.encode(x)
    assert torch.allclose(found[2], f, atol=1e-5)
    for pair, row in zip(pairs(found), f, strict=True):
        assert sorted(i for i, _ in pair) == row.nonzero().flatten().tolist()
        assert [abs(value) for _, value in pair] == sorted((abs(value) for _, value in pair), reverse=True)


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(list(KINDS)),
    norm=st.sampled_from([0, layout.LAYER_NORM, layout.L2_NORM]),
    rows=st.integers(0, 4),
    named=st.lists(st.integers(0, 59), max_size=30),
    top_k=st.integers(0, 9),
)
def test_chosen_features_have_one_value_however_they_are_computed(
    kind: str, norm: int, rows: int, named: list[int], top_k: int
) -> None:
    """Of their own rows of the encoder, of the whole encoder, and beside the strongest ones; within rounding."""
    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    draw = torch.Generator().manual_seed(len(named))
    x, w_enc = (torch.randn(n, 16, generator=draw).to(device) for n in (rows, 60))
    one = encoder(w_enc, kind, 6, 0.3, b_enc=torch.randn(60, generator=draw).to(device), norm=norm)
    every, own = torch.arange(60, device=device), torch.tensor(named, dtype=torch.int64, device=device)
    expected = read_features(x, one, 0, every)[2]
    indices, activations, values = read_features(x, one, top_k, own)
    assert indices.shape == activations.shape == (rows, top_k) and indices.dtype == torch.int32
    assert values.dtype == torch.float32 and torch.allclose(values, expected[:, own], atol=1e-5)
    there = indices >= 0
    assert torch.allclose(activations[there], expected.gather(1, indices.clamp_min(0).long())[there], atol=1e-5)


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    torch.manual_seed(0)
    x, one = torch.randn(7, 8, device=device), encoder(torch.randn(40, 8, device=device), "plain")
    named = torch.tensor([3, 39], device=device)
    whole = read_features(x, one, 5, named)
    monkeypatch.setattr("saesteer.kernels.read.features._PLENTY", 80)
    apart = read_features(x, one, 5, named)
    assert torch.equal(apart[0], whole[0]) and torch.allclose(apart[1], whole[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_and_reductions(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, 3, 16, device=device).to(dtype)
    for at in ([0, 1, 2], [0, 0, 1, 1, 2, 2], [2, 0, 1, 1, 0, 2, 2]):
        directions, bias = torch.randn(len(at), 16), [float(number) for number in range(len(at))]
        probes = Probes.of(directions, bias, at, device, dtype)
        scores = read_probes(x, probes)
        expected = (x.double()[:, at] * directions.double().to(device)).sum(2) + torch.tensor(bias, device=device)
        assert scores.dtype == torch.float32 and torch.allclose(scores.double(), expected, atol=1e-5)
        assert read_probes(x[:0], probes).shape == (0, len(at))
    x = x[:, 0]
    exact: dict[Any, Any] = {"sum": x.double().sum(0), "max": x.double().amax(0), "last": x[5].double()}
    for how in exact:
        found = reduce_rows(x, how)
        assert found.dtype == torch.float32 and torch.allclose(found.double(), exact[how], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_of_several_readouts_have_the_scores_that_each_has_alone(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, 1, 16, device=device).to(dtype)
    several = [Probes.of(torch.randn(k, 16), [0.5 * k] * k, [0] * k, device, dtype) for k in (1, 3, 2)]
    expected = torch.cat([read_probes(x, one) for one in several], dim=1)
    assert torch.allclose(read_probes(x, Probes.joined(several)), expected, atol=1e-5)
