"""The Triton kernel that lists the tokens of steered requests and the sites of their edits, and its launcher."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from saesteer.kernels.configs import MAP_BLOCK
from saesteer.kernels.entries import BEGIN, END, HEAD_WORDS, SITE_STRIDE, SPAN

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(
    do_not_specialize=[
        "work",
        "slots",
        "row_offset",
        "query_start_loc",
        "table",
        "stride_table",
        "counts",
        "stride_counts",
        "stride_counters",
        "counters",
        "sites",
        "n_sites",
        "num_reqs",
    ],
)
def _map_kernel(
    work,  # [max_tokens + 1, 4] int32
    slots,  # [>= num_reqs] int32 or int64
    row_offset,
    query_start_loc,  # [>= num_reqs + 1]
    table,  # [rows, stride_table] int32
    stride_table,
    counts,  # [rows, counters] int32
    stride_counts,
    stride_counters,
    counters,
    sites,  # [n_sites, SITE_STRIDE] int32
    n_sites,
    num_reqs,
    MOST: tl.constexpr,  # tokens of an item
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if request < n_sites:  # a program is one site's, too
        edited = 0
        for start in range(0, num_reqs, BLOCK):
            real = start + lanes < num_reqs
            rows = tl.load(slots + start + lanes, mask=real, other=0).to(tl.int64) + row_offset
            real = real & (tl.load(table + rows * stride_table, mask=real, other=0) > 0)
            here = table + rows * stride_table + HEAD_WORDS + SPAN * request
            begins = tl.load(here + BEGIN, mask=real, other=0)
            ends = tl.load(here + END, mask=real, other=0)
            edited = tl.maximum(edited, tl.max((begins < ends).to(tl.int32), axis=0))
        tl.store(sites + request * SITE_STRIDE, tl.where(edited > 0, request, ~request))
    # Items of the requests before this one, and its own: each program finds its place by itself.
    place = 0
    parts = 1
    dense = 0
    earlier = tl.minimum(request, num_reqs)
    for start in range(0, earlier, BLOCK):
        before = start + lanes
        real = before < earlier
        rows = tl.load(slots + before, mask=real, other=0).to(tl.int64) + row_offset
        begins = tl.load(query_start_loc + before, mask=real, other=0)
        ends = tl.load(query_start_loc + before + 1, mask=real, other=0)
        entries = tl.load(table + rows * stride_table, mask=real, other=0)
        most = tl.load(table + rows * stride_table + 1, mask=real, other=0)
        whole = tl.load(table + rows * stride_table + 2, mask=real, other=0)
        steered = real & (entries > 0)
        place += tl.sum(tl.where(steered, (ends - begins + MOST - 1) // MOST, 0).to(tl.int32), axis=0)
        parts = tl.maximum(parts, tl.max(tl.where(steered, most, 1), axis=0))
        dense = tl.maximum(dense, tl.max(tl.where(steered, whole, 0), axis=0))
    count = 0
    if request < num_reqs:
        row = tl.load(slots + request).to(tl.int64) + row_offset
        if tl.load(table + row * stride_table) > 0:
            parts = tl.maximum(parts, tl.load(table + row * stride_table + 1))
            dense = tl.maximum(dense, tl.load(table + row * stride_table + 2))
            if tl.load(table + row * stride_table + 3) != 0:
                for start in range(0, counters, BLOCK):
                    column = start + lanes
                    at = row * stride_counts + column * stride_counters
                    tl.store(counts + at, tl.zeros([BLOCK], tl.int32), mask=column < counters)
                tl.store(table + row * stride_table + 3, 0)
            begin = tl.load(query_start_loc + request).to(tl.int32)
            length = tl.load(query_start_loc + request + 1).to(tl.int32) - begin
            count = (length + MOST - 1) // MOST
            for start in range(0, count, BLOCK):
                offset = start + lanes
                real = offset < count
                token = begin + offset * MOST
                item = work + (1 + place + offset).to(tl.int64) * 4
                tl.store(item, token, mask=real)
                tl.store(item + 1, tl.zeros([BLOCK], tl.int32) + row.to(tl.int32), mask=real)
                tl.store(item + 2, tl.minimum(length - offset * MOST, MOST), mask=real)
                tl.store(item + 3, tl.zeros([BLOCK], tl.int32), mask=real)
    if request == tl.maximum(num_reqs - 1, 0):
        tl.store(work, place + count)
        tl.store(work + 1, parts)
        tl.store(work + 2, MOST)
        tl.store(work + 3, dense)


def map_triton(
    work: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    table: Tensor,
    counts: Tensor,
    sites: Tensor,
    num_reqs: int,
    span: int,
) -> None:
    """Launch the map kernel, one program for each request and site; arguments as of the op `map_`."""
    _map_kernel[(max(num_reqs, sites.shape[0], 1),)](
        work,
        slots,
        row_offset,
        query_start_loc,
        table,
        table.stride(0),
        counts,
        *counts.stride(),
        counts.shape[1],
        sites,
        sites.shape[0],
        num_reqs,
        MOST=span,
        BLOCK=MAP_BLOCK,
        num_warps=4,
    )
