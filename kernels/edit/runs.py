"""The Triton kernel for neighbours with many entries in short steps, whose items are single tokens: programs in groups.

A few turns of 16 tokens leave most of the device idle. So the programs of a group share each turn, every one with some
columns of the token. They meet twice: where the products of all columns are added up, and where the squares are.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# (a jitted function's arguments have no Python types, and its tuples grow)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.entries import kernel, product, rounded, rows, tile, unpack
from saesteer.kernels.edit.many import add, count, deltas, put_normed, stored
from saesteer.kernels.edit.words import BEGIN, END, ENTRY, HEAD, KIND, LEFT, MANY, NORMED, PARTIALS, PARTS, SPAN

SEARCHED = tl.constexpr(512)  # items of the list that are searched at once


@triton.jit
def _run(work, n_items, it, position, TOKENS: tl.constexpr):
    """Which tokens from item `it` on are a turn that begins there."""
    lanes = tl.arange(0, TOKENS)
    rows = work + 4 + it * 4 + 1
    those = tl.load(rows + lanes * 4, mask=it + lanes < n_items, other=0)
    return (those == tl.load(rows)) & (lanes < TOKENS - position % TOKENS)


@triton.jit
def _begins(work, table, positions, stride_table, number, first, n_items, TOKENS: tl.constexpr):
    """From item `first` on: the number of the turn that begins at each item, -1 where none does, how many do, and how
    many items are no turn's.

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
    mine = inside & ((tl.load(here + KIND, mask=inside, other=0) & MANY) != 0)
    mine = mine & (tl.load(here + PARTS, mask=inside, other=0) > 1)
    begins = (mine & ((row != before) | (position % TOKENS == 0))).to(tl.int32)
    left = tl.sum((inside & (mine == 0)).to(tl.int32), axis=0)
    return tl.where(begins > 0, tl.cumsum(begins, axis=0) - 1, -1), tl.sum(begins, axis=0), left


@triton.jit
def _meet(arrivals, came, SLICES: tl.constexpr):
    """Wait until all programs of the group have stored what they share; how often they have arrived by now."""
    came += SLICES
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    while arrived < came:
        arrived = tl.atomic_add(arrivals, 0, sem="acquire")
    return came


