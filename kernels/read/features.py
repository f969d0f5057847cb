"""The strongest features of rows of a site's tensor, and chosen ones, in plain torch. Knows no request and no site."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from saesteer.kernels import layout

Found = tuple[Tensor, Tensor, Tensor]

_PLENTY = 1 << 24  # pre-activations in memory at once
_GATHER = 3  # a product with a part of an encoder moves its rows so many times, as they are gathered first
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
    depends on shapes alone. Chosen features of a dictionary that ranks none take their own rows of the encoder, unless
    they are so many that the whole encoder moves fewer bytes.

    Args:
        x: [n, d], any float dtype; n may be 0.
        encoder: the dictionary, on the device of x.
        top_k: features to list for each row; 0 for none.
        named: [m] int32 or int64, on the device of x, the features in [0, F) that are wanted whatever their strength.

    Returns:
        Indices [n, top_k] int32, -1 behind the last active feature; their activations [n, top_k] fp32, 0 there; and
        the activations of the named features [n, m] fp32, 0 where they are not active.
    """
    w_enc, b_enc, threshold, read = encoder.w_enc, encoder.b_enc, encoder.threshold, _read
    if not (top_k or encoder.groups) and _GATHER * len(named) < encoder.features:
        w_enc, b_enc, threshold = (one.index_select(0, named) for one in (w_enc, b_enc, threshold))
        read = _read_named
    found = []
    for some in torch.split(x, max(1, _PLENTY // max(1, len(w_enc)))):
        pre = dots(some, w_enc)
        if encoder.norm and len(some):
            pre *= scale(some, encoder.norm)[:, None]
        pre += b_enc
        found.append(read(pre, pre > threshold, encoder, top_k, named))
    if len(found) == 1:
        return found[0]
    indices, activations, values = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(activations), torch.cat(values)


def _read_named(pre: Tensor, active: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """Of pre-activations of the named features alone, [n, m]."""
    assert not (top_k or encoder.groups) and pre.shape[1] == len(named)
    none = pre.new_empty(len(pre), top_k)
    return none.int(), none, torch.where(active, pre, 0.0)


def _read(pre: Tensor, active: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """Of the pre-activations of all features, [n, F]."""
    f = torch.where(active, pre, 0.0)
    if not (top_k or encoder.groups):
        return _read_named(pre.index_select(1, named), active.index_select(1, named), encoder, 0, named)
    keys = _keys(torch.where(active, pre.abs() if encoder.magnitude else pre, -math.inf))
    if encoder.groups > 1:
        best, kept = keys.view(len(pre), encoder.groups, encoder.features // encoder.groups).max(2)
        kept += torch.arange(0, encoder.features, encoder.features // encoder.groups, device=pre.device)
        order = kept.gather(1, best.topk(min(top_k, encoder.groups)).indices)
    else:
        order = kept = keys.topk(min(encoder.k or top_k, encoder.features)).indices
    if encoder.groups:
        f = torch.zeros_like(f).scatter_(1, kept, f.gather(1, kept))
    order = order[:, :top_k]
    indices = torch.where(active.gather(1, order), order, -1).to(torch.int32)
    missing = (0, top_k - order.shape[1])
    return pad(indices, missing, value=-1), pad(f.gather(1, order), missing), f.index_select(1, named)


def _keys(strength: Tensor) -> Tensor:
    """Numbers [n, F] int64 that order features by strength, equal ones by falling index; -0.0 equals 0.0."""
    bits = (strength + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    features = strength.shape[1]
    return (bits.long() << 32) + torch.arange(features - 1, -1, -1, device=strength.device)


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
    assert norm == layout.L2_NORM, norm
    return math.sqrt(x.shape[1]) / torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).clamp_min(_SMALLEST_NORM)
