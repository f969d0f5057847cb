"""The Triton kernel for long spans of a request's tokens with few entries: several tokens a program share its weights.

It does the rows that layout.py calls FEW. Sums are in another order than in edit.py.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.entries import (
    ADD,
    BEGIN,
    BIAS,
    COUNTER,
    END,
    ENTRY,
    FEW,
    FLAGS,
    GAIN,
    GROUP_END,
    HEAD_WORDS,
    HI,
    HIGH,
    KIND,
    LO,
    LOW,
    MATCH,
    MUL,
    NORMED,
    PAIR,
    SLOT,
    SPAN,
    THRESHOLD,
    TILE_ARGUMENTS,
    law,
    reads,
    tile,
)


@triton.jit
def _scalar(entry):
    return tl.load(entry).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=list(TILE_ARGUMENTS))
def few_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    w_enc,  # [slots, WIDTH]
    w_dec,  # [slots, WIDTH]
    counts,  # [rows, stride_counts] int32
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARES: tl.constexpr,  # of an item: TILE / TOKENS
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Each program holds TOKENS tokens and goes through the entries one by one."""
    n_items = tl.load(work)
    number = HEAD_WORDS + SPAN * tl.load(site)
    cols0 = tl.arange(0, HEAD)
    cols1 = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    inside0 = cols0 < WIDTH
    inside1 = cols1 < WIDTH
    dtype: tl.constexpr = stream.dtype.element_ty
    lanes = tl.arange(0, TOKENS)

    for it in range(tl.program_id(0), n_items * SHARES, tl.num_programs(0)):
        item = work + 4 + (it // SHARES) * 4
        within = (it % SHARES) * TOKENS + lanes
        token = tl.load(item).to(tl.int64) + within
        row = tl.load(item + 1).to(tl.int64)
        position = tl.load(item + 2) + within
        length = tl.load(item + 3)
        entries = table + row * stride_table
        begin = tl.load(entries + number + BEGIN)
        end = tl.load(entries + number + END)
        kind = tl.load(entries + number + KIND)
        if (begin < end) & ((kind & FEW) != 0) & ((it % SHARES) * TOKENS < length):
            exists = within < length
            at0 = (token * WIDTH)[:, None] + cols0[None, :]
            mask0 = exists[:, None] & inside0[None, :]
            x0 = tile(stream, second, at0, mask0, FORM).to(tl.float32)
            sum0 = tl.zeros([TOKENS, HEAD], tl.float32)
            x1 = x0
            sum1 = sum0
            if TAIL > 0:
                at1 = (token * WIDTH)[:, None] + cols1[None, :]
                mask1 = exists[:, None] & inside1[None, :]
                x1 = tile(stream, second, at1, mask1, FORM).to(tl.float32)
                sum1 = tl.zeros([TOKENS, TAIL], tl.float32)
            changed = tl.zeros([TOKENS], tl.int32)
            c = begin
            while c < end:
                entry = entries + c
                slot = tl.load(entry + SLOT).to(tl.int64) * WIDTH
                group_end = tl.load(entry + GROUP_END)
                flags = tl.load(entry + FLAGS)
                mul = _scalar(entry + MUL)
                low = _scalar(entry + LOW)
                high = _scalar(entry + HIGH)
                applies = exists & (tl.load(entry + LO) <= position) & (position < tl.load(entry + HI))
                wanted = tl.where(reads(mul, low, high, flags), WIDTH, 0)
                enc0 = tl.load(w_enc + slot + cols0, mask=cols0 < wanted, other=0.0).to(tl.float32)
                dec0 = tl.load(w_dec + slot + cols0, mask=inside0, other=0.0).to(tl.float32)
                pre = tl.sum(x0 * enc0[None, :], axis=1)
                if TAIL > 0:
                    enc1 = tl.load(w_enc + slot + cols1, mask=cols1 < wanted, other=0.0).to(tl.float32)
                    dec1 = tl.load(w_dec + slot + cols1, mask=inside1, other=0.0).to(tl.float32)
                    pre += tl.sum(x1 * enc1[None, :], axis=1)
                pre += _scalar(entry + BIAS)
                f = tl.where(pre > _scalar(entry + THRESHOLD), pre, 0.0)
                delta = law(f, applies, flags, mul, _scalar(entry + ADD), low, high, _scalar(entry + GAIN))
                hit = (delta != 0.0).to(tl.int32)
                changed += hit
                many = tl.sum(hit, axis=0)
                if many > 0:
                    tl.atomic_add(counts + row * stride_counts + (flags >> COUNTER), many, sem="relaxed")
                if (flags & MATCH) != 0:
                    squares = tl.sum(x0 * x0, axis=1)
                    if TAIL > 0:
                        squares += tl.sum(x1 * x1, axis=1)
                    delta *= tl.sqrt(squares)
                sum0 += delta[:, None] * dec0[None, :]
                if TAIL > 0:
                    sum1 += delta[:, None] * dec1[None, :]
                c += ENTRY
                if c >= group_end:
                    x0 += sum0
                    sum0 = tl.zeros([TOKENS, HEAD], tl.float32)
                    if TAIL > 0:
                        x1 += sum1
                        sum1 = tl.zeros([TOKENS, TAIL], tl.float32)

            keep = changed > 0
            mask0 = keep[:, None] & inside0[None, :]
            y0 = x0.to(dtype)
            tl.store(stream + at0, y0, mask=mask0)
            if TAIL > 0:
                mask1 = keep[:, None] & inside1[None, :]
                y1 = x1.to(dtype)
                tl.store(stream + at1, y1, mask=mask1)
            if FORM == PAIR:
                tl.store(second + at0, tl.zeros([TOKENS, HEAD], dtype), mask=mask0)
                if TAIL > 0:
                    tl.store(second + at1, tl.zeros([TOKENS, TAIL], dtype), mask=mask1)
            if FORM == NORMED:
                z0 = y0.to(tl.float32)
                squared = tl.sum(z0 * z0, axis=1)
                if TAIL > 0:
                    z1 = y1.to(tl.float32)
                    squared += tl.sum(z1 * z1, axis=1)
                scale = tl.rsqrt(squared / WIDTH + eps)
                z0 *= scale[:, None]
                if HAS_WEIGHT:
                    gain0 = tl.load(norm_weight + cols0, mask=inside0, other=0.0).to(tl.float32) + weight_offset
                    z0 *= gain0[None, :]
                tl.store(second + at0, z0.to(dtype), mask=mask0)
                if TAIL > 0:
                    z1 *= scale[:, None]
                    if HAS_WEIGHT:
                        gain1 = tl.load(norm_weight + cols1, mask=inside1, other=0.0).to(tl.float32) + weight_offset
                        z1 *= gain1[None, :]
                    tl.store(second + at1, z1.to(dtype), mask=mask1)
