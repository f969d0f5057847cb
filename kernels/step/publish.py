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

_FEW = 256, 8  # rows, and counters of each, that are copied at once
_MANY = 64, 32  # the same of what rows with more counters have behind these


@triton.jit
def _copy(
    table,
    stride_table,
    work,
    items,
    counts,
    most,
    line,
    BEGIN: tl.constexpr,  # first counter
    END: tl.constexpr,  # behind the last one; 0: all that a row has
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The counters of the rows of the work list; returns the most that one of them has."""
    largest = 0
    for start in range(0, items, ROWS):
        place = start + tl.arange(0, ROWS)
        row = tl.load(work + 4 + place.to(tl.int64) * 4 + 1, mask=place < items, other=0).to(tl.int64)
        own = tl.load(table + row * stride_table + COUNTERS, mask=place < items, other=0)
        widest = tl.max(own, axis=0)
        largest = tl.maximum(largest, widest)
        for first in range(BEGIN, tl.minimum(widest, END) if END else widest, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            at = row[:, None] * most + column[None, :]
            used = column[None, :] < own[:, None]
            tl.store(line + 1 + at, tl.load(counts + at, mask=used, other=0), mask=used)
    return largest


@kernel()
def _publish_kernel(
    table,  # [rows, stride_table] int32
    stride_table,
    work,  # [max_tokens + 1, 4] int32
    counts,  # [rows, most] int32
    most,  # counters of a row
    steps,  # [1] int32
    published,  # [PUBLISHED, stride_published] int32 in host memory
    stride_published,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    MANY_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """published[step] <- the step's number and the counters of the listed rows, if one has some; see ops.publish_."""
    if PDL:
        gdc_wait()
    items = tl.load(work)
    needs = tl.load(work + 3)
    step = (tl.load(steps) + 1) % STEPS
    if (items > 0) & ((needs & COUNTED) != 0):
        tl.debug_barrier()  # every thread has read the number before one of them writes the next
        line = published + (step % PUBLISHED) * stride_published
        listed = (table, stride_table, work, items, counts, most, line)
        largest = _copy(*listed, 0, COLUMNS, ROWS, COLUMNS)
        if largest > COLUMNS:
            _copy(*listed, COLUMNS, 0, MANY_ROWS, MANY_COLUMNS)
        tl.store(line, step)
        tl.store(steps, step)


def publish_triton(table: Tensor, work: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Launch the kernel with one program. Arguments as for reference.publish_ref_."""
    _publish_kernel[(1,)](
        table,
        table.stride(0),
        work,
        counts,
        counts.shape[1],
        steps,
        published,
        published.stride(0),
        *_FEW,
        *_MANY,
        num_warps=8,
        **early(table.device.index),
    )
