"""How a GPU finds the strongest features of rows: Triton kernels behind a matrix product. Knows no request and no site.

The strongest K features lie in the K groups of neighbours with the strongest best features. So one kernel, all over
the device, finds the best of each group, and another, a program for each row, chooses K groups, and then K of their
features. For a few rows product.py is the product and the first of the two.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.early import early
from saesteer.kernels.edit.entries import kernel
from saesteer.kernels.read import product
from saesteer.kernels.read.features import Encoder, Found, dots, joined, parts, scale
from saesteer.kernels.read.keys import NONE, UNFUSED, index_of, key_of, strength_of

KEPT = (8, 32)  # how many features a launch may keep; each is a kernel of its own, to be compiled at start
NAMED = 16  # named features of a program
_PLENTY = 1 << 26  # pre-activations in memory at once
_TILE = 2048  # features of a group kernel's tile, and most keys that are sorted at once, if KEPT are not more
_KEYS = 128  # sorted keys of a warp: with more of them in a thread's registers a kernel takes minutes to compile


class Sizes(NamedTuple):
    """How the features of one dictionary are grouped."""

    kept: int  # features that the second kernel keeps
    size: int  # features of a group
    groups: int


def sizes(encoder: Encoder, top_k: int, most: int = 1024) -> Sizes:
    """Groups so large that both steps of the second kernel have about the same number of keys; a group's best is the
    only candidate where the dictionary has its own groups. Otherwise a group has `most` features at most.

    Raises:
        ValueError: top_k is larger than the last of KEPT.
    """
    kept = next((kept for kept in KEPT if kept >= top_k), None)
    if kept is None:
        raise ValueError(f"top_k is {top_k}; at most {KEPT[-1]} features of a row can be listed")
    if encoder.groups > 1:
        return Sizes(kept, encoder.features // encoder.groups, encoder.groups)
    size = 4
    while size < most and 2 * size * size * kept <= encoder.features:
        size *= 2
    return Sizes(kept, size, triton.cdiv(encoder.features, size))


def read_features_triton(x: Tensor, encoder: Encoder, top_k: int, named: Tensor) -> Found:
    """See ``features.read_features``.

    Raises:
        ValueError: top_k is larger than the last of KEPT.
    """
    return joined([_read(part, encoder, top_k, named) for part in parts(x, encoder, _PLENTY)])


def launch_all(encoder: Encoder) -> None:
    """Launch every kernel that a read of this dictionary may launch, for one row: the short way, and that of many."""
    x = torch.zeros(1, encoder.w_enc.shape[1], dtype=encoder.w_enc.dtype, device=encoder.w_enc.device)
    named = torch.zeros(1, dtype=torch.int64, device=x.device)
    for top_k in (0, *KEPT):
        for few in (True, False):
            _read(x, encoder, top_k, named, few=few)


def _read(x: Tensor, encoder: Encoder, top_k: int, named: Tensor, *, few: bool = True) -> Found:
    indices = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    activations = torch.empty(len(x), top_k, device=x.device)
    values = torch.empty(len(x), len(named), device=x.device)
    if len(x):
        into = scale(x, encoder.norm) if encoder.norm else encoder.b_enc  # without a norm nobody reads it
        maxima = None
        if few and product.serves(x, encoder, top_k):
            products, maxima = product.best(x, into, encoder, sizes(encoder, top_k, product.FEATURES).size)
        else:
            products = dots(x, encoder.w_enc)
        choose(products, into, encoder, named, indices, activations, values, maxima)
    return indices, activations, values


def choose(
    products: Tensor,
    into: Tensor,
    encoder: Encoder,
    named: Tensor,
    indices: Tensor,
    activations: Tensor,
    values: Tensor,
    maxima: Tensor | None = None,
) -> None:
    """Fill indices and activations [n, top_k], and values [n, m], from the products x · w_enc [n, F], n > 0.

    Args:
        maxima: of the groups, as product.py finds them along with the products.
    """
    n, top_k = indices.shape
    kept, size, groups = sizes(encoder, top_k) if maxima is None else sizes(encoder, top_k, product.FEATURES)
    own, norms = encoder.groups > 1, encoder.norm != 0
    shared = (products, into, encoder.b_enc, encoder.threshold)
    kind = {"HAS_NORM": norms, "MAGNITUDE": encoder.magnitude, **UNFUSED}
    found = maxima is not None
    if maxima is None:
        maxima = torch.empty(n, groups, dtype=torch.int64, device=products.device)
    if not found and (top_k or (own and len(named))):
        columns = min(triton.next_power_of_2(size), _TILE // 8)
        rows = _TILE // columns
        grid = (n, triton.cdiv(groups, rows))
        tiles = {"ROWS": rows, "COLUMNS": columns, "num_warps": 4}
        maxima_kernel[grid](*shared, maxima, encoder.features, size, groups, **tiles, **kind)
    if top_k:
        limit = min(top_k, encoder.k) if encoder.groups == 1 else top_k
        chunk = max(kept, min(triton.next_power_of_2(groups), _TILE))
        columns = 0 if own else max(1, min(size, _TILE // kept))
        warps = max(4, max(chunk, kept * columns) // _KEYS)
        steps = {"KEPT": kept, "CHUNK": chunk, "SIZE": 0 if own else size, "COLUMNS": columns, "num_warps": warps}
        results = (indices, activations, top_k, limit)
        waits: Any = early(products.device.index)
        select_kernel[(n,)](*shared, maxima, *results, encoder.features, groups, **steps, **kind, **waits)
    if len(named):
        ranked = {"RANKED": encoder.groups == 1, "OWN_GROUPS": own, "NAMED": NAMED, "CHUNK": 256, "num_warps": 4}
        grid = (n, triton.cdiv(len(named), NAMED))
        chosen = (named, values, len(named), encoder.k)
        named_kernel[grid](*shared, maxima, *chosen, encoder.features, size, groups, **ranked, **kind)


@triton.jit
def strengths(
    products, into, b_enc, threshold, row, features, index, inside, HAS_NORM: tl.constexpr, MAGNITUDE: tl.constexpr
):
    """Key and pre-activation of features of a row, NONE and anything for those outside."""
    pre = tl.load(products + row * features + index, mask=inside, other=0.0)
    if HAS_NORM:
        pre *= tl.load(into + row)
    pre += tl.load(b_enc + index, mask=inside, other=0.0)
    active = inside & (pre > tl.load(threshold + index, mask=inside, other=float("inf")))
    return key_of(pre, index, active, MAGNITUDE), pre


@triton.jit
def merged(best, keys, KEPT: tl.constexpr):
    """The KEPT largest of best, which ascends, and of keys, ascending."""
    return tl.bitonic_merge(tl.maximum(best, tl.topk(keys, KEPT)))


@kernel("products", "b_enc", "threshold", "maxima", "features", "size", "groups")
def maxima_kernel(
    products,  # [n, features] fp32
    into,  # [n] fp32 with HAS_NORM
    b_enc,  # [features] fp32
    threshold,  # [features] fp32
    maxima,  # [n, groups] int64
    features,
    size,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):
    """maxima[row, group] <- the largest key of the group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    best = tl.full([ROWS], NONE, tl.int64)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        index = group[:, None] * size + column[None, :]
        inside = (column < size)[None, :] & (index < features)
        key, _ = strengths(products, into, b_enc, threshold, row, features, index, inside, HAS_NORM, MAGNITUDE)
        best = tl.maximum(best, tl.max(key, axis=1))
    tl.store(maxima + row * groups + group, best, mask=group < groups)


