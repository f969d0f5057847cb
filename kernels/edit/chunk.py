"""What one token's edit kernel does with a few entries at once: encode, apply the law, decode. Launches nothing."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.dense import norms, rank, statistics
from saesteer.kernels.edit.entries import (
    ADD,
    BASE,
    BIAS,
    COUNTER,
    ENTRY,
    FLAGS,
    GAIN,
    GATE,
    GATES,
    HI,
    HIGH,
    L2_NORM,
    LAYER_NORM,
    LO,
    LOW,
    MAGNITUDE,
    MATCH,
    MUL,
    RANKED,
    RECONSTRUCT,
    SIZE,
    SLOT,
    THRESHOLD,
    TOP_K,
    law,
    reads,
    real,
    rows,
    word,
)


@triton.jit
def add_chunk(
    entry,  # the chunk's first entry
    words,  # words of the group from here on
    here,  # position of the token
    bits,  # its cells
    fresh,  # whether x is still as it came, so that dense activations are its own
    x0,  # [HEAD] fp32
    x1,  # [TAIL] fp32
    w_enc,
    w_dec,
    dense,  # dense activations of this token, before the activation function
    dense_base,
    dense_size,
    counts,  # of this row
    stride_counters,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """sum of delta * w_dec[slot] over CHUNK entries of a group at most: [HEAD], [TAIL], how many were not 0, cells."""
    cols0 = tl.arange(0, HEAD)
    cols1 = HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)
    lane = tl.arange(0, CHUNK) * ENTRY
    inside = lane < words
    entry += lane
    slot = word(entry + SLOT, inside)
    lo = word(entry + LO, inside)
    hi = word(entry + HI, inside)
    flags = word(entry + FLAGS, inside)
    gates = word(entry + GATES, inside)
    mul = real(entry + MUL, inside)
    add = real(entry + ADD, inside)
    low = real(entry + LOW, inside)
    high = real(entry + HIGH, inside)
    bias = real(entry + BIAS, inside)
    threshold = real(entry + THRESHOLD, inside)
    gain = real(entry + GAIN, inside)

    # Entries that do not apply to this token load no weights and add nothing.
    gate = (flags & GATE) != 0
    applies = inside & (lo <= here) & (here < hi) & ((bits & gates) == gates)
    if HAS_DENSE:
        applies = applies & ((flags & RECONSTRUCT) == 0)
    read = (applies & reads(mul, low, high, flags)) | gate
    write = applies & (gate == 0)
    starts = slot.to(tl.int64) * WIDTH
    enc0 = rows(w_enc, starts, read, cols0, WIDTH)
    dec0 = rows(w_dec, starts, write, cols0, WIDTH)
    if TAIL > 0:
        enc1 = rows(w_enc, starts, read, cols1, WIDTH)
        dec1 = rows(w_dec, starts, write, cols1, WIDTH)
    pre = tl.sum(enc0.to(tl.float32) * x0[None, :], axis=1)
    if TAIL > 0:
        pre += tl.sum(enc1.to(tl.float32) * x1[None, :], axis=1)
    outward = tl.full([CHUNK], 1.0, tl.float32)
    if tl.max(flags & (MATCH | LAYER_NORM | L2_NORM), axis=0) > 0:
        length, _, std = statistics(x0, x1, WIDTH, HEAD, TAIL)
        if HAS_NORMS:
            into, outward = norms(flags, length, std, WIDTH)
            pre *= into
        outward = tl.where((flags & MATCH) != 0, length, outward)
    pre += bias
    active = pre > threshold
    if HAS_DENSE:  # noqa: SIM102 (known to the compiler, the next is not)
        if fresh & (dense_size > 0):
            # The dense pass decides for all features that it has, so that no two roundings meet at a threshold.
            own = slot - dense_base
            known = read & (own >= 0) & (own < dense_size)
            pre = tl.where(known, tl.load(dense + own, mask=known, other=0.0), pre)
            active = pre > threshold
            ranked = known & ((flags & RANKED) != 0)
            if tl.max(ranked.to(tl.int32), axis=0) > 0:
                base = word(entry + BASE, ranked) - dense_base
                size = word(entry + SIZE, ranked)
                before = rank(dense, pre, own, base, size, ranked & ((flags & MAGNITUDE) != 0), CHUNK)
                active = active & ((before < word(entry + TOP_K, ranked)) | (ranked == 0))

    f = tl.where(active, pre, 0.0)
    if tl.max(gate.to(tl.int32), axis=0) > 0:
        holds = gate & (low < f) & (f < high)
        bits = bits & ~tl.sum(tl.where(gate, gates, 0), axis=0)
        bits = bits | tl.sum(tl.where(holds, gates, 0), axis=0)
    delta = law(f, write, flags, mul, add, low, high, gain)
    tl.atomic_add(counts + (flags >> COUNTER) * stride_counters, 1, mask=delta != 0.0, sem="relaxed")
    change = delta * outward
    sum0 = tl.sum(change[:, None] * dec0.to(tl.float32), axis=0)
    sum1 = sum0
    if TAIL > 0:
        sum1 = tl.sum(change[:, None] * dec1.to(tl.float32), axis=0)
    return sum0, sum1, tl.sum((delta != 0.0).to(tl.int32), axis=0), bits
