"""The Triton kernel that can do every edit: one program edits a token, or several share its features.

It knows tables, work lists and the dense activations that encode.py leaves in scratch, but not who fills them.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.captured import copy
from saesteer.kernels.edit.chunk import add_chunk
from saesteer.kernels.edit.dense import reconstruct, room
from saesteer.kernels.edit.entries import items_of, kept, kernel, tile, unpack, word
from saesteer.kernels.edit.one import edit_one
from saesteer.kernels.edit.row import columns, plus, plus_shared, put, share_row, zeros
from saesteer.kernels.edit.store import dosed, gains, store
from saesteer.kernels.edit.words import (
    AFTER,
    BEFORE,
    BEGIN,
    DENSE_BASE,
    DENSE_SIZE,
    DOSE,
    END,
    ENTRY,
    FLAGS,
    GATE,
    GATED,
    GROUP_END,
    GROUPS,
    HEAD,
    HELD,
    KIND,
    LONE,
    ONE,
    PARTIALS,
    PARTS,
    READ,
    RECONSTRUCT,
    SHORT,
    SIZE,
    SPAN,
)


@triton.jit
def _item(work, it, first_item, units, span):
    """What iteration `it` works on: part, token, row, and whether this token exists.

    A unit is a place for a token in the work list. All first parts come before all second ones.
    """
    unit = it % units
    item = work + 4 + (first_item + unit // span) * 4
    within = unit % span
    token = kept(item) + within
    return it // units, token, kept(item + 1).to(tl.int64), within < kept(item + 2)


@kernel(
    *("stream", "second", "norm_weight", "table", "w_enc", "w_dec", "threshold", "b_dec", "scratch", "activations"),
    *("kept_rows", "before", "after"),
)
def edit_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    positions,  # [tokens] of each token in its request
    w_enc,  # [slots, WIDTH]
    w_dec,  # [slots, WIDTH]
    threshold,  # [slots] fp32
    b_dec,  # [dictionaries, WIDTH] fp32
    cells,  # [tokens] int32
    registers,  # [tokens, stride_registers] fp32
    kept_rows,  # [tokens, WIDTH], or None
    before,  # [tokens, WIDTH], or None
    after,  # [tokens, WIDTH], or None
    counts,  # [rows, counters] int32
    scratch,  # fp32: arrivals [PARTIALS] int32, then partials [PARTIALS, WIDTH]
    activations,  # [most_tokens, 2, room(stride_dense)] fp32, from first_token on
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    stride_dense,
    stride_registers,
    kinds,  # bits of the kinds whose rows are done here
    first_token,
    most_tokens,  # this launch does the tokens from first_token on, at most this number
    most_parts,  # most parts of one token
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row's block
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
    LISTED: tl.constexpr,
    DECODED: tl.constexpr,
    AHEAD: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_KEPT: tl.constexpr,  # whether transcoders are reconstructed from here or to here
    HAS_CAPTURES: tl.constexpr,  # whether tokens may be captured
    ROUNDS: tl.constexpr,  # whether this launch does only some of the step's tokens
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """x[token] += the deltas of its row's entries at this site, for all listed tokens; see ops.edit_.

    A program takes every num_programs-th unit: a token, or one part of a token's only group. Parts leave their sums in
    `scratch`; the part that arrives last adds them up and stores the token.
    """
    # The encoder has waited for all others. Until something is read that it makes, nobody waits for it.
    if PDL and not HAS_DENSE:
        gdc_wait()
    wide = tl.num_programs(0)  # as many as tokens, if there are programs for all parts of each
    place = tl.program_id(0)
    part = tl.program_id(1)
    first = part * wide + place
    step = wide * tl.num_programs(1)
    # The first item usually comes with the header, in one round trip.
    n_items = kept(work)
    batch_parts = kept(work + 1)
    span = kept(work + 2)
    usual = place < most_tokens
    item = work + 4 + place * 4
    token = word(item, usual)
    row = word(item + 1, usual).to(tl.int64)
    exists = True
    site_number = kept(site)
    number = HEAD + SPAN * site_number
    n_items = tl.where(site_number < 0, 0, n_items)

    first_item = 0
    if ROUNDS:
        first_item, n_items = items_of(work, n_items, first_token, most_tokens)
    units = n_items * span
    total = units * tl.minimum(batch_parts, most_parts)
    elsewhere = (units != wide) & ((part > 0) | (first >= units))
    if (first < total) & (elsewhere | (span > 1) | (place >= most_tokens) | (first_item > 0)):
        part, token, row, exists = _item(work, first, first_item, units, span)

    cols = columns(WIDTH, BLOCK)
    weights = (w_enc, w_dec)
    norm = (norm_weight, eps, weight_offset)
    arrivals = scratch.to(tl.pointer_type(tl.int32))
    partials = scratch + PARTIALS

    for it in range(first, total, step):
        entries = table + row * stride_table
        begin = kept(entries + number + BEGIN)
        site_end = kept(entries + number + END)
        end = site_end
        parts = tl.minimum(kept(entries + number + PARTS), most_parts)
        kind = kept(entries + number + KIND)
        groups = kept(entries + number + GROUPS)
        dense_base = 0
        dense_size = 0
        if HAS_DENSE:
            dense_base = kept(entries + number + DENSE_BASE)
            dense_size = kept(entries + number + DENSE_SIZE)
        # Of a lone entry, whether it is one or not: it comes with the span, in one round trip.
        lone = entries + number + ONE
        numbers = unpack(lone, True)
        source = word(lone + SIZE, True)
        here = tl.load(positions + token, mask=exists, other=0).to(tl.int32)
        place = token - first_token
        mine = (part < parts) & ((kind & kinds) != 0) & exists
        mine = mine & (place >= 0) & (place < most_tokens)
        at = token.to(tl.int64) * WIDTH
        cell = cells + token
        register = registers + token.to(tl.int64) * stride_registers
        own_kept = kept_rows + at if HAS_KEPT else kept_rows
        counter = (counts + row * stride_counts, stride_counters)
        dense = activations + place.to(tl.int64) * (2 * room(stride_dense))
        arrival = arrivals + place
        first_part = place * most_parts
        share = part
        if it + step < total:  # load the next item while this one is worked on
            part, token, row, exists = _item(work, it + step, first_item, units, span)
        if mine:
            if (kind & (LONE | SHORT)) != 0:
                one_entry = (stream, second, at, numbers, source, here, cols, weights, register, counter, norm)
                edit_one(*one_entry, WIDTH, FORM, HAS_WEIGHT)
            elif groups == 0:  # a row without entries here captures
                if HAS_CAPTURES:
                    copy(stream, second, at, cols, kind, before, after, WIDTH, FORM)
            else:
                x = [tile(stream, second, at + col, col < WIDTH, FORM).to(tl.float32) for col in cols]
                if HAS_CAPTURES:  # noqa: SIM102 (the compiler knows this one, not the next)
                    if ((kind & BEFORE) != 0) & (share == 0):
                        put(before + at, cols, x, [col < WIDTH for col in cols])
                whole = False
                if HAS_DENSE:  # the first word of the group that comes, with the stream
                    flags = word(entries + begin + FLAGS, dense_size > 0)
                    whole = (flags & (RECONSTRUCT | HELD)) == RECONSTRUCT
                change = zeros(x)
                bits = 0
                if (kind & GATED) != 0:
                    bits = tl.load(cell)
                known = bits

                changes = 0
                fresh = True
                group = begin
                c = begin
                if parts > 1:
                    each = ((end - begin) // ENTRY + parts - 1) // parts * ENTRY
                    c = begin + share * each
                    end = tl.minimum(c + each, end)
                # At least once: a part without entries of its own still has its share of a reconstruction.
                again = groups > 0
                while again:
                    group_end = end
                    if groups > 1:
                        group_end = kept(entries + c + GROUP_END)
                    entry, words = entries + c, group_end - c
                    held = (dense, dense_base, dense_size, fresh)
                    alone = False  # whether there is nothing here but a reconstruction, which is done below
                    if HAS_DENSE:
                        alone = (c >= group_end) | (whole & (c == begin) & (c + ENTRY >= group_end))
                    # A lone entry is the usual case; room for more would slow it down.
                    if (c + ENTRY >= group_end) & (dense_size == 0):
                        one, changed, bits = add_chunk(
                            entry,
                            words,
                            here,
                            bits,
                            x,
                            cols,
                            weights,
                            own_kept,
                            held,
                            counter,
                            register,
                            WIDTH,
                            1,
                            False,
                            HAS_NORMS,
                            HAS_KEPT,
                            PDL,
                        )
                    elif alone:
                        one = zeros(x)
                        changed = tl.full([], 0, tl.int32)
                    else:
                        one, changed, bits = add_chunk(
                            entry,
                            words,
                            here,
                            bits,
                            x,
                            cols,
                            weights,
                            own_kept,
                            held,
                            counter,
                            register,
                            WIDTH,
                            CHUNK,
                            HAS_DENSE,
                            HAS_NORMS,
                            HAS_KEPT,
                            PDL,
                        )
                    change = plus(change, one)
                    changes += changed

                    # At least one entry further: a corrupt table must not hang the device.
                    c = tl.maximum(tl.minimum(c + CHUNK * ENTRY, group_end), c + ENTRY)
                    again = c < end
                    if c >= group_end:
                        if HAS_DENSE:
                            if fresh & (dense_size > 0):
                                one, changed, its_flags = reconstruct(
                                    entries,
                                    group,
                                    tl.where(parts > 1, site_end, group_end),
                                    here,
                                    bits,
                                    register,
                                    x,
                                    cols,
                                    w_dec,
                                    threshold,
                                    b_dec,
                                    dense,
                                    dense_base,
                                    dense_size,
                                    stride_dense,
                                    counter,
                                    share,
                                    parts,
                                    WIDTH,
                                    LISTED,
                                    DECODED,
                                    AHEAD,
                                    HAS_NORMS,
                                    PDL,
                                )
                                if HAS_KEPT:
                                    if ((its_flags & READ) != 0) & (parts == 1):
                                        put(own_kept, cols, plus(x, one), [col < WIDTH for col in cols])
                                        one = zeros(x)
                                    changed = tl.where((its_flags & READ) != 0, 0, changed)
                                change = plus(change, one)
                                changes += changed
                            fresh = fresh & ((kept(entries + group + FLAGS) & (GATE | READ)) != 0)
                            group = c
                        if parts == 1:
                            x = plus(x, change)
                            change = zeros(x)

                if bits != known:
                    tl.store(cell, bits)
                if parts > 1:
                    # The last part to arrive adds all of them up in order, so the sum does not depend on who is last.
                    mine_at = partials + (first_part + share).to(tl.int64) * WIDTH
                    share_row(mine_at, change, WIDTH, BLOCK)
                    tl.debug_barrier()
                    coming = tl.where(changes > 0, 65537, 1)
                    arrived = tl.atomic_add(arrival, coming, sem="acq_rel") + coming
                    changes = 0
                    if (arrived & 65535) == parts:
                        changes = arrived >> 16
                        tl.store(arrival, 0)
                        for p in range(0, parts, GATHER * CHUNK):
                            for some in tl.static_range(0, GATHER * CHUNK, CHUNK):
                                these = p + some + tl.arange(0, CHUNK)
                                starts = (first_part + these).to(tl.int64) * WIDTH
                                x = plus_shared(x, partials, starts, these < parts, WIDTH, BLOCK)
                        if HAS_KEPT:  # noqa: SIM102 (the compiler knows this one, not the next)
                            if (kept(entries + begin + FLAGS) & (READ | RECONSTRUCT)) == (READ | RECONSTRUCT):
                                put(own_kept, cols, x, [col < WIDTH for col in cols])

                # Neither these sums nor those in `store` stand behind `changes > 0`; `store` says why.
                if (kind >> DOSE) != 0:
                    x = dosed(stream, second, at, x, cols, changes, entries, kind >> DOSE, counter, WIDTH, FORM)
                factors = gains(norm, cols, WIDTH, FORM, HAS_WEIGHT)
                store(stream, second, at, x, cols, changes > 0, norm, factors, WIDTH, FORM, HAS_WEIGHT)
                if HAS_CAPTURES:  # noqa: SIM102
                    if (kind & AFTER) != 0:
                        tl.debug_barrier()  # a thread may read what another one has stored
                        x = [tile(stream, second, at + col, col < WIDTH, FORM).to(tl.float32) for col in cols]
                        put(after + at, cols, x, [col < WIDTH for col in cols])
    if PDL and HAS_DENSE:
        gdc_wait()  # the kernel behind this one relies on both
