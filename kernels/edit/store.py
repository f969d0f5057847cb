"""How the edit kernel finishes a token: it measures and limits the dose, and stores every form. It knows no entries."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import finite, rounded, tile
from saesteer.kernels.edit.row import either, minus, plus, put, times, total, zeros
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
    was = [finite(tile(stream, second, at + col, col < WIDTH, FORM).to(tl.float32), dtype) for col in cols]
    off = minus([finite(block, dtype) for block in x], was)
    size = tl.sqrt(tl.sum(total(times(was, was)), axis=0))
    dose = tl.sqrt(tl.sum(total(times(off, off)), axis=0)) / tl.maximum(size, SHORTEST)
    limit = tl.load(entries + LIMIT).to(tl.float32, bitcast=True)
    edited = changes > 0
    over = edited & (limit > 0.0) & (dose > limit)
    tl.atomic_max(counts + DOSE_MAX * stride_counters, dose.to(tl.int32, bitcast=True), mask=edited, sem="relaxed")
    tl.atomic_add(
        (counts + DOSE_SUM * stride_counters).to(tl.pointer_type(tl.float32)), dose, mask=edited, sem="relaxed"
    )
    tl.atomic_add(counts + DOSE_TOKENS * stride_counters, 1, mask=edited, sem="relaxed")
    tl.atomic_add(counts + DOSE_LIMITED * stride_counters, 1, mask=over, sem="relaxed")
    within = plus(was, [block * (limit / dose) for block in off])
    return either(over, within, x)


@triton.jit
def gains(norm, cols, WIDTH: tl.constexpr, FORM: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """The norm's weight for `store`, loaded early, so that nothing waits for it; empty where there is none."""
    if FORM == NORMED and HAS_WEIGHT:
        return [tl.load(norm[0] + col, mask=col < WIDTH, other=0.0) for col in cols]
    else:  # or Triton would compile both
        return ()


@triton.jit
def store(
    stream,
    second,
    at,  # of the token
    x,
    cols,  # its columns
    changed,  # False: everything stays as it is
    norm,  # its weight, eps and offset
    factors,  # from `gains`
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Store the edited token, rounded once, and the second tensor as the form has it.

    Only the stores stand behind `changed`: ptxas assumes that threads may disagree on it, and a sum behind such a
    branch costs spills.
    """
    _, eps, weight_offset = norm
    dtype: tl.constexpr = stream.dtype.element_ty
    masks = [col < WIDTH for col in cols]
    y = [rounded(block, dtype) for block in x]
    if changed:
        put(stream + at, cols, y, masks)
        if FORM == PAIR:
            put(second + at, cols, zeros(x), masks)
    if FORM == NORMED:
        z = [block.to(tl.float32) for block in y]
        scale = tl.rsqrt(tl.sum(total(times(z, z)), axis=0) / WIDTH + eps)
        z = [block * scale for block in z]
        if HAS_WEIGHT:
            z = times(z, [block.to(tl.float32) + weight_offset for block in factors])
        if changed:
            put(second + at, cols, z, masks)
