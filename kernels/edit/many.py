"""The Triton kernel for spans of tokens with many entries: matrix products on tensor cores.

It does the rows that layout.py calls MANY in long steps, a program for each turn of tokens, and sums in another order
than edit.py, which does them in shorter steps.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.entries import kernel, law, product, rounded, rows, tile, unpack, word
from saesteer.kernels.edit.words import (
    BEGIN,
    COUNTER,
    END,
    ENTRY,
    HEAD,
    KIND,
    LARGEST_HALF,
    MANY,
    NORMED,
    PAIR,
    PARTIALS,
    SLOT,
    SPAN,
)


@triton.jit
def _products(
    stream,
    second,
    w_enc,
    starts,  # [ENTRIES] int64 offsets in w_enc
    inside,  # [ENTRIES] whether the entry exists
    x_at,  # [TOKENS] int64 offsets in the stream
    exists,  # [TOKENS] whether there is a token
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x . w_enc[slot] for each token and entry: [TOKENS, ENTRIES]."""
    acc = tl.zeros([x_at.shape[0], starts.shape[0]], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        mask = exists[:, None] & (cols < WIDTH)[None, :]
        x = tile(stream, second, x_at[:, None] + cols[None, :], mask, FORM)
        acc = product(x, rows(w_enc, starts, inside, cols, WIDTH), acc, EXACT)
    return acc


@triton.jit
def _deltas(acc, words, inside, exists, position):
    """f' - f of each token and entry: [TOKENS, ENTRIES]; words are the entries'."""
    _, lo, hi, flags, _, mul, add, low, high, bias, threshold, gain = words
    pre = acc + bias[None, :]
    f = tl.where(pre > threshold[None, :], pre, 0.0)
    applies = exists[:, None] & inside[None, :] & (lo[None, :] <= position[:, None]) & (position[:, None] < hi[None, :])
    return law(f, applies, flags[None, :], mul[None, :], add[None, :], low[None, :], high[None, :], gain[None, :])


@triton.jit
def _count(delta, words, inside, counter):
    """Count the tokens of each entry that it changes; words are the entries'."""
    many = tl.sum((delta != 0.0).to(tl.int32), axis=0)
    column = words[3] >> COUNTER
    tl.atomic_add(counter[0] + column * counter[1], many, mask=inside & (many > 0), sem="relaxed")


@triton.jit
def _add(y, delta, w_dec, starts, inside, cols, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """y + delta @ w_dec[:, cols], nearly as exact as fp32: a delta is split into two numbers of the weights' dtype."""
    d = rows(w_dec, starts, inside, cols, WIDTH)
    if EXACT:
        return tl.dot(delta, d.to(tl.float32), y, input_precision="ieee")
    if d.dtype == tl.float16:  # a delta may be larger than its numbers, and the row small
        fits = tl.minimum(LARGEST_HALF / tl.max(tl.abs(delta), axis=1), 1.0)[:, None]
        y *= fits
        delta *= fits
    high = delta.to(d.dtype)
    low = (delta - high.to(tl.float32)).to(d.dtype)
    y = tl.dot(low, d, tl.dot(high, d, y))
    return y / fits if d.dtype == tl.float16 else y


@triton.jit
def _stored(stream, second, at, y, mask, FORM: tl.constexpr):
    """Store a tile of edited tokens, which are rounded already; its squares."""
    tl.store(stream + at, y, mask=mask)
    if FORM == PAIR:
        tl.store(second + at, tl.zeros(y.shape, y.dtype), mask=mask)
    return y.to(tl.float32) * y.to(tl.float32)


@triton.jit
def _put_normed(
    second, at, y, scale, cols, mask, norm_weight, weight_offset, WIDTH: tl.constexpr, HAS_WEIGHT: tl.constexpr
):
    """Store what the norm makes of a tile; scale is that of each token."""
    z = y.to(tl.float32) * scale[:, None]
    if HAS_WEIGHT:
        gain = tl.load(norm_weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        z *= (gain + weight_offset)[None, :]
    tl.store(second + at, z, mask=mask)


@triton.jit
def _edit(
    tensors,
    norm,  # eps and offset of its weight
    words,  # the row's table, and where its entries begin and end
    tokens,  # int64 offsets in the stream, whether there is a token, and positions
    counter,  # counts of this row, and their stride
    own,  # scratch: deltas of each token and entry
    most_entries,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    AHEAD_Z: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A turn."""
    stream, second, norm_weight, w_enc, w_dec = tensors
    eps, weight_offset = norm
    entries, begin, end = words
    x_at, exists, position = tokens
    lanes = tl.arange(0, ENTRIES)
    own += tl.arange(0, TOKENS)[:, None] * most_entries + lanes[None, :]
    number_of = (end - begin) // ENTRY
    changed = tl.zeros([TOKENS], tl.int32)
    for first in range(0, number_of, ENTRIES):
        inside = first + lanes < number_of
        of_entries = unpack(entries + begin + (first + lanes) * ENTRY, inside)
        starts = of_entries[0].to(tl.int64) * WIDTH
        acc = _products(stream, second, w_enc, starts, inside, x_at, exists, WIDTH, BLOCK_K, STAGES, FORM, EXACT)
        delta = _deltas(acc, of_entries, inside, exists, position)
        _count(delta, of_entries, inside, counter)
        changed += tl.sum((delta != 0.0).to(tl.int32), axis=1)
        tl.store(own + first, delta)
    tl.debug_barrier()
    keep = changed > 0
    squares = tl.zeros([TOKENS, BLOCK_N], tl.float32)  # threads meet once
    if tl.sum(changed, axis=0) > 0:
        if number_of <= ENTRIES:
            inside = lanes < number_of
            starts = word(entries + begin + lanes * ENTRY + SLOT, inside).to(tl.int64) * WIDTH
            delta = tl.load(own)
            for start in tl.range(0, WIDTH, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                at = x_at[:, None] + cols[None, :]
                mask = keep[:, None] & (cols < WIDTH)[None, :]
                x = tile(stream, second, at, mask, FORM)
                y = _add(x.to(tl.float32), delta, w_dec, starts, inside, cols, WIDTH, EXACT)
                squares += _stored(stream, second, at, rounded(y, stream.dtype.element_ty), mask, FORM)
        else:
            for start in range(0, WIDTH, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                at = x_at[:, None] + cols[None, :]
                mask = keep[:, None] & (cols < WIDTH)[None, :]
                y = tile(stream, second, at, mask, FORM).to(tl.float32)
                for first in tl.range(0, number_of, ENTRIES, num_stages=STAGES):
                    inside = first + lanes < number_of
                    slot = word(entries + begin + (first + lanes) * ENTRY + SLOT, inside)
                    starts = slot.to(tl.int64) * WIDTH
                    y = _add(y, tl.load(own + first), w_dec, starts, inside, cols, WIDTH, EXACT)
                squares += _stored(stream, second, at, rounded(y, stream.dtype.element_ty), mask, FORM)
        if FORM == NORMED:
            tl.debug_barrier()
            scale = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)
            for start in tl.range(0, WIDTH, BLOCK_Z, num_stages=AHEAD_Z):
                cols = start + tl.arange(0, BLOCK_Z)
                at = x_at[:, None] + cols[None, :]
                mask = keep[:, None] & (cols < WIDTH)[None, :]
                y = tl.load(stream + at, mask=mask, other=0.0)
                _put_normed(second, at, y, scale, cols, mask, norm_weight, weight_offset, WIDTH, HAS_WEIGHT)
    tl.debug_barrier()


@kernel("stream", "second", "norm_weight", "table", "w_enc", "w_dec", "scratch")
def many_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    positions,  # [tokens] of each token in its request
    w_enc,  # [slots, WIDTH]
    w_dec,  # [slots, WIDTH]
    counts,  # [rows, counters] int32
    scratch,  # fp32; behind the arrivals [programs, TOKENS, most_entries]
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    most_entries,  # a multiple of ENTRIES
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program's turn
    SHARES: tl.constexpr,  # turns of an item: TILE / TOKENS
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,  # columns of the norm at once
    AHEAD_Z: tl.constexpr,  # as many of these in flight
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """A turn is TOKENS tokens: one pass makes all deltas, the second adds the decoder rows, the third is the norm."""
    if PDL:
        gdc_wait()
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    number = HEAD + SPAN * site_number
    own = scratch + PARTIALS + tl.program_id(0).to(tl.int64) * TOKENS * most_entries
    tensors = (stream, second, norm_weight, w_enc, w_dec)
    norm = (eps, weight_offset)
    lanes = tl.arange(0, TOKENS)

    for it in range(tl.program_id(0), n_items * SHARES, tl.num_programs(0)):
        item = work + 4 + (it // SHARES) * 4
        within = (it % SHARES) * TOKENS + lanes
        token = tl.load(item)
        row = tl.load(item + 1).to(tl.int64)
        position = tl.load(positions + token).to(tl.int32)
        entries = table + row * stride_table
        length = tl.load(item + 2)
        kind = tl.load(entries + number + KIND)
        if ((kind & MANY) != 0) & ((it % SHARES) * TOKENS < length):
            x_at = (token.to(tl.int64) + within) * WIDTH
            tokens = (x_at, within < length, position + within)  # they follow one another
            counter = (counts + row * stride_counts, stride_counters)
            words = (entries, tl.load(entries + number + BEGIN), tl.load(entries + number + END))
            _edit(
                *(tensors, norm, words, tokens, counter, own, most_entries),
                *(WIDTH, TOKENS, ENTRIES, BLOCK_K, BLOCK_N, BLOCK_Z, AHEAD_Z, STAGES, FORM, HAS_WEIGHT, EXACT),
            )
