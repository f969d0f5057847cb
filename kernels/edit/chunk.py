"""What the edit kernel does with a few entries of one token at once: encode, apply the law, decode. No launches."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.dense import norms, rank, statistics
from saesteer.kernels.edit.entries import law, reads, real, rows, unpack, word
from saesteer.kernels.edit.row import minus, plus, times, total
from saesteer.kernels.edit.words import (
    COUNTER,
    ENTRY,
    FACTOR,
    GAIN,
    GATE,
    HELD,
    L2_NORM,
    LAYER_NORM,
    MAGNITUDE,
    MATCH,
    RANKED,
    READ,
    RECONSTRUCT,
    SCALED,
    SIZE,
    TOP_K,
)


@triton.jit
def add_chunk(
    entry,  # the chunk's first entry
    words,  # words of the group from here on
    here,  # position of the token
    bits,  # its cells
    x,  # fp32
    cols,  # its columns
    weights,  # w_enc and w_dec
    kept,  # what is kept for the token
    held,  # dense activations of this token before the activation function; their first feature and number; whether
    # no group has changed x yet, so that they are those of x
    counter,  # counts of this row, and their stride
    register,  # the token's registers
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    PDL: tl.constexpr,  # whether the encoder may still be at work
):
    """sum of delta * w_dec[slot] over up to CHUNK entries of a group, number of deltas not 0, cells."""
    w_enc, w_dec = weights
    dense, dense_base, dense_size, fresh = held
    counts, stride_counters = counter
    lane = tl.arange(0, CHUNK) * ENTRY
    inside = lane < words
    entry += lane
    slot, lo, hi, flags, gates, mul, add, low, high, bias, threshold, gain = unpack(entry, inside)

    # Entries that do not apply to this token load no weights and add nothing.
    asks = (flags & (GATE | READ)) != 0
    applies = inside & (lo <= here) & (here < hi) & ((bits & gates) == gates)
    if HAS_KEPT:
        takes_over = applies & ((flags & (RECONSTRUCT | HELD)) == (RECONSTRUCT | HELD))
    if HAS_DENSE or HAS_KEPT:
        asks = asks & ((flags & RECONSTRUCT) == 0)
        applies = applies & ((flags & RECONSTRUCT) == 0)
    read = (applies & reads(mul, low, high, flags)) | asks
    write = applies & (asks == 0)
    takes = write & ((flags & HELD) != 0)
    if CHUNK > 1:
        tl.debug_barrier()  # or words of the last entry would wait in line behind the rows of the first
    # Before the rows, so that it arrives with them.
    found = tl.load(register + word(entry + SIZE, takes), mask=takes, other=0.0)
    starts = slot.to(tl.int64) * WIDTH
    pairs = [(rows(w_enc, starts, read, col, WIDTH), rows(w_dec, starts, write, col, WIDTH)) for col in cols]
    encoders = [pair[0].to(tl.float32) for pair in pairs]
    pre = tl.sum(total(times(encoders, [block[None, :] for block in x])), axis=1)
    outward = tl.full([CHUNK], 1.0, tl.float32)
    if tl.max(flags & (MATCH | LAYER_NORM | L2_NORM), axis=0) > 0:
        length, _, std = statistics(x, cols, WIDTH)
        if HAS_NORMS:
            into, outward = norms(flags, length, std, WIDTH)
            pre *= into
        outward = tl.where((flags & MATCH) != 0, length, outward)
    pre += bias
    active = pre > threshold
    if HAS_DENSE:  # noqa: SIM102 (the compiler knows this one, not the next)
        if fresh & (dense_size > 0):
            if PDL:
                gdc_wait()
            # The dense pass decides for all its features, so that a threshold never sees two roundings of one product.
            own = slot - dense_base
            known = read & (own >= 0) & (own < dense_size)
            pre = tl.where(known, tl.load(dense + own, mask=known, other=0.0), pre)
            active = pre > threshold
            ranked = known & ((flags & RANKED) != 0)
            if tl.max(ranked.to(tl.int32), axis=0) > 0:
                size = word(entry + SIZE, ranked)
                base = own // tl.maximum(size, 1) * size
                before = rank(dense, pre, own, base, size, ranked & ((flags & MAGNITUDE) != 0), CHUNK)
                active = active & ((before < word(entry + TOP_K, ranked)) | (ranked == 0))

    f = tl.where(active, pre, 0.0)
    if tl.max(flags & (GATE | READ), axis=0) > 0:
        gate = (flags & GATE) != 0
        holds = gate & (low < f) & (f < high)
        bits = bits & ~tl.sum(tl.where(gate, gates, 0), axis=0)
        bits = bits | tl.sum(tl.where(holds, gates, 0), axis=0)
        parks = asks & (gate == 0)
        tl.store(register + tl.where(parks, gates, 0), tl.minimum(tl.maximum(mul * f + add, low), high), mask=parks)
        tl.debug_barrier()  # other threads may load it for a later group
    if tl.max(flags & (HELD | SCALED), axis=0) > 0:
        f = tl.where(takes, found, f)
        scaled = write & ((flags & SCALED) != 0)
        factor = tl.load(register + word(entry + FACTOR, scaled), mask=scaled, other=1.0)
        gain = tl.where(scaled, factor * gain, gain)
    delta = law(f, write, flags, mul, add, low, high, gain)
    tl.atomic_add(counts + (flags >> COUNTER) * stride_counters, 1, mask=delta != 0.0, sem="relaxed")
    change = delta * outward
    added = [tl.sum(change[:, None] * pair[1].to(tl.float32), axis=0) for pair in pairs]
    changed = tl.sum((delta != 0.0).to(tl.int32), axis=0)
    if HAS_KEPT:
        taken = tl.sum(takes_over.to(tl.int32), axis=0)
        if taken > 0:
            # At most one: windows of one reconstruction do not overlap.
            scaled = takes_over & ((flags & SCALED) != 0)
            factor = tl.load(register + word(entry + FACTOR, scaled), mask=scaled, other=1.0)
            strength = tl.where(takes_over, factor * real(entry + GAIN, takes_over), 0.0)
            tl.atomic_add(counts + (flags >> COUNTER) * stride_counters, 1, mask=strength != 0.0, sem="relaxed")
            share = tl.sum(strength, axis=0)
            there = [tl.load(kept + col, mask=col < WIDTH, other=0.0).to(tl.float32) for col in cols]
            added = plus(added, [share * block for block in minus(there, x)])
            changed += tl.sum((strength != 0.0).to(tl.int32), axis=0)
    return added, changed, bits
