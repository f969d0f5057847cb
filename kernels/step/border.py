"""The Triton kernel that finds where the reasoning ends, and its launcher. It knows windows, and no edits."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from saesteer.kernels.edit.configs import MAP_BLOCK
from saesteer.kernels.edit.entries import kernel
from saesteer.kernels.edit.words import (
    ANSWER,
    BEGIN,
    CLOSING,
    END,
    ENTRY,
    FLAGS,
    FROM,
    HEAD,
    HI,
    LO,
    NEVER,
    REASONING,
    SPAN,
)

if TYPE_CHECKING:
    from torch import Tensor


@kernel()
def _border_kernel(
    table,  # [rows, stride_table] int32
    stride_table,
    slots,  # [>= num_reqs] int32 or int64
    row_offset,
    query_start_loc,  # [>= num_reqs + 1]
    tokens,  # [tokens of the step]
    positions,  # the same
    sites,
    BLOCK: tl.constexpr,
):
    """Program p handles request p of the batch; see ops.border_."""
    request = tl.program_id(0)
    row = table + (tl.load(slots + request).to(tl.int64) + row_offset) * stride_table
    since = tl.load(row + FROM)
    if since > 0:
        lanes = tl.arange(0, BLOCK)
        one = tl.load(row + CLOSING)
        other = tl.load(row + CLOSING + 1)
        end = tl.load(query_start_loc + request + 1).to(tl.int32)
        border = NEVER
        for start in range(tl.load(query_start_loc + request).to(tl.int32), end, BLOCK):
            inside = start + lanes < end
            token = tl.load(tokens + start + lanes, mask=inside, other=0).to(tl.int32)
            position = tl.load(positions + start + lanes, mask=inside, other=0).to(tl.int32)
            ends = inside & ((token == one) | (token == other)) & (position >= since)
            border = tl.minimum(border, tl.min(tl.where(ends, position, NEVER), axis=0))
        if border < NEVER:
            for site in range(sites):
                span = row + HEAD + SPAN * site
                last = tl.load(span + END)
                for start in range(tl.load(span + BEGIN), last, BLOCK * ENTRY):
                    at = start + lanes * ENTRY
                    inside = at < last
                    entry = row + at
                    flags = tl.load(entry + FLAGS, mask=inside, other=0)
                    answer = inside & ((flags & ANSWER) != 0)
                    reasoning = inside & ((flags & REASONING) != 0)
                    lo = tl.load(entry + LO, mask=answer, other=0)
                    hi = tl.load(entry + HI, mask=answer | reasoning, other=0)
                    tl.store(entry + LO, tl.maximum(lo, border + 1), mask=answer)
                    tl.store(entry + HI, tl.where(answer, ~hi, tl.minimum(hi, border + 1)), mask=answer | reasoning)
            tl.debug_barrier()  # every thread has seen that the row waits before one of them writes that it does not
            tl.store(row + FROM, 0)


def border_triton(
    table: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    tokens: Tensor,
    positions: Tensor,
    sites: int,
    num_reqs: int,
) -> None:
    """Launch the kernel with a program for each request. Arguments as for ops.border_."""
    _border_kernel[(num_reqs,)](
        table,
        table.stride(0),
        slots,
        row_offset,
        query_start_loc,
        tokens,
        positions,
        sites,
        BLOCK=MAP_BLOCK,
        num_warps=4,
    )
