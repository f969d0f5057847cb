"""Kernels that do only what no kernel for the same case can leave out. Knows no tables of ours and no clocks.

Each has its numbers as arguments or constants instead of entries, and one law: f is raised to RAISED. A program that
needs what others find waits for it: each number travels in one 64-bit word with the launch's tag, so whoever reads the
right tag has the number, and neither fences nor counters stand between the two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, unreachable"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.row import columns, plus, put, times, total

RAISED = tl.constexpr(3.0)


@triton.jit
def _follow(start, list_, HOPS: tl.constexpr):
    """What a list says of `start`, then of that, and so on: loads that wait for one another, as list and entry."""
    at = start
    for _ in tl.static_range(HOPS):
        at = tl.load(list_ + at, eviction_policy="evict_last")
    return at


@triton.jit
def one_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], its norm
    norm_weight,  # [WIDTH]
    list_,  # [rows] int32: each number's successor; what is found last is a row of the weights
    w_enc,  # [rows, WIDTH]
    w_dec,  # [rows, WIDTH]
    first,  # row of token 0, if all hops are identities
    gain,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # 256 a warp
    HOPS: tl.constexpr,
    ENCODES: tl.constexpr,  # else the row is just added
    ABSENT: tl.constexpr,  # a kernel that finds nothing to do behind its hops
):
    """A token for each program: one row of weights is added, with a dot product of another first, then the norm."""
    gdc_wait()
    token = tl.program_id(0)
    row = _follow(first + token, list_, HOPS)
    if ABSENT:  # noqa: SIM102 (the compiler knows this one, not the next)
        if row >= 0:
            return
    cols = columns(WIDTH, BLOCK)
    masks = [col < WIDTH for col in cols]
    at = token.to(tl.int64) * WIDTH
    x = [tl.load(stream + at + col, mask=col < WIDTH, other=0.0).to(tl.float32) for col in cols]
    place = row.to(tl.int64) * WIDTH
    if ENCODES:
        encoder = [tl.load(w_enc + place + col, mask=col < WIDTH, other=0.0) for col in cols]
    decoder = [tl.load(w_dec + place + col, mask=col < WIDTH, other=0.0) for col in cols]
    factors = [tl.load(norm_weight + col, mask=col < WIDTH, other=0.0) for col in cols]
    delta = gain * RAISED
    if ENCODES:
        dot = tl.sum(total(times(x, [block.to(tl.float32) for block in encoder])), axis=0)
        delta = gain * (RAISED - tl.maximum(dot, 0.0))
    y = [block.to(stream.dtype.element_ty) for block in plus(x, [delta * block.to(tl.float32) for block in decoder])]
    put(stream + at, cols, y, masks)
    z = [block.to(tl.float32) for block in y]
    scale = tl.rsqrt(tl.sum(total(times(z, z)), axis=0) / WIDTH + eps)
    put(
        second + at,
        cols,
        times([block * scale for block in z], [block.to(tl.float32) + 1.0 for block in factors]),
        masks,
    )


@triton.jit
def _tag(count, SHARES: tl.constexpr):
    """The number of this launch, which all programs of a place know alike: each counts when it leaves."""
    return (tl.load(count, volatile=True) // SHARES).to(tl.int32) + 1


@triton.jit
def _tell(place, value, tag):
    """Store a float32 with the launch's tag for whoever waits for it."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(place, bits | (tag.to(tl.int64) << 32), cache_modifier=".cg")


