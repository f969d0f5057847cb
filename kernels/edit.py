"""The Triton kernel that edits a stream in place, and its launcher. Knows tables and work lists, not who fills them."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from saesteer.kernels import layout
from saesteer.kernels.configs import EditConfig, blocks, edit_config

if TYPE_CHECKING:
    from torch import Tensor

ENTRY = tl.constexpr(layout.ENTRY)
SLOT = tl.constexpr(layout.SLOT)
GROUP_END = tl.constexpr(layout.GROUP_END)
LO = tl.constexpr(layout.LO)
HI = tl.constexpr(layout.HI)
FLAGS = tl.constexpr(layout.FLAGS)
BASE = tl.constexpr(layout.BASE)
SIZE = tl.constexpr(layout.SIZE)
TOP_K = tl.constexpr(layout.TOP_K)
MUL = tl.constexpr(layout.MUL)
ADD = tl.constexpr(layout.ADD)
LOW = tl.constexpr(layout.LOW)
HIGH = tl.constexpr(layout.HIGH)
BIAS = tl.constexpr(layout.BIAS)
THRESHOLD = tl.constexpr(layout.THRESHOLD)
GAIN = tl.constexpr(layout.GAIN)
ONLY_IF_ACTIVE = tl.constexpr(layout.ONLY_IF_ACTIVE)
TOPK = tl.constexpr(layout.TOPK)
NORMED = tl.constexpr(layout.NORMED)
PAIR = tl.constexpr(layout.PAIR)


@triton.jit
def _rows(weights, starts, want, cols, WIDTH: tl.constexpr):
    """weights[slot, cols] for each wanted slot, zeros for the others: [CHUNK, BLOCK]; starts = slot * WIDTH, int64."""
    mask = want[:, None] & (cols < WIDTH)[None, :]
    return tl.load(weights + starts[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _real(entries, inside):
    return tl.load(entries, mask=inside, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _ranks(
    x0,  # [HEAD] fp32
    x1,  # [TAIL] fp32
    pre,  # [CHUNK] fp32
    slot,  # [CHUNK] int32
    ranked,  # [CHUNK] bool: top-k entries, at least one
    base,  # [CHUNK] int32
    size,  # [CHUNK] int32
    w_enc,
    b_enc,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """rank[i] = how many features of the dictionary come before i: stronger ones, and equal ones of lower index."""
    cols0 = tl.arange(0, HEAD)
    cols1 = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    first = tl.min(tl.where(ranked, base, 2147483647), axis=0)
    last = tl.max(tl.where(ranked, base + size, 0), axis=0)
    rank = tl.zeros([CHUNK], tl.int32)
    # The same tile as the entries' own: then equal rows get equal sums, and ties are ties.
    for start in range(first, last, CHUNK):
        other = start + tl.arange(0, CHUNK)
        real = other < last
        rows = other.to(tl.int64) * WIDTH
        dots = tl.sum(_rows(w_enc, rows, real, cols0, WIDTH).to(tl.float32) * x0[None, :], axis=1)
        if TAIL > 0:
            dots += tl.sum(_rows(w_enc, rows, real, cols1, WIDTH).to(tl.float32) * x1[None, :], axis=1)
        theirs = dots + tl.load(b_enc + other, mask=real, other=0.0)
        beats = theirs[None, :] > pre[:, None]
        beats |= (theirs[None, :] == pre[:, None]) & (other[None, :] < slot[:, None])
        beats &= (other[None, :] >= base[:, None]) & (other[None, :] < (base + size)[:, None])
        beats &= other[None, :] != slot[:, None]
        rank += tl.sum(beats.to(tl.int32), axis=1)
    return rank


@triton.jit
def _chunk(
    entry,  # the chunk's first entry
    words,  # words of the group from here on
    here,  # position of the token
    x0,  # [HEAD] fp32
    x1,  # [TAIL] fp32
    w_enc,
    w_dec,
    b_enc,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_TOPK: tl.constexpr,
):
    """sum of delta * w_dec[slot] over at most CHUNK entries of one group: [HEAD], [TAIL], and how many were not 0."""
    cols0 = tl.arange(0, HEAD)
    cols1 = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    lane = tl.arange(0, CHUNK) * ENTRY
    inside = lane < words
    entry += lane
    slot = tl.load(entry + SLOT, mask=inside, other=0)
    lo = tl.load(entry + LO, mask=inside, other=0)
    hi = tl.load(entry + HI, mask=inside, other=0)
    flags = tl.load(entry + FLAGS, mask=inside, other=0)
    mul = _real(entry + MUL, inside)
    add = _real(entry + ADD, inside)
    low = _real(entry + LOW, inside)
    high = _real(entry + HIGH, inside)
    bias = _real(entry + BIAS, inside)
    threshold = _real(entry + THRESHOLD, inside)
    gain = _real(entry + GAIN, inside)

    # Entries whose window is elsewhere load no weights and add nothing.
    want = inside & (lo <= here) & (here < hi)
    starts = slot.to(tl.int64) * WIDTH
    enc0 = _rows(w_enc, starts, want, cols0, WIDTH)
    dec0 = _rows(w_dec, starts, want, cols0, WIDTH)
    if TAIL > 0:
        enc1 = _rows(w_enc, starts, want, cols1, WIDTH)
        dec1 = _rows(w_dec, starts, want, cols1, WIDTH)
    dots = tl.sum(enc0.to(tl.float32) * x0[None, :], axis=1)
    if TAIL > 0:
        dots += tl.sum(enc1.to(tl.float32) * x1[None, :], axis=1)
    pre = dots + bias
    active = pre > threshold
    if HAS_TOPK:
        ranked = want & ((flags & TOPK) != 0)
        if tl.max(ranked.to(tl.int32), axis=0) > 0:
            base = tl.load(entry + BASE, mask=inside, other=0)
            size = tl.load(entry + SIZE, mask=inside, other=0)
            k = tl.load(entry + TOP_K, mask=inside, other=0)
            rank = _ranks(x0, x1, pre, slot, ranked, base, size, w_enc, b_enc, WIDTH, HEAD, TAIL, CHUNK)
            active = active & ((rank < k) | (ranked == 0))

    f = tl.where(active, pre, 0.0)
    delta = gain * tl.minimum(tl.maximum(mul * f + add, low - f), high - f)
    skipped = ((flags & ONLY_IF_ACTIVE) != 0) & (f == 0.0)
    delta = tl.where(want & (skipped == 0), delta, 0.0)
    sum0 = tl.sum(delta[:, None] * dec0.to(tl.float32), axis=0)
    sum1 = sum0
    if TAIL > 0:
        sum1 = tl.sum(delta[:, None] * dec1.to(tl.float32), axis=0)
    return sum0, sum1, tl.sum((delta != 0.0).to(tl.int32), axis=0)


# Specialised on nothing that may differ between two calls: a variant more would compile while serving. Slices of larger
# tensors (site, norm_weight) are aligned as they come.
@triton.jit(
    do_not_specialize=["norm_weight", "site", "work", "b_enc", "eps", "weight_offset", "stride_table"],
)
def _edit_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    w_enc,  # [slots, WIDTH]
    w_dec,  # [slots, WIDTH]
    b_enc,  # [slots] fp32
    eps,
    weight_offset,
    stride_table,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_TOPK: tl.constexpr,
):
    first = tl.program_id(0)
    step = tl.num_programs(0)
    # The first item comes with the count, in one round trip: there are never more programs than places in the list.
    n_items = tl.load(work)
    item = work + 4 + first * 4
    token = tl.load(item).to(tl.int64)
    row = tl.load(item + 1).to(tl.int64)
    position = tl.load(item + 2)
    span = 1 + 2 * tl.load(site)

    cols0 = tl.arange(0, HEAD)
    cols1 = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    mask0 = cols0 < WIDTH
    mask1 = cols1 < WIDTH
    dtype: tl.constexpr = stream.dtype.element_ty

    for it in range(first, n_items, step):
        entries = table + row * stride_table
        begin = tl.load(entries + span)
        end = tl.load(entries + span + 1)
        at = token * WIDTH
        here = position
        # The next item, while this one is worked on.
        item += step * 4
        more = it + step < n_items
        token = tl.load(item, mask=more, other=0).to(tl.int64)
        row = tl.load(item + 1, mask=more, other=0).to(tl.int64)
        position = tl.load(item + 2, mask=more, other=0)
        if begin < end:
            raw0 = tl.load(stream + at + cols0, mask=mask0, other=0.0)
            if FORM == PAIR:
                addend0 = tl.load(second + at + cols0, mask=mask0, other=0.0)
                raw0 = (raw0.to(tl.float32) + addend0.to(tl.float32)).to(dtype)
            x0 = raw0.to(tl.float32)
            sum0 = tl.zeros([HEAD], tl.float32)
            x1 = x0
            sum1 = sum0
            if TAIL > 0:
                raw1 = tl.load(stream + at + cols1, mask=mask1, other=0.0)
                if FORM == PAIR:
                    addend1 = tl.load(second + at + cols1, mask=mask1, other=0.0)
                    raw1 = (raw1.to(tl.float32) + addend1.to(tl.float32)).to(dtype)
                x1 = raw1.to(tl.float32)
                sum1 = tl.zeros([TAIL], tl.float32)

            changes = 0
            c = begin
            while c < end:
                group_end = tl.load(entries + c + GROUP_END)
                # A lone clamp is the usual case, and room for more would cost it speed. Ranking needs the wide tile.
                if (c + ENTRY >= group_end) & (not HAS_TOPK):
                    one0, one1, changed = _chunk(
                        entries + c, ENTRY, here, x0, x1, w_enc, w_dec, b_enc, WIDTH, HEAD, TAIL, 1, HAS_TOPK
                    )
                else:
                    one0, one1, changed = _chunk(
                        entries + c,
                        group_end - c,
                        here,
                        x0,
                        x1,
                        w_enc,
                        w_dec,
                        b_enc,
                        WIDTH,
                        HEAD,
                        TAIL,
                        CHUNK,
                        HAS_TOPK,
                    )
                sum0 += one0
                if TAIL > 0:
                    sum1 += one1
                changes += changed

                # Never less than one entry: a table gone wrong must not hang the device.
                c = tl.maximum(tl.minimum(c + CHUNK * ENTRY, group_end), c + ENTRY)
                if c >= group_end:
                    x0 += sum0
                    sum0 = tl.zeros([HEAD], tl.float32)
                    if TAIL > 0:
                        x1 += sum1
                        sum1 = tl.zeros([TAIL], tl.float32)

            if changes > 0:
                y0 = x0.to(dtype)
                tl.store(stream + at + cols0, y0, mask=mask0)
                if TAIL > 0:
                    y1 = x1.to(dtype)
                    tl.store(stream + at + cols1, y1, mask=mask1)
                if FORM == PAIR:
                    tl.store(second + at + cols0, tl.zeros([HEAD], dtype), mask=mask0)
                    if TAIL > 0:
                        tl.store(second + at + cols1, tl.zeros([TAIL], dtype), mask=mask1)
                if FORM == NORMED:
                    z0 = y0.to(tl.float32)
                    squares = tl.sum(z0 * z0, axis=0)
                    if TAIL > 0:
                        z1 = y1.to(tl.float32)
                        squares += tl.sum(z1 * z1, axis=0)
                    scale = tl.rsqrt(squares / WIDTH + eps)
                    z0 *= scale
                    if HAS_WEIGHT:
                        z0 *= tl.load(norm_weight + cols0, mask=mask0, other=0.0).to(tl.float32) + weight_offset
                    tl.store(second + at + cols0, z0.to(dtype), mask=mask0)
                    if TAIL > 0:
                        z1 *= scale
                        if HAS_WEIGHT:
                            z1 *= tl.load(norm_weight + cols1, mask=mask1, other=0.0).to(tl.float32) + weight_offset
                        tl.store(second + at + cols1, z1.to(dtype), mask=mask1)


@cache
def _multiprocessors(device: int | None) -> int:
    """Of a CUDA device; 1 for the interpreter, which runs on CPU tensors."""
    return 1 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def edit_triton(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    table: Tensor,
    site: Tensor,
    work: Tensor,
    w_enc: Tensor,
    w_dec: Tensor,
    b_enc: Tensor,
    form: int,
    eps: float,
    weight_offset: float,
    has_topk: bool,
    config: EditConfig | None = None,
) -> None:
    """Launch the edit kernel; arguments as of the op `edit_`, checked there. `config` is for the benchmark alone.

    The grid depends on the number of tokens, the device and the config only, so a captured launch serves any work list
    of that many tokens.
    """
    tokens, width = stream.shape
    grid = min(tokens, work.shape[0] - 1)
    if grid <= 0:
        return
    config = config or edit_config(width)
    head, tail = blocks(width, config)
    grid = min(grid, _multiprocessors(stream.device.index) * config.programs)
    _edit_kernel[(grid,)](
        stream,
        second,
        norm_weight,
        table,
        site,
        work,
        w_enc,
        w_dec,
        b_enc,
        eps,
        weight_offset,
        table.stride(0),
        WIDTH=width,
        HEAD=head,
        TAIL=tail,
        CHUNK=config.chunk,
        FORM=form,
        HAS_WEIGHT=norm_weight is not None,
        HAS_TOPK=has_topk,
        num_warps=config.num_warps,
        maxnreg=config.registers,
    )
