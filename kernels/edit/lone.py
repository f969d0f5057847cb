"""The Triton kernel for long spans of tokens with a single entry: they stream past weights held in registers.

It does the rows that layout.py calls LONE. It sums in another order than edit.py.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton.language as tl

from saesteer.kernels.edit.entries import kernel, law, reads, rounded, tile, unpack
from saesteer.kernels.edit.row import columns
from saesteer.kernels.edit.words import BEGIN, COUNTER, HEAD_WORDS, KIND, LONE, MATCH, NORMED, PAIR, SPAN


@kernel("stream", "second", "table", "w_enc", "w_dec")
def lone_kernel(
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
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program's turn
    LEAST: tl.constexpr,  # of a turn when there are few items
    SHARES: tl.constexpr,  # turns of an item: TILE / TOKENS, more when there are few items
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """x[token] += the delta of its row's only entry at this site. A program takes TOKENS tokens of an item per turn."""
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    number = HEAD_WORDS + SPAN * site_number
    cols = columns(HEAD, TAIL)
    cols0 = cols[0]
    inside0 = cols0 < WIDTH
    if TAIL > 0:
        cols1 = cols[1]
        inside1 = cols1 < WIDTH
    dtype: tl.constexpr = stream.dtype.element_ty
    if FORM == NORMED and HAS_WEIGHT:
        gain0 = tl.load(norm_weight + cols0, mask=inside0, other=0.0)
        if TAIL > 0:
            gain1 = tl.load(norm_weight + cols1, mask=inside1, other=0.0)

    # So many tokens per turn that every program has work.
    turn = TOKENS
    shares = SHARES
    if n_items * SHARES * 2 < tl.num_programs(0):
        turn = LEAST
        shares = SHARES * (TOKENS // LEAST)
    for it in range(tl.program_id(0), n_items * shares, tl.num_programs(0)):
        item = work + 4 + (it // shares) * 4
        first = (it % shares) * turn
        first_token = tl.load(item).to(tl.int64)
        row = tl.load(item + 1).to(tl.int64)
        length = tl.load(item + 2)
        entries = table + row * stride_table
        begin = tl.load(entries + number + BEGIN)
        kind = tl.load(entries + number + KIND)
        if ((kind & LONE) != 0) & (first < length):
            first_position = tl.load(positions + first_token).to(tl.int32)  # the others follow it
            entry = entries + begin
            slot, lo, hi, flags, _, mul, add, low, high, bias, threshold, gain = unpack(entry, True)
            slot = slot.to(tl.int64) * WIDTH
            wanted = tl.where(reads(mul, low, high, flags), WIDTH, 0)
            enc0 = tl.load(w_enc + slot + cols0, mask=cols0 < wanted, other=0.0)
            dec0 = tl.load(w_dec + slot + cols0, mask=inside0, other=0.0)
            if TAIL > 0:
                enc1 = tl.load(w_enc + slot + cols1, mask=cols1 < wanted, other=0.0)
                dec1 = tl.load(w_dec + slot + cols1, mask=inside1, other=0.0)
            hits = tl.zeros([AT_ONCE], tl.int32)
            for done in tl.range(0, turn, AT_ONCE, num_stages=STAGES):
                within = first + done + tl.arange(0, AT_ONCE)
                exists = within < length
                at0 = ((first_token + within) * WIDTH)[:, None] + cols0[None, :]
                x0 = tile(stream, second, at0, exists[:, None] & inside0[None, :], FORM).to(tl.float32)
                pre = tl.sum(x0 * enc0.to(tl.float32)[None, :], axis=1)
                if TAIL > 0:
                    at1 = ((first_token + within) * WIDTH)[:, None] + cols1[None, :]
                    x1 = tile(stream, second, at1, exists[:, None] & inside1[None, :], FORM).to(tl.float32)
                    pre += tl.sum(x1 * enc1.to(tl.float32)[None, :], axis=1)
                pre += bias
                f = tl.where(pre > threshold, pre, 0.0)
                position = first_position + within
                applies = exists & (lo <= position) & (position < hi)
                delta = law(f, applies, flags, mul, add, low, high, gain)
                keep = delta != 0.0
                hits += keep.to(tl.int32)
                if (flags & MATCH) != 0:
                    squares = tl.sum(x0 * x0, axis=1)
                    if TAIL > 0:
                        squares += tl.sum(x1 * x1, axis=1)
                    delta *= tl.sqrt(squares)
                mask0 = keep[:, None] & inside0[None, :]
                y0 = rounded(x0 + delta[:, None] * dec0.to(tl.float32)[None, :], dtype)
                tl.store(stream + at0, y0, mask=mask0)
                if TAIL > 0:
                    mask1 = keep[:, None] & inside1[None, :]
                    y1 = rounded(x1 + delta[:, None] * dec1.to(tl.float32)[None, :], dtype)
                    tl.store(stream + at1, y1, mask=mask1)
                if FORM == PAIR:
                    tl.store(second + at0, tl.zeros([AT_ONCE, HEAD], dtype), mask=mask0)
                    if TAIL > 0:
                        tl.store(second + at1, tl.zeros([AT_ONCE, TAIL], dtype), mask=mask1)
                if FORM == NORMED:
                    z0 = y0.to(tl.float32)
                    squared = tl.sum(z0 * z0, axis=1)
                    if TAIL > 0:
                        z1 = y1.to(tl.float32)
                        squared += tl.sum(z1 * z1, axis=1)
                    scale = tl.rsqrt(squared / WIDTH + eps)
                    z0 *= scale[:, None]
                    if HAS_WEIGHT:
                        z0 *= (gain0.to(tl.float32) + weight_offset)[None, :]
                    tl.store(second + at0, z0.to(dtype), mask=mask0)
                    if TAIL > 0:
                        z1 *= scale[:, None]
                        if HAS_WEIGHT:
                            z1 *= (gain1.to(tl.float32) + weight_offset)[None, :]
                        tl.store(second + at1, z1.to(dtype), mask=mask1)
            many = tl.sum(hits, axis=0)
            if many > 0:
                counter = counts + row * stride_counts + (flags >> COUNTER) * stride_counters
                tl.atomic_add(counter, many, sem="relaxed")