@triton.jit
def _hear(place, tag, SHARES: tl.constexpr, STRIDE: tl.constexpr):
    """The sum, in order, of what all shares tell there."""
    total = tl.zeros(place.shape, tl.float32)
    late = 1
    while late > 0:
        total = tl.zeros(place.shape, tl.float32)
        wrong = tl.zeros(place.shape, tl.int32)
        for share in tl.static_range(SHARES):
            word = tl.load(place + share * STRIDE, volatile=True)
            wrong |= (word >> 32).to(tl.int32) ^ tag
            total += (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        late = tl.max(tl.reshape((wrong != 0).to(tl.int32), [wrong.numel]), axis=0)
    return total


@triton.jit
def few_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], its norm
    norm_weight,  # [WIDTH]
    list_,  # [rows] int32, as of one_kernel
    ids,  # [T, ENTRIES] int32: each token's rows of the weights
    w_enc,  # [rows, WIDTH]
    w_dec,  # [rows, WIDTH]
    words,  # [T, SHARES, ENTRIES] int64
    squares,  # [T, SHARES] int64
    counts,  # [T] int64
    gain,
    eps,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,  # columns of a share
    BLOCK: tl.constexpr,  # a power of two from COLS on
    SHARES: tl.constexpr,
    ENTRIES: tl.constexpr,
    HOPS: tl.constexpr,
    MEETS: tl.constexpr,  # how often the programs of a token wait for each other; below 2 the answer is wrong
):
    """A share of a token's columns for each program, all rows there: only numbers travel between programs."""
    gdc_wait()
    token = tl.program_id(0)
    share = tl.program_id(1)
    tag = _tag(counts + token, SHARES)
    lanes = tl.arange(0, ENTRIES)
    cols = share * COLS + tl.arange(0, BLOCK)
    inside = (cols < WIDTH) & (tl.arange(0, BLOCK) < COLS)
    at = token.to(tl.int64) * WIDTH + cols
    place = _follow(token, list_, HOPS)
    starts = tl.load(ids + place * ENTRIES + lanes, eviction_policy="evict_last").to(tl.int64) * WIDTH
    x = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    encoder = tl.load(w_enc + starts[:, None] + cols[None, :], mask=inside[None, :], other=0.0)
    decoder = tl.load(w_dec + starts[:, None] + cols[None, :], mask=inside[None, :], other=0.0)
    factor = tl.load(norm_weight + cols, mask=inside, other=0.0).to(tl.float32)
    dots = tl.sum(encoder.to(tl.float32) * x[None, :], axis=1)
    if MEETS > 0:
        told = words + token * (SHARES * ENTRIES) + lanes
        _tell(told + share * ENTRIES, dots, tag)
        dots = _hear(told, tag, SHARES, ENTRIES)
    delta = gain * (RAISED - tl.maximum(dots, 0.0))
    y = (x + tl.sum(decoder.to(tl.float32) * delta[:, None], axis=0)).to(stream.dtype.element_ty)
    tl.store(stream + at, y, mask=inside)
    z = y.to(tl.float32)
    square = tl.sum(z * z, axis=0)
    if MEETS > 1:
        told = squares + token * SHARES + tl.arange(0, 1)
        _tell(told + share, tl.zeros([1], tl.float32) + square, tag)
        square = tl.sum(_hear(told, tag, SHARES, 1), axis=0)
    scale = tl.rsqrt(square / WIDTH + eps)
    tl.store(second + at, z * scale * (1.0 + factor), mask=inside)
    tl.atomic_add(counts + token, 1, sem="relaxed")


