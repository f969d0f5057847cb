"""The Triton kernel for spans of tokens with many entries: matrix products on tensor cores.

It does the rows that layout.py calls MANY, in steps of more than a few tokens. It sums in another order than edit.py.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.entries import kernel, law, rounded, tile, unpack, word
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
    PARTS,
    SLOT,
    SPAN,
)

SEARCHED = tl.constexpr(512)  # items of a list of single tokens that are searched at once


@triton.jit
def _products(
    stream,
    second,
    w_enc,
    starts,  # [ENTRIES] int64 offsets in w_enc
    inside,  # [ENTRIES] whether the entry exists
    x_at,  # [TOKENS] int64 offsets in the stream
    exists,  # [TOKENS] whether there is a token
    begin,  # columns
    end,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x . w_enc[slot] over these columns for each token and entry: [TOKENS, ENTRIES]."""
    acc = tl.zeros([x_at.shape[0], starts.shape[0]], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        real_cols = (cols < end)[None, :]
        x = tile(stream, second, x_at[:, None] + cols[None, :], exists[:, None] & real_cols, FORM)
        e = tl.load(w_enc + starts[:, None] + cols[None, :], mask=inside[:, None] & real_cols, other=0.0)
        if EXACT:
            acc = tl.dot(x.to(tl.float32), tl.trans(e.to(tl.float32)), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(e), acc)
    return acc


@triton.jit
def _deltas(acc, words, inside, exists, position, counter):
    """f' - f of each token and entry: [TOKENS, ENTRIES]; words are the entries'. Counts the tokens."""
    _, lo, hi, flags, _, mul, add, low, high, bias, threshold, gain = words
    pre = acc + bias[None, :]
    f = tl.where(pre > threshold[None, :], pre, 0.0)
    applies = exists[:, None] & inside[None, :] & (lo[None, :] <= position[:, None]) & (position[:, None] < hi[None, :])
    delta = law(f, applies, flags[None, :], mul[None, :], add[None, :], low[None, :], high[None, :], gain[None, :])
    many = tl.sum((delta != 0.0).to(tl.int32), axis=0)
    tl.atomic_add(counter[0] + (flags >> COUNTER) * counter[1], many, mask=inside & (many > 0), sem="relaxed")
    return delta


@triton.jit
def _met(acc, mine, others, arrival, SLICES: tl.constexpr):
    """The sum of all slices' products in order, and whether this program is the last of them, which alone has it."""
    tl.store(mine, acc, cache_modifier=".cg")
    tl.debug_barrier()
    last = tl.atomic_add(arrival, 1, sem="acq_rel") == SLICES - 1
    if last:
        tl.store(arrival, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for at in tl.static_range(SLICES):
            acc += tl.load(others + at * (acc.shape[0] * acc.shape[1]), cache_modifier=".cg")
    return acc, last


@triton.jit
def _add(y, delta, w_dec, starts, inside, cols, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """y + delta @ w_dec[:, cols], nearly as exact as fp32: a delta is split into two numbers of the weights' dtype."""
    d = tl.load(w_dec + starts[:, None] + cols[None, :], mask=inside[:, None] & (cols < WIDTH)[None, :], other=0.0)
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
    """Store a tile of edited tokens; its squares."""
    y = rounded(y, stream.dtype.element_ty)
    tl.store(stream + at, y, mask=mask)
    if FORM == PAIR:
        tl.store(second + at, tl.zeros(y.shape, y.dtype), mask=mask)
    return y.to(tl.float32) * y.to(tl.float32)


@triton.jit
def _run(work, n_items, it, position, TOKENS: tl.constexpr):
    """Which tokens from item `it` on are a turn that begins there, in a list of single tokens."""
    lanes = tl.arange(0, TOKENS)
    rows = work + 4 + it * 4 + 1
    those = tl.load(rows + lanes * 4, mask=it + lanes < n_items, other=0)
    return (those == tl.load(rows)) & (lanes < TOKENS - position % TOKENS)


@triton.jit
def _begins(work, table, positions, stride_table, number, first, n_items, TOKENS: tl.constexpr):
    """From item `first` on: the number of the turn that begins at each item, -1 where none does, and how many do.

    A row's neighbours are cut where the position is a multiple of TOKENS, so each program finds all turns by itself.
    Rows without PARTS have none.
    """
    at = first + tl.arange(0, SEARCHED)
    item = work + 4 + at * 4
    inside = at < n_items
    token = tl.load(item, mask=inside, other=0)
    row = tl.load(item + 1, mask=inside, other=0)
    before = tl.load(item - 3, mask=inside & (at > 0), other=0)  # row 0 is nobody's
    position = tl.load(positions + token, mask=inside, other=0)
    here = table + row.to(tl.int64) * stride_table + number
    begins = inside & ((row != before) | (position % TOKENS == 0))
    begins = begins & ((tl.load(here + KIND, mask=inside, other=0) & MANY) != 0)
    begins = (begins & (tl.load(here + PARTS, mask=inside, other=0) > 1)).to(tl.int32)
    return tl.where(begins > 0, tl.cumsum(begins, axis=0) - 1, -1), tl.sum(begins, axis=0)


@triton.jit
def _edit(
    tensors,
    norm,  # eps and offset of its weight
    words,  # the row's table, and where its entries begin and end
    tokens,  # int64 offsets in the stream, whether there is a token, and positions
    counter,  # counts of this row, and their stride
    shared,  # scratch: for deltas, for products of the turn's slices, its arrivals; and which slice this is
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A turn, or its share of it."""
    stream, second, norm_weight, w_enc, w_dec = tensors
    eps, weight_offset = norm
    entries, begin, end = words
    x_at, exists, position = tokens
    deltas, most_entries, products, arrival, share = shared
    lanes = tl.arange(0, ENTRIES)
    own = deltas + tl.arange(0, TOKENS)[:, None] * most_entries + lanes[None, :]
    number_of = (end - begin) // ENTRY
    changed = tl.zeros([TOKENS], tl.int32)
    columns_of: tl.constexpr = (WIDTH + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K) * BLOCK_K
    from_column = 0
    to_column = WIDTH
    mine = number_of
    if SLICES > 1:
        if number_of <= ENTRIES:
            from_column = share * columns_of
            to_column = tl.minimum(from_column + columns_of, WIDTH)
        else:  # they have no room to meet
            mine = tl.where(share == 0, number_of, 0)
    for first in range(0, mine, ENTRIES):
        inside = first + lanes < number_of
        of_entries = unpack(entries + begin + (first + lanes) * ENTRY, inside)
        starts = of_entries[0].to(tl.int64) * WIDTH
        acc = _products(
            stream, second, w_enc, starts, inside, x_at, exists, from_column, to_column, BLOCK_K, STAGES, FORM, EXACT
        )
        last = True
        if SLICES > 1:  # noqa: SIM102 (the compiler knows this one, not the next)
            if number_of <= ENTRIES:
                at = tl.arange(0, TOKENS)[:, None] * ENTRIES + lanes[None, :]
                acc, last = _met(acc, products + share * TOKENS * ENTRIES + at, products + at, arrival, SLICES)
        if last:
            delta = _deltas(acc, of_entries, inside, exists, position, counter)
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
                squares += _stored(stream, second, at, y, mask, FORM)
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
                squares += _stored(stream, second, at, y, mask, FORM)
        if FORM == NORMED:
            tl.debug_barrier()
            scale = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)
            for start in range(0, WIDTH, BLOCK_Z):
                cols = start + tl.arange(0, BLOCK_Z)
                at = x_at[:, None] + cols[None, :]
                mask = keep[:, None] & (cols < WIDTH)[None, :]
                z = tl.load(stream + at, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
                if HAS_WEIGHT:
                    gain = tl.load(norm_weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
                    z *= (gain + weight_offset)[None, :]
                tl.store(second + at, z, mask=mask)
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
    scratch,  # fp32; behind the arrivals [programs, TOKENS, most_entries], then [turns, SLICES, TOKENS, ENTRIES]
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    most_entries,  # a multiple of ENTRIES
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program's turn
    # Turns of an item: TILE / TOKENS. 0: items are single tokens, a turn is some neighbours, and rows without PARTS are
    # done elsewhere, so that the list's head says whether there is anything to do.
    SHARES: tl.constexpr,
    SLICES: tl.constexpr,  # programs that encode a turn together, each some columns
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Z: tl.constexpr,  # columns of the norm at once
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """A turn is TOKENS tokens: one pass makes all deltas, the second adds the decoder rows, the third is the norm.

    Few turns leave most of the device idle, and a program's bandwidth bounds it. So SLICES programs share the first
    pass of a turn; the one that arrives last does the others. Programs of a turn are neighbours, and none waits.
    """
    if PDL:
        gdc_wait()
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    number = HEAD + SPAN * site_number
    size: tl.constexpr = TOKENS * ENTRIES
    deltas = scratch + PARTIALS + tl.program_id(0).to(tl.int64) * TOKENS * most_entries
    products = scratch + PARTIALS + tl.num_programs(0).to(tl.int64) * TOKENS * most_entries
    arrivals = scratch.to(tl.pointer_type(tl.int32))
    tensors = (stream, second, norm_weight, w_enc, w_dec)
    norm = (eps, weight_offset)
    lanes = tl.arange(0, TOKENS)

    if SHARES > 0:
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
                shared = (deltas, most_entries, deltas, arrivals, 0)
                _edit(
                    *(tensors, norm, words, tokens, counter, shared),
                    *(WIDTH, TOKENS, 1, ENTRIES, BLOCK_K, BLOCK_N, BLOCK_Z, STAGES, FORM, HAS_WEIGHT, EXACT),
                )
    elif tl.load(work + 1) > 1:  # or nobody has enough entries
        groups = tl.num_programs(0) // SLICES
        share = tl.program_id(0) % SLICES
        done = 0
        for first in range(0, n_items, SEARCHED):
            order, here = _begins(work, table, positions, stride_table, number, first, n_items, TOKENS)
            for turn in range((tl.program_id(0) // SLICES + groups - done % groups) % groups, here, groups):
                it = first + tl.sum(tl.where(order == turn, tl.arange(0, SEARCHED), 0), axis=0)
                token = tl.load(work + 4 + it * 4)
                row = tl.load(work + 4 + it * 4 + 1).to(tl.int64)
                position = tl.load(positions + token).to(tl.int32)
                entries = table + row * stride_table
                x_at = (token.to(tl.int64) + lanes) * WIDTH
                tokens = (x_at, _run(work, n_items, it, position, TOKENS), position + lanes)
                counter = (counts + row * stride_counts, stride_counters)
                words = (entries, tl.load(entries + number + BEGIN), tl.load(entries + number + END))
                shared = (deltas, most_entries, products + (done + turn) * SLICES * size, arrivals + done + turn, share)
                _edit(
                    *(tensors, norm, words, tokens, counter, shared),
                    *(WIDTH, TOKENS, SLICES, ENTRIES, BLOCK_K, BLOCK_N, BLOCK_Z, STAGES, FORM, HAS_WEIGHT, EXACT),
                )
            done += here
