"""How the edit kernel finishes a token: it measures and limits the dose, and stores every form. It knows no entries."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import finite, rounded, tile
from saesteer.kernels.edit.row import put, times, zeros
from saesteer.kernels.edit.words import DOSE_LIMITED, DOSE_MAX, DOSE_SUM, DOSE_TOKENS, LIMIT, NORMED, PAIR, SHORTEST


@triton.jit
def dosed(
    stream,
    second,
    at,  # of the token
    x,
    cols,  # its columns
    changes,  # of the token so far; 0: it has no dose and stays as it is
    entries,  # the row's table
    doses,  # the column where the site's doses begin
    counter,  # counts of this row, and their stride
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
):
    """The edited token, scaled back to the row's limit if its dose is above. Counts the dose.

    It reads the stream again, to which nobody has stored yet: the old values would take registers if they were kept.
    """
    counts, stride_counters = counter
    counts += doses * stride_counters
    dtype: tl.constexpr = stream.dtype.element_ty
    was0 = finite(tile(stream, second, at + cols[0], cols[0] < WIDTH, FORM).to(tl.float32), dtype)
    off0 = finite(x[0], dtype) - was0
    size = tl.sum(was0 * was0, axis=0)
    off = tl.sum(off0 * off0, axis=0)
    if len(x) > 1:
        was1 = finite(tile(stream, second, at + cols[1], cols[1] < WIDTH, FORM).to(tl.float32), dtype)
        off1 = finite(x[1], dtype) - was1
        size += tl.sum(was1 * was1, axis=0)
        off += tl.sum(off1 * off1, axis=0)
    dose = tl.sqrt(off) / tl.maximum(tl.sqrt(size), SHORTEST)
    limit = tl.load(entries + LIMIT).to(tl.float32, bitcast=True)
    edited = changes > 0
    over = edited & (limit > 0.0) & (dose > limit)
    tl.atomic_max(counts + DOSE_MAX * stride_counters, dose.to(tl.int32, bitcast=True), mask=edited, sem="relaxed")
    tl.atomic_add(
        (counts + DOSE_SUM * stride_counters).to(tl.pointer_type(tl.float32)), dose, mask=edited, sem="relaxed"
    )
    tl.atomic_add(counts + DOSE_TOKENS * stride_counters, 1, mask=edited, sem="relaxed")
    tl.atomic_add(counts + DOSE_LIMITED * stride_counters, 1, mask=over, sem="relaxed")
    y0 = tl.where(over, was0 + off0 * (limit / dose), x[0])
    if len(x) > 1:
        return y0, tl.where(over, was1 + off1 * (limit / dose), x[1])
    else:  # or Triton would compile both
        return (y0,)


@triton.jit
def store(
    stream,
    second,
    at,  # of the token
    x,
    cols,  # its columns
    changed,  # False: everything stays as it is
    norm_weight,
    eps,
    weight_offset,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Store the edited token, rounded once, and the second tensor as the form has it.

    Only the stores stand behind `changed`: ptxas assumes that threads may disagree on it, and a sum behind such a
    branch costs spills.
    """
    dtype: tl.constexpr = stream.dtype.element_ty
    masks = [col < WIDTH for col in cols]
    if FORM == NORMED and HAS_WEIGHT:  # early, so that nothing waits for it after the sum of squares
        gain = [tl.load(norm_weight + col, mask=col < WIDTH, other=0.0) for col in cols]
    y = [rounded(block, dtype) for block in x]
    if changed:
        put(stream + at, cols, y, masks)
        if FORM == PAIR:
            put(second + at, cols, zeros(x), masks)
    if FORM == NORMED:
        z = [block.to(tl.float32) for block in y]
        squared = tl.sum(z[0] * z[0], axis=0)
        if len(z) > 1:
            squared += tl.sum(z[1] * z[1], axis=0)
        scale = tl.rsqrt(squared / WIDTH + eps)
        z = [block * scale for block in z]
        if HAS_WEIGHT:
            z = times(z, [block.to(tl.float32) + weight_offset for block in gain])
        if changed:
            put(second + at, cols, z, masks)
