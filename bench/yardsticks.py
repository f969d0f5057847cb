"""What our kernels are measured against: an empty kernel, a dense encoder's product and a sparse decode, each alone.

Imports Triton, so it is imported where a GPU is known to be. Knows no kernels of ours.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.cases import THRESHOLD
from bench.timing import Launch, Timing, in_graph

MOST = 256  # active features of a token that are looked at


@triton.jit
def _empty_kernel(x):
    pass


def empty_launch(x: Tensor) -> Launch:
    """A kernel that does nothing."""
    return partial(_empty_kernel[(16,)], x, num_warps=4)


@triton.jit
def _decode_kernel(
    out,  # [T, WIDTH]
    values,  # [T, MOST] fp32
    ids,  # [T, MOST] int32
    counts,  # [T] int32
    w_dec,  # [features, WIDTH]
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Tokens run fastest, so that all of them share one slice of columns, which fits into the cache.
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, CHUNK)
    count = tl.load(counts + token)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, CHUNK):
        real = start + lane < count
        row = tl.load(ids + token * MOST + start + lane, mask=real, other=0).to(tl.int64)
        value = tl.load(values + token * MOST + start + lane, mask=real, other=0.0)
        mask = real[:, None] & (cols < WIDTH)[None, :]
        rows = tl.load(w_dec + row[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(rows.to(tl.float32) * value[:, None], axis=0)
    tl.store(out + token * WIDTH + cols, total.to(out.dtype.element_ty), mask=cols < WIDTH)


# Columns of a program, features in flight, warps: the fastest counts. A warp adds up rows of 256 columns by itself.
DECODES = ((256, 8, 1), (256, 16, 1), (256, 8, 2), (512, 8, 4))


def decode_launch(
    out: Tensor, values: Tensor, ids: Tensor, counts: Tensor, w_dec: Tensor, block: int, chunk: int, warps: int
) -> Launch:
    """A decode of lists that are ready; block, chunk and warps are one of DECODES.

    Args:
        out: [T, d].
        values: [T, most] float32, of the features that are active.
        ids: [T, most] int32, their numbers.
        counts: [T] int32, how many of these are active.
        w_dec: [F, d].
    """
    width = out.shape[1]
    return partial(
        _decode_kernel[(len(out), triton.cdiv(width, block))],
        *(out, values, ids, counts, w_dec),
        WIDTH=width,
        MOST=ids.shape[1],
        CHUNK=chunk,
        BLOCK=block,
        num_warps=warps,
    )


def dense_product(x: Tensor, w_enc: Tensor) -> Timing:
    """x [T, d] times w_enc [F, d] transposed, in torch, both in the same dtype."""
    out = torch.empty(len(x), len(w_enc), device=x.device, dtype=x.dtype)
    return in_graph([partial(torch.mm, x, w_enc.T, out=out)] * (64 if len(x) <= 512 else 4))


def sparse_decode(x: Tensor, w_enc: Tensor, w_dec: Tensor) -> tuple[Timing, float]:
    """Active features of x times their decoder rows, from a list of them that is ready; and how many a token has.

    Raises:
        AssertionError: the yardstick itself is wrong.
    """
    pre = x.float() @ w_enc.float().T
    most = min(MOST, len(w_enc))
    counts = (pre > THRESHOLD).sum(1).clamp_max(most).int()
    found = pre.topk(most, dim=1)
    values, ids = found.values.contiguous(), found.indices.int().contiguous()
    active = float(counts.float().mean())
    out = torch.empty_like(x)
    launches = [decode_launch(out, values, ids, counts, w_dec, *shape) for shape in DECODES]
    truth = torch.where(pre[:16] > THRESHOLD, pre[:16], 0.0) @ w_dec.float()
    best: Timing | None = None
    for launch in launches:
        out.fill_(float("nan"))
        launch()
        off = torch.linalg.vector_norm(out[:16].float() - truth) / torch.linalg.vector_norm(truth)
        assert float(off) < 1e-2, f"the sparse decode is off by {float(off):.1e}"
        timing = in_graph([launch] * (64 if len(x) <= 512 else 4))
        best = timing if best is None else min(best, timing)
    assert best is not None
    return best, active