@kernel("products", "b_enc", "threshold", "maxima", "features", "groups")
def select_kernel(
    products,
    into,
    b_enc,
    threshold,
    maxima,
    indices,  # [n, top_k] int32
    activations,  # [n, top_k] fp32
    top_k,
    limit,  # features of a row that are active at most
    features,
    groups,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,  # maxima at once, a power of two and at least KEPT
    SIZE: tl.constexpr,  # features of a group; 0: its best is the only candidate
    COLUMNS: tl.constexpr,  # features of each kept group at once
    HAS_NORM: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """indices and activations[row] <- the strongest features, from the largest key of each group."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([KEPT], NONE, tl.int64)
    for start in range(0, groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        best = merged(best, tl.load(maxima + row * groups + group, mask=group < groups, other=NONE), KEPT)
    if SIZE:
        first = index_of(best) // SIZE * SIZE
        chosen = best != NONE
        best = tl.full([KEPT], NONE, tl.int64)
        for start in range(0, SIZE, COLUMNS):
            index = first[:, None] + start + tl.arange(0, COLUMNS)[None, :]
            inside = chosen[:, None] & (index < features)
            key, _ = strengths(products, into, b_enc, threshold, row, features, index, inside, HAS_NORM, MAGNITUDE)
            best = merged(best, tl.reshape(key, [KEPT * COLUMNS]), KEPT)
    place = KEPT - 1 - tl.arange(0, KEPT)
    listed = (best != NONE) & (place < limit)
    index = index_of(best)
    if MAGNITUDE:  # a key does not have the sign
        _, pre = strengths(products, into, b_enc, threshold, row, features, index, listed, HAS_NORM, MAGNITUDE)
    else:
        pre = strength_of(best)
    out = row * top_k + place
    tl.store(indices + out, tl.where(listed, index, -1), mask=place < top_k)
    tl.store(activations + out, tl.where(listed, pre, 0.0), mask=place < top_k)


@kernel("products", "b_enc", "threshold", "features", "size", "groups")
def named_kernel(
    products,
    into,
    b_enc,
    threshold,
    maxima,
    named,  # [m] int32 or int64
    values,  # [n, m] fp32
    m,
    k,
    features,
    size,
    groups,
    RANKED: tl.constexpr,  # among all features: active only if fewer than k come before it
    OWN_GROUPS: tl.constexpr,  # active only if it is the best of its group
    NAMED: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAGNITUDE: tl.constexpr,
):
    """values[row] <- the activations of named features."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NAMED + tl.arange(0, NAMED)
    index = tl.load(named + at, mask=at < m, other=0).to(tl.int32)
    own, pre = strengths(products, into, b_enc, threshold, row, features, index, at < m, HAS_NORM, MAGNITUDE)
    active = own != NONE
    if RANKED:
        before = tl.zeros([NAMED], tl.int32)
        for start in range(0, features, CHUNK):
            other = start + tl.arange(0, CHUNK)
            inside = other < features
            key, _ = strengths(products, into, b_enc, threshold, row, features, other, inside, HAS_NORM, MAGNITUDE)
            before += tl.sum((key[None, :] > own[:, None]).to(tl.int32), axis=1)
        active = active & (before < k)
    if OWN_GROUPS:
        active = active & (tl.load(maxima + row * groups + index // size, mask=at < m, other=NONE) == own)
    tl.store(values + row * m + at, tl.where(active, pre, 0.0), mask=at < m)
