"""The Triton kernel that stores what a batch brings and lists its tokens and sites. It knows no edits."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from saesteer.kernels.edit.configs import MAP_BLOCK
from saesteer.kernels.edit.entries import kernel
from saesteer.kernels.edit.words import COUNTED, HEAD, KIND, NEEDS, SITE_STRIDE, SPAN, VECTOR, VECTOR_WIDTH, WHOLE

if TYPE_CHECKING:
    from torch import Tensor

    from saesteer.kernels.step.updates import News

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _word(table, stride_table, news, rows, lines, word, real):
    """A word of each row of the table, or of its line in the news, since those are not in the table yet."""
    old = tl.load(table + rows * stride_table + word, mask=real & (lines < 0), other=0)
    new = tl.load(news + lines.to(tl.int64) * stride_table + word, mask=real & (lines >= 0), other=0)
    return old + new


@kernel()
def _map_kernel(
    work,  # [max_tokens + 1, 4] int32
    slots,  # [>= num_reqs] int32 or int64
    row_offset,
    query_start_loc,  # [>= num_reqs + 1]
    table,  # [n_rows, stride_table] int32
    stride_table,
    n_rows,
    counts,  # [n_rows, counters] int32
    stride_counts,
    stride_counters,
    counters,
    sites,  # [n_sites, SITE_STRIDE] int32
    n_sites,
    news,  # [words] int32, see layout.py
    n_vectors,
    width,  # of the widest vector
    n_lines,
    num_reqs,  # below 0: the list stays as it is
    MOST: tl.constexpr,  # tokens of an item
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,  # of the weights
):
    """Program p handles vector p and row p of the news, site p, and request p; see ops.map_."""
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    stride_vector = VECTOR + width + width % 2
    if request < n_vectors:
        vector = news + request.to(tl.int64) * stride_vector
        addresses = vector.to(tl.pointer_type(tl.int64))
        first = tl.load(addresses).to(tl.pointer_type(DTYPE))
        second = tl.load(addresses + 1).to(tl.pointer_type(DTYPE))
        own = tl.load(vector + VECTOR_WIDTH)
        given = (vector + VECTOR).to(tl.pointer_type(tl.float32))
        for start in range(0, own, BLOCK):
            cols = start + lanes
            values = tl.load(given + cols, mask=cols < own, other=0.0).to(DTYPE)
            tl.store(first + cols, values, mask=cols < own)
            tl.store(second + cols, values, mask=cols < own)
    numbers = news + n_vectors.to(tl.int64) * stride_vector
    lines = numbers + n_rows + n_rows % 2
    if (n_lines > 0) & (request < n_rows):
        line = tl.load(numbers + request)
        if line >= 0:
            for start in range(0, stride_table, BLOCK):
                cols = start + lanes
                words = tl.load(lines + line.to(tl.int64) * stride_table + cols, mask=cols < stride_table, other=0)
                tl.store(table + request.to(tl.int64) * stride_table + cols, words, mask=cols < stride_table)
            for start in range(0, counters, BLOCK):
                column = start + lanes
                at = request.to(tl.int64) * stride_counts + column.to(tl.int64) * stride_counters
                tl.store(counts + at, tl.zeros([BLOCK], tl.int32), mask=column < counters)
    if (num_reqs >= 0) & (request < n_sites):
        edited = 0
        for start in range(0, num_reqs, BLOCK):
            real = start + lanes < num_reqs
            rows = tl.load(slots + start + lanes, mask=real, other=0).to(tl.int64) + row_offset
            line = tl.zeros([BLOCK], tl.int32) - 1
            if n_lines > 0:
                line = tl.load(numbers + rows, mask=real, other=-1)
            real = real & (_word(table, stride_table, lines, rows, line, 0, real) > 0)
            kinds = _word(table, stride_table, lines, rows, line, HEAD + SPAN * request + KIND, real)
            edited = tl.maximum(edited, tl.max((kinds != 0).to(tl.int32), axis=0))
        tl.store(sites + request * SITE_STRIDE, tl.where(edited > 0, request, ~request))
    if (num_reqs >= 0) & (request <= tl.maximum(num_reqs - 1, 0)):
        # Each program counts the items of the requests before its own, and so finds its place by itself.
        place = 0
        parts = 1
        whole = 0
        counted = 0
        mine = 0
        for start in range(0, tl.minimum(request + 1, num_reqs), BLOCK):
            offset = start + lanes
            real = offset < tl.minimum(request + 1, num_reqs)
            rows = tl.load(slots + offset, mask=real, other=0).to(tl.int64) + row_offset
            line = tl.zeros([BLOCK], tl.int32) - 1
            if n_lines > 0:
                line = tl.load(numbers + rows, mask=real, other=-1)
            begins = tl.load(query_start_loc + offset, mask=real, other=0)
            ends = tl.load(query_start_loc + offset + 1, mask=real, other=0)
            steered = real & (_word(table, stride_table, lines, rows, line, 0, real) > 0)
            most = _word(table, stride_table, lines, rows, line, 1, steered)
            needs = _word(table, stride_table, lines, rows, line, NEEDS, steered)
            items = tl.where(steered & (offset < request), (ends - begins + MOST - 1) // MOST, 0)
            place += tl.sum(items.to(tl.int32), axis=0)
            mine += tl.sum((steered & (offset == request)).to(tl.int32), axis=0)
            parts = tl.maximum(parts, tl.max(tl.where(steered, most, 1), axis=0))
            whole = tl.maximum(whole, tl.max(tl.where(steered, needs & WHOLE, 0), axis=0))
            counted = tl.maximum(counted, tl.max(tl.where(steered, needs & COUNTED, 0), axis=0))
        count = 0
        if mine > 0:
            row = tl.load(slots + request).to(tl.int32) + row_offset
            begin = tl.load(query_start_loc + request).to(tl.int32)
            length = tl.load(query_start_loc + request + 1).to(tl.int32) - begin
            count = (length + MOST - 1) // MOST
            for start in range(0, count, BLOCK):
                offset = start + lanes
                real = offset < count
                token = begin + offset * MOST
                item = work + (1 + place + offset).to(tl.int64) * 4
                tl.store(item, token, mask=real)
                tl.store(item + 1, tl.zeros([BLOCK], tl.int32) + row, mask=real)
                tl.store(item + 2, tl.minimum(length - offset * MOST, MOST), mask=real)
                tl.store(item + 3, tl.zeros([BLOCK], tl.int32), mask=real)
        if request == tl.maximum(num_reqs - 1, 0):
            tl.store(work, place + count)
            tl.store(work + 1, parts)
            tl.store(work + 2, MOST)
            tl.store(work + 3, whole | counted)


def map_triton(
    work: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    table: Tensor,
    counts: Tensor,
    sites: Tensor,
    news: News,
    num_reqs: int,
    span: int,
) -> None:
    """Launch the map kernel with a program for each request, site, vector and row. Arguments as for ops.map_."""
    _map_kernel[(max(num_reqs, sites.shape[0], len(news.values), table.shape[0] if news.lines else 0, 1),)](
        work,
        slots,
        row_offset,
        query_start_loc,
        table,
        table.stride(0),
        table.shape[0],
        counts,
        *counts.stride(),
        counts.shape[1],
        sites,
        sites.shape[0],
        news.words,
        len(news.values),
        news.width,
        news.lines,
        num_reqs,
        MOST=span,
        BLOCK=MAP_BLOCK,
        DTYPE=_DTYPES[news.dtype],
        num_warps=4,
    )
