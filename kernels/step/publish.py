"""The Triton kernel that brings a step's counters to the host, and its launcher. It knows no edits."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.early import early
from saesteer.kernels.edit.entries import kernel
from saesteer.kernels.edit.words import COUNTED, COUNTERS, PUBLISHED, STEPS

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024  # words that are copied at once


@kernel()
def _publish_kernel(
    table,  # [rows, stride_table] int32
    stride_table,
    work,  # [max_tokens + 1, 4] int32
    counts,  # int32, one counter of all rows behind the other
    rows,
    most,  # counters of a row
    steps,  # [1] int32
    published,  # [PUBLISHED, stride_published] int32 in host memory
    stride_published,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """published[step] <- the step's number and the counters of all rows, if a listed one has some; see ops.publish_."""
    if PDL:
        gdc_wait()
    row = tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    # All of this is asked for at once: one way to memory takes as long as the rest of the kernel.
    counted = (tl.load(work) > 0) & ((tl.load(work + 3) & COUNTED) != 0)
    used = tl.load(table + row * stride_table, mask=row < rows, other=0) > 0
    own = tl.load(table + row * stride_table + COUNTERS, mask=row < rows, other=0)
    step = (tl.load(steps) + 1) % STEPS
    first = tl.load(counts + lanes, mask=lanes < rows * most, other=0)
    if counted:
        counters = tl.max(tl.where(used, own, 0), axis=0)
        tl.debug_barrier()  # every thread has read the number before one of them writes the next
        place = published + (step % PUBLISHED) * stride_published
        words = counters * rows
        tl.store(place + 1 + lanes, first, mask=lanes < words)
        for start in range(BLOCK, words, BLOCK):
            at = start + lanes
            tl.store(place + 1 + at, tl.load(counts + at, mask=at < words, other=0), mask=at < words)
        tl.store(place, step)
        tl.store(steps, step)


def publish_triton(table: Tensor, work: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Launch the kernel with one program. Arguments as for reference.publish_ref_."""
    rows = table.shape[0]
    _publish_kernel[(1,)](
        table,
        table.stride(0),
        work,
        counts,
        rows,
        counts.shape[1],
        steps,
        published,
        published.stride(0),
        ROWS=triton.next_power_of_2(rows),
        BLOCK=_BLOCK,
        num_warps=4,
        **early(table.device.index),
    )
