"""The strongest features of rows of a site's tensor: what that means, in plain torch. Knows no request and no site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from saesteer.kernels import layout

Found = tuple[Tensor, Tensor, Tensor]

LISTED = 32  # features that the kernels list; longer lists are sorted whole, as nothing is compiled for them at start
_PLENTY = 1 << 24  # pre-activations in memory at once
_ROWS_AT_ONCE = 1 << 15  # rows of an encoder widened to fp32 at a time
_LAYER_NORM_EPS = 1e-5
_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Where one dictionary's encoder lies in a site's weights, and how its features become active.

    A feature's pre-activation is ``scale · (x · w_enc[i]) + b_enc[i]``, with the scale of x that the input norm asks
    for: w_enc is centred for LAYER_NORM. A feature that is not above its threshold, or is NaN, is not active and takes
    no rank. The activation of an active one is its pre-activation.
    """

    w_enc: Tensor  # [F, d], any float dtype, rows contiguous
    b_enc: Tensor  # [F] fp32
    threshold: Tensor  # [F] fp32; the same for all features if they are ranked
    norm: int = 0  # 0, layout.LAYER_NORM or layout.L2_NORM
    groups: int = 0  # ranked: features are ranked within each of so many equal groups of neighbours; 0: not ranked
    k: int = 0  # ranked: features of a group that are active at most; 1 where there are several groups
    magnitude: bool = False  # stronger means of larger absolute value; the activation may be negative

    def __post_init__(self) -> None:
        features = len(self.w_enc)
        assert self.b_enc.shape == self.threshold.shape == (features,), (self.b_enc.shape, self.threshold.shape)
        assert self.norm in (0, layout.LAYER_NORM, layout.L2_NORM), self.norm
        assert self.groups >= 0, self.groups
        assert (self.k > 0) == (self.groups > 0), f"k = {self.k} in {self.groups} groups"
        assert self.groups < 2 or (self.k == 1 and features % self.groups == 0), f"{self.groups} groups of {features}"

    @property
    def features(self) -> int:
        """F."""
        return len(self.w_enc)


def read_features(x: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """The strongest active features of each row, and the activations of chosen ones.

    The strongest comes first; of equal ones, that of lower index. Nothing waits for the device, and what is allocated
    depends on shapes alone.

    Args:
        x: [n, d], any float dtype; n may be 0.
        encoder: the dictionary, on the device of x.
        top_k: features to list for each row; 0 for none.
        named: [m] int32 or int64, on the device of x, the features in [0, F) that are wanted whatever their strength.

    Returns:
        Indices [n, top_k] int32, -1 behind the last active feature; their activations [n, top_k] fp32, 0 there; and
        the activations of the named features [n, m] fp32, 0 where they are not active.
    """
    if x.is_cuda and top_k <= LISTED:
        from saesteer.kernels.read.select import read_features_triton  # Triton need not be there before

        return read_features_triton(x, encoder, top_k, named)
    return read_features_ref(x, encoder, top_k, named)


def warm_up(encoder: Encoder) -> None:
    """Compile what reads of this dictionary launch, before a request asks; there is nothing to do on a CPU."""
    if encoder.w_enc.is_cuda:
        from saesteer.kernels.read.select import launch_all  # Triton need not be there before

        launch_all(encoder)


def read_features_ref(x: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """The definition of ``read_features`` in plain torch, on any device."""
    some = parts(x, encoder, _PLENTY)
    return joined([chosen(dots(part, encoder.w_enc), part, encoder, top_k, named) for part in some])


def chosen(products: Tensor, x: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """``read_features_ref`` of rows whose products x · w_enc [n, F] are known."""
    pre = products * scale(x, encoder.norm)[:, None] + encoder.b_enc
    key = pre.abs() if encoder.magnitude else pre
    key = torch.where(pre > encoder.threshold, key, -math.inf)
    if encoder.groups:
        grouped = key.view(len(x), encoder.groups, encoder.features // encoder.groups)
        order = grouped.argsort(dim=2, descending=True, stable=True)
        grouped.scatter_(2, order[:, :, encoder.k :], -math.inf)
    order = key.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    active = key > -math.inf
    f = torch.where(active, pre, 0.0)
    indices = torch.where(active.gather(1, order), order, -1).to(torch.int32)
    missing = (0, top_k - order.shape[1])
    return pad(indices, missing, value=-1), pad(f.gather(1, order), missing), f[:, named.long()]


def parts(x: Tensor, encoder: Encoder, plenty: int) -> tuple[Tensor, ...]:
    """The rows of x, in parts with at most so many pre-activations; at least one part."""
    return torch.split(x, max(1, plenty // encoder.features))


def joined(found: Sequence[Found]) -> Found:
    """What was found in the parts, one behind the other."""
    if len(found) == 1:
        return found[0]
    indices, activations, named = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(activations), torch.cat(named)


def dots(x: Tensor, w_enc: Tensor) -> Tensor:
    """x · w_enc, [n, F] fp32: products in fp32, or of 16-bit numbers where a GPU adds those up in fp32."""
    if x.is_cuda and x.dtype == w_enc.dtype != torch.float32:
        return torch.mm(x, w_enc.T, out_dtype=torch.float32)
    out = torch.empty(len(x), len(w_enc), device=x.device)
    wide = x.float()
    for start in range(0, len(w_enc), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        torch.mm(wide, w_enc[rows].float().T, out=out[:, rows])
    return out


def scale(x: Tensor, norm: int) -> Tensor:
    """The factor of each row into a dictionary with this input norm, [n] fp32."""
    if norm == layout.LAYER_NORM:
        return 1 / (x.float().std(1) + _LAYER_NORM_EPS)
    if norm == layout.L2_NORM:
        return math.sqrt(x.shape[1]) / torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).clamp_min(_SMALLEST_NORM)
    return torch.ones(len(x), device=x.device)
