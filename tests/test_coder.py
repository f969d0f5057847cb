"""SparseCoder against formulas written out in numpy: activations, thresholds, ties, norms; and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from saesteer.dictionaries.coder import CoderInfo, SparseCoder

D, F = 3, 5


def info(activation: Any = "relu", **more: Any) -> CoderInfo:
    return CoderInfo(**({"format": "saesteer", "d_in": D, "d_out": D, "features": F, "activation": activation} | more))


def identity_coder(activation: Any, *, k: int | None = None, threshold: list[float] | None = None) -> SparseCoder:
    """pre(x) is x: every value of a pre-activation can be chosen exactly."""
    size = 6
    return SparseCoder(
        w_enc=torch.eye(size),
        b_enc=torch.zeros(size),
        w_dec=torch.eye(size),
        b_dec=torch.zeros(size),
        info=info(activation, k=k, d_in=size, d_out=size, features=size),
        threshold=None if threshold is None else torch.tensor(threshold),
    )


def random_coder(dtype: torch.dtype = torch.float32, **more: Any) -> SparseCoder:
    draw = torch.Generator().manual_seed(7)
    about = info(**more)
    return SparseCoder(
        w_enc=torch.randn(F, D, generator=draw).to(dtype),
        b_enc=torch.randn(F, generator=draw),
        w_dec=torch.randn(F, about.d_out, generator=draw).to(dtype),
        b_dec=torch.randn(about.d_out, generator=draw),
        info=about,
        threshold=torch.rand(F, generator=draw) if about.activation == "jumprelu" else None,
    )


# Few distinct values, so that ties and exact thresholds are the rule.
few = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0])
rows = st.lists(st.lists(few, min_size=6, max_size=6), min_size=1, max_size=3)


def top_k_by_rank(pre: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """By the definition: rank = how many are larger, or equal at a lower index."""
    f = np.zeros_like(pre)
    for token, values in enumerate(pre):
        for i, value in enumerate(values):
            rank = sum(other > value or (other == value and j < i) for j, other in enumerate(values))
            f[token, i] = value if rank < k and value > 0 else 0
    return f


@given(x=rows, k=st.integers(1, 6))
def test_topk_keeps_k_and_gives_ties_to_the_lowest_index(x: list[list[float]], k: int) -> None:
    f = identity_coder("topk", k=k).encode(torch.tensor(x)).numpy()
    np.testing.assert_array_equal(f, top_k_by_rank(np.array(x, np.float32), k))
    assert (np.count_nonzero(f, axis=-1) <= k).all()


@given(x=rows, threshold=st.lists(few, min_size=6, max_size=6))
def test_jumprelu_is_strict_and_keeps_the_value(x: list[list[float]], threshold: list[float]) -> None:
    values = np.array(x, np.float32)
    f = identity_coder("jumprelu", threshold=threshold).encode(torch.tensor(x)).numpy()
    np.testing.assert_array_equal(f, values * (values > np.array(threshold, np.float32)))


@settings(deadline=None)
@given(data=st.data())
def test_encode_and_decode_against_numpy(data: st.DataObject) -> None:
    norm = data.draw(st.sampled_from(["none", "layer_norm", "l2_sqrt_d"]))
    d_out = data.draw(st.integers(1, 4)) if norm == "none" else D
    coder = random_coder(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        activation=data.draw(st.sampled_from(["relu", "jumprelu"])),
        in_norm=norm,
        d_out=d_out,
        feature_unit="raw" if norm == "none" else "normalised",
    )
    token = st.lists(st.floats(-50, 50, width=32), min_size=D, max_size=D).filter(lambda x: np.std(x) > 0.1)
    x = np.array(data.draw(st.lists(token, min_size=1, max_size=3)), float)
    w_enc, b_enc, w_dec, b_dec = (
        value.double().numpy() for value in (coder.w_enc, coder.b_enc, coder.w_dec, coder.b_dec)
    )
    mean, std = x.mean(-1, keepdims=True), x.std(-1, ddof=1, keepdims=True)
    length = np.sqrt((x**2).sum(-1, keepdims=True) / D)
    xn = {"none": x, "layer_norm": (x - mean) / (std + 1e-5), "l2_sqrt_d": x / length}[norm]
    pre = xn @ w_enc.T + b_enc
    tensor = torch.tensor(x, dtype=torch.float32)
    np.testing.assert_allclose(coder.pre(tensor).numpy(), pre, atol=1e-3, rtol=1e-4)
    f = coder.encode(tensor)
    theta = 0 if coder.threshold is None else coder.threshold.numpy()
    sure = np.abs(pre - theta) > 1e-2
    np.testing.assert_allclose(f.numpy()[sure], (pre * (pre > theta))[sure], atol=1e-3, rtol=1e-4)
    y = f.double().numpy() @ w_dec + b_dec
    truth = {"none": y, "layer_norm": y * std + mean, "l2_sqrt_d": y * length}[norm]
    np.testing.assert_allclose(coder.decode(f, like=tensor).numpy(), truth, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("shape", [(D,), (2, D), (2, 4, D), (0, D)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_leading_shape_and_input_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    coder = random_coder(d_out=4, activation="topk", k=2)
    f = coder.encode(torch.ones(shape, dtype=dtype))
    y = coder.decode(f)
    assert (f.shape, f.dtype) == ((*shape[:-1], F), torch.float32)
    assert (y.shape, y.dtype) == ((*shape[:-1], 4), torch.float32)


@pytest.mark.parametrize("norm", ["layer_norm", "l2_sqrt_d"])
def test_a_zero_token_stays_finite_and_a_norm_needs_like(norm: str) -> None:
    coder = random_coder(in_norm=norm)
    zero = torch.zeros(1, D)
    f = coder.encode(zero)
    assert torch.equal(coder.pre(zero)[0], coder.b_enc)
    assert coder.decode(f, like=zero).isfinite().all()
    with pytest.raises(AssertionError, match="like="):
        coder.decode(f)


@pytest.mark.parametrize(
    "change",
    [
        {"k": 3},
        {"activation": "topk"},
        {"activation": "topk", "k": F + 1},
        {"activation": "abstopk"},
        {"activation": "groupmax", "k": 2},
        {"activation": "gelu"},
        {"in_norm": "rms"},
        {"feature_unit": "volts"},
        {"features": 0},
        {"skip_first": -1},
        {"in_norm": "layer_norm", "d_out": D + 1},
        {"feature_ids": (1, 2)},
        {"feature_ids": (1, 2, 3, 4, 4)},
        {"feature_ids": (5, 6, 7, 8, 9), "activation": "topk", "k": 2},
        {"max_act_gaps": (3,)},
        {"max_act_gaps": (3, 3)},
    ],
    ids=str,
)
def test_an_info_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        info(**change)


@given(st.sets(st.integers(0, 20)))
def test_gaps_are_the_features_without_a_maximum(unknown: set[int]) -> None:
    edges = [at for at in range(22) if (at in unknown) != (at - 1 in unknown)]
    about = info(features=20, has_max_act=True, max_act_gaps=tuple(edges))
    assert {feature for feature in range(21) if not about.knows_max_act(feature)} == unknown
    assert not info(features=20).knows_max_act(0)


@given(ids=st.none() | st.permutations(range(20)).map(lambda all: tuple(all[:F])), feature=st.integers(-3, 22))
def test_row_of_is_the_inverse_of_feature_ids(ids: tuple[int, ...] | None, feature: int) -> None:
    held = tuple(range(F)) if ids is None else ids
    row = info(feature_ids=ids).row_of(feature)
    assert (row is None) == (feature not in held)
    assert row is None or held[row] == feature