@triton.jit
def passes_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], its norm
    norm_weight,  # [WIDTH]
    ids,  # [requests, TOKENS] int32: rows of the weights, as many as tokens of a turn
    w_enc,  # [rows, WIDTH]
    w_dec,  # [rows, WIDTH]
    gain,
    eps,
    turns,  # of a request
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,  # of a turn
    BLOCK: tl.constexpr,  # columns at once
    STAGES: tl.constexpr,  # as many of these in flight
    BLOCK_Z: tl.constexpr,  # the same of the norm
    AHEAD_Z: tl.constexpr,
):
    """A turn for each program, read and written as often as by the kernel for many entries, and no product."""
    gdc_wait()
    turn = tl.program_id(0)
    lanes = tl.arange(0, TOKENS)
    token = turn * TOKENS + lanes
    row = tl.load(ids + turn // turns * TOKENS + lanes)
    x_at, rows = token.to(tl.int64) * WIDTH, row.to(tl.int64) * WIDTH
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        inside = (cols < WIDTH)[None, :]
        x = tl.load(stream + x_at[:, None] + cols[None, :], mask=inside, other=0.0)
        e = tl.load(w_enc + rows[:, None] + cols[None, :], mask=inside, other=0.0)
        total += x.to(tl.float32) * e.to(tl.float32)
    delta = gain * (RAISED - tl.maximum(tl.sum(total, axis=1), 0.0))
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        inside = (cols < WIDTH)[None, :]
        x = tl.load(stream + x_at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.load(w_dec + rows[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        y = (x + delta[:, None] * d).to(stream.dtype.element_ty)
        tl.store(stream + x_at[:, None] + cols[None, :], y, mask=inside)
        squares += y.to(tl.float32) * y.to(tl.float32)
    tl.debug_barrier()
    scale = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)
    for start in tl.range(0, WIDTH, BLOCK_Z, num_stages=AHEAD_Z):
        cols = start + tl.arange(0, BLOCK_Z)
        inside = (cols < WIDTH)[None, :]
        factor = tl.load(norm_weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        y = tl.load(stream + x_at[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(second + x_at[:, None] + cols[None, :], y * scale[:, None] * (1.0 + factor[None, :]), mask=inside)


@triton.jit
def turn_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], its norm
    norm_weight,  # [WIDTH]
    ids,  # [ENTRIES] int32: the rows of the weights that all tokens have
    w_enc,  # [rows, WIDTH]
    w_dec,  # [rows, WIDTH]
    words,  # [turns, SHARES, TOKENS, ENTRIES] int64
    squares,  # [turns, SHARES, TOKENS] int64
    counts,  # [turns] int64
    gain,
    eps,
    tokens,  # T
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,  # columns of a share
    BLOCK: tl.constexpr,  # columns at once, of which COLS is a multiple
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,  # of a turn
    ENTRIES: tl.constexpr,
    MEETS: tl.constexpr,  # as of few_kernel
):
    """A share of the columns of a turn's tokens for each program, which reads and writes them once."""
    gdc_wait()
    turn = tl.program_id(0)
    share = tl.program_id(1)
    tag = _tag(counts + turn, SHARES)
    lanes = tl.arange(0, ENTRIES)
    each = tl.arange(0, TOKENS)
    token = turn * TOKENS + each
    starts = tl.load(ids + lanes, eviction_policy="evict_last").to(tl.int64) * WIDTH
    at = token.to(tl.int64) * WIDTH
    x = ()
    dots = tl.zeros([TOKENS, ENTRIES], tl.float32)
    for start in tl.static_range(0, COLS, BLOCK):
        cols = share * COLS + start + tl.arange(0, BLOCK)
        mask = (token < tokens)[:, None] & (cols < WIDTH)[None, :]
        x = x + (tl.load(stream + at[:, None] + cols[None, :], mask=mask, other=0.0),)  # noqa: RUF005
        e = tl.load(w_enc + starts[:, None] + cols[None, :], mask=(cols < WIDTH)[None, :], other=0.0)
        dots = tl.dot(x[start // BLOCK], tl.trans(e), dots)
    if MEETS > 0:
        told = words + turn * (SHARES * TOKENS * ENTRIES) + each[:, None] * ENTRIES + lanes[None, :]
        _tell(told + share * (TOKENS * ENTRIES), dots, tag)
        dots = _hear(told, tag, SHARES, TOKENS * ENTRIES)
    delta = gain * (tl.full([TOKENS, ENTRIES], RAISED, tl.float32) - tl.maximum(dots, 0.0))
    delta = delta.to(w_dec.dtype.element_ty)
    y = ()
    square = tl.zeros([TOKENS], tl.float32)
    for start in tl.static_range(0, COLS, BLOCK):
        cols = share * COLS + start + tl.arange(0, BLOCK)
        mask = (token < tokens)[:, None] & (cols < WIDTH)[None, :]
        d = tl.load(w_dec + starts[:, None] + cols[None, :], mask=(cols < WIDTH)[None, :], other=0.0)
        new = (x[start // BLOCK].to(tl.float32) + tl.dot(delta, d)).to(stream.dtype.element_ty)
        tl.store(stream + at[:, None] + cols[None, :], new, mask=mask)
        y = y + (new.to(tl.float32),)  # noqa: RUF005
        square += tl.sum(y[start // BLOCK] * y[start // BLOCK], axis=1)
    if MEETS > 1:
        told = squares + turn * (SHARES * TOKENS) + each
        _tell(told + share * TOKENS, square, tag)
        square = _hear(told, tag, SHARES, TOKENS)
    scale = tl.rsqrt(square / WIDTH + eps)
    for start in tl.static_range(0, COLS, BLOCK):
        cols = share * COLS + start + tl.arange(0, BLOCK)
        mask = (token < tokens)[:, None] & (cols < WIDTH)[None, :]
        factor = tl.load(norm_weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        z = y[start // BLOCK] * scale[:, None] * (1.0 + factor[None, :])
        tl.store(second + at[:, None] + cols[None, :], z, mask=mask)
    tl.atomic_add(counts + turn, 1, sem="relaxed")