@triton.jit
def _columns(first, size: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of each block of a slice, whose first is `first`."""
    cols = ()
    for start in tl.static_range(0, size, BLOCK):
        cols = cols + (first + start + tl.arange(0, BLOCK),)  # noqa: RUF005
    return cols


@triton.jit
def _tiles(stream, second, places, masks, FORM: tl.constexpr):
    """The stream at each block's places."""
    found = ()
    for block in tl.static_range(len(places)):
        found = found + (tile(stream, second, places[block], masks[block], FORM),)  # noqa: RUF005
    return found


@triton.jit
def _encoded(x, cols, w_enc, starts, inside, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """x . w_enc[slot] over these columns for each token and entry: [TOKENS, ENTRIES]."""
    acc = tl.zeros([x[0].shape[0], starts.shape[0]], tl.float32)
    for block in tl.static_range(len(cols)):
        acc = product(x[block], rows(w_enc, starts, inside, cols[block], WIDTH), acc, EXACT)
    return acc


@triton.jit
def _decoded(y, cols, delta, w_dec, starts, inside, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """y + delta @ w_dec of these columns."""
    found = ()
    for block in tl.static_range(len(cols)):
        found = found + (add(y[block], delta, w_dec, starts, inside, cols[block], WIDTH, EXACT),)  # noqa: RUF005
    return found


@triton.jit
def _edit(
    tensors,
    norm,  # eps and offset of its weight
    words,  # the row's table, and where its entries begin and end
    tokens,  # int64 offsets in the stream, whether there is a token, and positions
    counter,  # counts of this row, and their stride
    shared,  # scratch: this turn's products, the group's squares, its arrivals; how many came, and which slice this is
    most_entries,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """This slice of a turn; how often its programs have arrived by now."""
    stream, second, norm_weight, w_enc, w_dec = tensors
    eps, weight_offset = norm
    entries, begin, end = words
    x_at, exists, position = tokens
    products, squares, arrivals, came, share = shared
    lanes = tl.arange(0, ENTRIES)
    token = tl.arange(0, TOKENS)
    number_of = (end - begin) // ENTRY
    size: tl.constexpr = (WIDTH + SLICES * BLOCK - 1) // (SLICES * BLOCK) * BLOCK  # columns of a slice
    cols = _columns(share * size, size, BLOCK)
    there = [exists[:, None] & (col < WIDTH)[None, :] for col in cols]
    places = [x_at[:, None] + col[None, :] for col in cols]
    x = _tiles(stream, second, places, there, FORM)
    here = products + token[:, None] * most_entries + lanes[None, :]
    of_slice = TOKENS * most_entries  # words of products
    for first in range(0, number_of, ENTRIES):
        inside = first + lanes < number_of
        slot = unpack(entries + begin + (first + lanes) * ENTRY, inside)[0]
        starts = slot.to(tl.int64) * WIDTH
        acc = _encoded(x, cols, w_enc, starts, inside, WIDTH, EXACT)
        tl.store(here + first + share * of_slice, acc, cache_modifier=".cg")
    came = _meet(arrivals, came, SLICES)
    y = [part.to(tl.float32) for part in x]
    changed = tl.zeros([TOKENS], tl.int32)
    for first in range(0, number_of, ENTRIES):
        inside = first + lanes < number_of
        of_entries = unpack(entries + begin + (first + lanes) * ENTRY, inside)
        starts = of_entries[0].to(tl.int64) * WIDTH
        acc = tl.zeros([TOKENS, ENTRIES], tl.float32)
        for other in tl.static_range(SLICES):
            acc += tl.load(here + first + other * of_slice, cache_modifier=".cg")
        delta = deltas(acc, of_entries, inside, exists, position)
        if share == 0:
            count(delta, of_entries, inside, counter)
        changed += tl.sum((delta != 0.0).to(tl.int32), axis=1)
        y = _decoded(y, cols, delta, w_dec, starts, inside, WIDTH, EXACT)
    keep = changed > 0
    y = [rounded(part, stream.dtype.element_ty) for part in y]
    masks = [keep[:, None] & (col < WIDTH)[None, :] for col in cols]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for block in tl.static_range(len(cols)):
        total += stored(stream, second, places[block], y[block], masks[block], FORM)
    if FORM == NORMED:
        tl.store(squares + share * TOKENS + token, tl.sum(total, axis=1), cache_modifier=".cg")
        came = _meet(arrivals, came, SLICES)
        square = tl.zeros([TOKENS], tl.float32)
        for other in tl.static_range(SLICES):
            square += tl.load(squares + other * TOKENS + token, cache_modifier=".cg")
        scale = tl.rsqrt(square / WIDTH + eps)
        for block in tl.static_range(len(cols)):
            tile_of = (places[block], y[block], scale, cols[block], masks[block])
            put_normed(second, *tile_of, norm_weight, weight_offset, WIDTH, HAS_WEIGHT)
    return came


@kernel("stream", "second", "norm_weight", "table", "w_enc", "w_dec", "scratch")
def runs_kernel(
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
    scratch,  # fp32; behind the arrivals of groups [groups, 2, SLICES, TOKENS, most_entries], [groups, SLICES, TOKENS]
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    most_entries,  # a multiple of ENTRIES
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,  # of a turn, neighbours of a row
    SLICES: tl.constexpr,  # programs of a group
    ENTRIES: tl.constexpr,  # at once
    BLOCK: tl.constexpr,  # columns at once
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """x[token] += the deltas of its row's entries at this site, for rows that are MANY and have PARTS; see ops.edit_.

    Programs of a group are neighbours and wait for each other, so all of the launch must run at once: the host starts
    at most one on each multiprocessor. A group goes from turn to turn together. So where one turn's products are read,
    the next turn's are stored elsewhere, and behind the next meeting nobody reads the former any more. The edit kernel
    behind does what is left, and is told how much that is.
    """
    if PDL:
        gdc_wait()
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    number = HEAD + SPAN * site_number
    groups = tl.num_programs(0) // SLICES
    group = tl.program_id(0) // SLICES
    share = tl.program_id(0) % SLICES
    size = SLICES * TOKENS * most_entries
    own = scratch + PARTIALS + group.to(tl.int64) * (2 * size)
    squares = scratch + PARTIALS + groups.to(tl.int64) * (2 * size) + group * (SLICES * TOKENS)
    arrivals = scratch.to(tl.pointer_type(tl.int32)) + group
    tensors = (stream, second, norm_weight, w_enc, w_dec)
    norm = (eps, weight_offset)
    lanes = tl.arange(0, TOKENS)
    left = n_items
    if tl.load(work + 1) > 1:  # or nobody has enough entries
        left = 0
        came = 0
        done = 0
        parity = 0
        for first in range(0, n_items, SEARCHED):
            order, here, others = _begins(work, table, positions, stride_table, number, first, n_items, TOKENS)
            for turn in range((group + groups - done % groups) % groups, here, groups):
                it = first + tl.sum(tl.where(order == turn, tl.arange(0, SEARCHED), 0), axis=0)
                token = tl.load(work + 4 + it * 4)
                row = tl.load(work + 4 + it * 4 + 1).to(tl.int64)
                position = tl.load(positions + token).to(tl.int32)
                entries = table + row * stride_table
                x_at = (token.to(tl.int64) + lanes) * WIDTH
                tokens = (x_at, _run(work, n_items, it, position, TOKENS), position + lanes)
                counter = (counts + row * stride_counts, stride_counters)
                words = (entries, tl.load(entries + number + BEGIN), tl.load(entries + number + END))
                shared = (own + parity * size, squares, arrivals, came, share)
                came = _edit(
                    *(tensors, norm, words, tokens, counter, shared, most_entries),
                    *(WIDTH, TOKENS, SLICES, ENTRIES, BLOCK, FORM, HAS_WEIGHT, EXACT),
                )
                parity = 1 - parity
            done += here
            left += others
        if came > 0:  # the last one to leave
            tl.debug_barrier()
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == came + SLICES - 1:
                tl.store(arrivals, 0)
    if tl.program_id(0) == 0:
        tl.store(scratch.to(tl.pointer_type(tl.int32)) + LEFT, left)
