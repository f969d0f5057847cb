"""Probes' scores of a few rows in one Triton kernel: products with each direction's parts, their sum, the bias.

Knows no request.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.early import early
from saesteer.kernels.edit.entries import kernel


class Tiles(NamedTuple):
    """How the kernel is launched."""

    probes: int = 4  # of a program
    columns: int = 256  # at once
    stages: int = 4  # loads in flight
    warps: int = 4


TILES = Tiles()
_ROWS = 16  # of a program: the least that tensor cores take


def score(
    x: Tensor,
    sites: Tensor | None,
    v: Tensor,
    numbers: Tensor,
    bias: Tensor,
    scores: Tensor,
    tiles: Tiles = TILES,
) -> None:
    """Fill in the scores of the probes of some sites.

    Args:
        x: [n, all sites, d], in 16 bit.
        sites: [sites] int64, which ones; None: all of them.
        v: [sites, 3 m, d], three parts of each direction that add up to it: all first ones, then the second and third.
        numbers: [sites, m] int32, the column of each probe.
        bias: [k] fp32.
        scores: [n, k] fp32; only the columns of these probes change.
    """
    own, m = numbers.shape
    n, every, width = x.shape
    waits: Any = early(x.device.index)
    score_kernel[(triton.cdiv(n, _ROWS), own, triton.cdiv(m, tiles.probes))](
        x,
        sites,
        v,
        numbers,
        bias,
        scores,
        n,
        every,
        m,
        scores.shape[1],
        WIDTH=width,
        ROWS=_ROWS,
        PROBES=tiles.probes,
        COLUMNS=tiles.columns,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **waits,
    )


@kernel("x", "v")
def score_kernel(
    x,  # [n, every, WIDTH]
    sites,  # [sites], or None
    v,  # [sites, 3 m, WIDTH]
    numbers,  # [sites, m] int32
    bias,  # [k] fp32
    scores,  # [n, k] fp32
    n,
    every,  # sites of a row
    m,
    k,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PROBES: tl.constexpr,
    COLUMNS: tl.constexpr,  # at once
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """scores[row, number] <- x · v + bias."""
    if PDL:
        gdc_wait()
    site = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < n
    place = row * every + site
    if sites is not None:
        place = row * every + tl.load(sites + site)
    member = tl.arange(0, 4 * PROBES)  # four parts of each probe, the last one nothing
    probe = tl.program_id(2) * PROBES + member // 4
    part = member % 4
    known = (part < 3) & (probe < m)
    column = tl.arange(0, COLUMNS)
    xs = x + place[:, None] * WIDTH + column[None, :]
    parts = v + ((site * 3 + part) * m + probe).to(tl.int64)[None, :] * WIDTH + column[:, None]
    acc = tl.zeros([ROWS, 4 * PROBES], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        left = start + column < WIDTH
        some = tl.load(xs + start, mask=inside[:, None] & left[None, :], other=0.0)
        its = tl.load(parts + start, mask=known[None, :] & left[:, None], other=0.0)
        acc = tl.dot(some, its, acc)
    total = tl.sum(tl.reshape(acc, [ROWS, PROBES, 4]), axis=2)
    probe = tl.program_id(2) * PROBES + tl.arange(0, PROBES)
    number = tl.load(numbers + site * m + probe, mask=probe < m, other=0)
    total += tl.load(bias + number)[None, :]
    tl.store(scores + row[:, None] * k + number[None, :], total, mask=inside[:, None] & (probe < m)[None, :])
