"""The products of a few rows with an encoder, and the best feature of each group, in one Triton kernel.

A decoding step has few rows, so the encoder's bytes are what takes time. The products of a group's features are still
in registers when its best is found, and the kernel that chooses is set up meanwhile. It knows no request and no site.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saesteer.kernels.early import early
from saesteer.kernels.edit.entries import kernel
from saesteer.kernels.read.features import Encoder
from saesteer.kernels.read.keys import UNFUSED, key_of

ROWS = 64  # at most; one program has all of them, so that each weight is read once
FEATURES = 64  # of a program, and so of a group at most


class Tiles(NamedTuple):
    """How the kernel is launched."""

    columns: int = 64  # at once
    stages: int = 5  # loads in flight
    warps: int = 4


TILES = Tiles()


def serves(x: Tensor, encoder: Encoder, top_k: int) -> bool:
    """Whether the kernel is for these rows; those of a long step are better off with a product of its own."""
    wide = x.dtype != encoder.w_enc.dtype or x.dtype not in (torch.bfloat16, torch.float16)
    return x.is_cuda and 0 < len(x) <= ROWS and top_k > 0 and encoder.groups < 2 and not wide


def best(x: Tensor, into: Tensor, encoder: Encoder, size: int) -> tuple[Tensor, Tensor]:
    """The products [n, F] fp32, and the largest key of each group of so many features, [n, groups] int64."""
    n, features, groups = len(x), encoder.features, triton.cdiv(encoder.features, size)
    products = torch.empty(n, features, device=x.device)
    maxima = torch.empty(n, groups, dtype=torch.int64, device=x.device)
    waits: Any = early(x.device.index)
    product_kernel[(triton.cdiv(features, FEATURES),)](
        x.contiguous(),
        encoder.w_enc,
        into,
        encoder.b_enc,
        encoder.threshold,
        products,
        maxima,
        n,
        features,
        groups,
        WIDTH=x.shape[1],
        ROWS=ROWS,
        FEATURES=FEATURES,
        COLUMNS=TILES.columns,
        STAGES=TILES.stages,
        SIZE=size,
        HAS_NORM=encoder.norm != 0,
        MAGNITUDE=encoder.magnitude,
        num_warps=TILES.warps,
        **UNFUSED,
        **waits,
    )
    return products, maxima


@kernel("x", "w_enc", "b_enc", "threshold", "products", "maxima", "features", "groups")
def product_kernel(
    x,  # [n, WIDTH]
    w_enc,  # [features, WIDTH]
    into,  # [n] fp32 with HAS_NORM
    b_enc,  # [features] fp32
    threshold,  # [features] fp32
    products,  # [n, features] fp32
    maxima,  # [n, groups] int64
    n,
    features,
    groups,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # at least n
    FEATURES: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # at once
    STAGES: tl.constexpr,
    SIZE: tl.constexpr,  # features of a group; divides FEATURES
    HAS_NORM: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends, and the next one while it runs
):
    """products <- x · w_enc; maxima[row, group] <- the largest key of the group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    inside = row < n
    index = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    known = index < features
    column = tl.arange(0, COLUMNS)
    # Features that do not exist are the first one once more. Rows are not: many loads of one row wait for each other.
    xs = x + row[:, None] * WIDTH + column[None, :]
    weights = w_enc + tl.where(known, index, 0).to(tl.int64)[None, :] * WIDTH + column[:, None]
    acc = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        if WIDTH % COLUMNS:
            left = start + column < WIDTH
            some = tl.load(xs + start, mask=inside[:, None] & left[None, :], other=0.0)
            its = tl.load(weights + start, mask=left[:, None], other=0.0)
        else:
            some = tl.load(xs + start, mask=inside[:, None], other=0.0)
            its = tl.load(weights + start, eviction_policy="evict_first")
        acc = tl.dot(some, its, acc)
    row = row.to(tl.int64)
    both = inside[:, None] & known[None, :]
    tl.store(products + row[:, None] * features + index[None, :], acc, mask=both)
    if HAS_NORM:
        acc *= tl.load(into + row, mask=inside, other=0.0)[:, None]
    pre = acc + tl.load(b_enc + index, mask=known, other=0.0)[None, :]
    limit = tl.load(threshold + index, mask=known, other=float("inf"))
    key = key_of(pre, index[None, :], both & (pre > limit[None, :]), MAGNITUDE)
    group = tl.program_id(0) * (FEATURES // SIZE) + tl.arange(0, FEATURES // SIZE)
    top = tl.max(tl.reshape(key, [ROWS, FEATURES // SIZE, SIZE]), axis=2)
    tl.store(maxima + row[:, None] * groups + group[None, :], top, mask=inside[:, None] & (group < groups)[None, :])
