"""How the edit kernel finishes a token: it measures and limits the dose, and stores every form. It knows no entries."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import finite, rounded, tile
from saesteer.kernels.edit.row import columns, put
from saesteer.kernels.edit.words import DOSE_LIMITED, DOSE_MAX, DOSE_SUM, DOSE_TOKENS, LIMIT, NORMED, PAIR, SHORTEST


@triton.jit
def dosed(
    stream,
    second,
    at,  # of the token
    x0,
    x1,
    changes,  # of the token so far; 0: it has no dose and stays as it is
    entries,  # the row's table
    doses,  # where the site's doses begin in the row's counts
    stride_counters,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    FORM: tl.constexpr,
):
    """The edited token, scaled back to the row's limit if its dose is above: [HEAD], [TAIL]. Counts the dose.

    It reads the stream again, to which nobody has stored yet: the old values would take registers if they were kept.
    """
    cols0, cols1 = columns(HEAD, TAIL)
    dtype: tl.constexpr = stream.dtype.element_ty
    was0 = finite(tile(stream, second, at + cols0, cols0 < WIDTH, FORM).to(tl.float32), dtype)
    off0 = finite(x0, dtype) - was0
    size = tl.sum(was0 * was0, axis=0)
    off = tl.sum(off0 * off0, axis=0)
    if TAIL > 0:
        was1 = finite(tile(stream, second, at + cols1, cols1 < WIDTH, FORM).to(tl.float32), dtype)
        off1 = finite(x1, dtype) - was1
        size += tl.sum(was1 * was1, axis=0)
        off += tl.sum(off1 * off1, axis=0)
    dose = tl.sqrt(off) / tl.maximum(tl.sqrt(size), SHORTEST)
    limit = tl.load(entries + LIMIT).to(tl.float32, bitcast=True)
    edited = changes > 0
    over = edited & (limit > 0.0) & (dose > limit)
    tl.atomic_max(doses + DOSE_MAX * stride_counters, dose.to(tl.int32, bitcast=True), mask=edited, sem="relaxed")
    tl.atomic_add(
        (doses + DOSE_SUM * stride_counters).to(tl.pointer_type(tl.float32)), dose, mask=edited, sem="relaxed"
    )
    tl.atomic_add(doses + DOSE_TOKENS * stride_counters, 1, mask=edited, sem="relaxed")
    tl.atomic_add(doses + DOSE_LIMITED * stride_counters, 1, mask=over, sem="relaxed")
    x0 = tl.where(over, was0 + off0 * (limit / dose), x0)
    if TAIL > 0:
        x1 = tl.where(over, was1 + off1 * (limit / dose), x1)
    return x0, x1


@triton.jit
def store(
    stream,
    second,
    at,  # of the token
    x0,
    x1,
    changed,  # False: everything stays as it is
    norm_weight,
    eps,
    weight_offset,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Store the edited token, rounded once, and the second tensor as the form has it.

    Only the stores stand behind `changed`: ptxas assumes that threads may disagree on it, and a sum behind such a
    branch costs spills.
    """
    cols0, cols1 = columns(HEAD, TAIL)
    mask0 = cols0 < WIDTH
    mask1 = cols1 < WIDTH
    dtype: tl.constexpr = stream.dtype.element_ty
    if FORM == NORMED and HAS_WEIGHT:  # early, so that nothing waits for it after the sum of squares
        gain0 = tl.load(norm_weight + cols0, mask=mask0, other=0.0)
        if TAIL > 0:
            gain1 = tl.load(norm_weight + cols1, mask=mask1, other=0.0)
    y0 = rounded(x0, dtype)
    y1 = rounded(x1, dtype)
    if changed:
        put(stream + at, cols0, cols1, y0, y1, mask0, mask1, TAIL)
        if FORM == PAIR:
            put(
                second + at,
                cols0,
                cols1,
                tl.zeros([HEAD], dtype),
                tl.zeros([TAIL if TAIL > 0 else 1], dtype),
                mask0,
                mask1,
                TAIL,
            )
    if FORM == NORMED:
        z0 = y0.to(tl.float32)
        z1 = z0
        squared = tl.sum(z0 * z0, axis=0)
        if TAIL > 0:
            z1 = y1.to(tl.float32)
            squared += tl.sum(z1 * z1, axis=0)
        scale = tl.rsqrt(squared / WIDTH + eps)
        z0 *= scale
        if HAS_WEIGHT:
            z0 *= gain0.to(tl.float32) + weight_offset
        if TAIL > 0:
            z1 *= scale
            if HAS_WEIGHT:
                z1 *= gain1.to(tl.float32) + weight_offset
        if changed:
            put(second + at, cols0, cols1, z0.to(dtype), z1.to(dtype), mask0, mask1, TAIL)
