"""A feature as a 64-bit key: its strength, as an integer of the same order, above its index, inverted.

Keys are distinct and the larger one comes first, so neither ties nor the order of the work change a result.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(-(1 << 63))  # the key of what is not active: below every other
UNFUSED = {"enable_fp_fusion": False}  # for every kernel: it, and the reference, round a pre-activation alike


@triton.jit
def key_of(pre, index, active, MAGNITUDE: tl.constexpr):
    """Keys of features with these pre-activations, NONE for those that are not active."""
    strength = tl.abs(pre) if MAGNITUDE else pre
    bits = tl.where(strength == 0.0, 0.0, strength).to(tl.int32, bitcast=True)  # both zeros are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | ((~index).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(active, key, NONE)


@triton.jit
def index_of(key):
    """The index of each feature."""
    return ~key.to(tl.int32)


@triton.jit
def strength_of(key):
    """The strength of each feature; the sign of a zero is lost."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
