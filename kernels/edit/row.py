"""A token's row in registers: a tuple of one block of HEAD elements, or of two, HEAD and TAIL. It knows no edits.

Sums over a row are spelled out where they stand: ptxas turns other orders of their parts into spills.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(HEAD: tl.constexpr, TAIL: tl.constexpr):
    """The columns of each block; a TAIL of 0 is none."""
    if TAIL > 0:
        return tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    else:  # or Triton would compile both
        return (tl.arange(0, HEAD),)


@triton.jit
def zeros(row):
    """A row of zeros in fp32, as long as another one."""
    return [tl.zeros(block.shape, tl.float32) for block in row]


@triton.jit
def plus(row, other):
    """The sum of two rows."""
    if len(row) > 1:
        return row[0] + other[0], row[1] + other[1]
    else:  # or Triton would compile both
        return (row[0] + other[0],)


@triton.jit
def minus(row, other):
    """The difference of two rows."""
    if len(row) > 1:
        return row[0] - other[0], row[1] - other[1]
    else:  # or Triton would compile both
        return (row[0] - other[0],)


@triton.jit
def times(row, other):
    """The product of two rows, element by element."""
    if len(row) > 1:
        return row[0] * other[0], row[1] * other[1]
    else:  # or Triton would compile both
        return (row[0] * other[0],)


@triton.jit
def put(place, at, row, masks, SHARED: tl.constexpr = False):
    """Store a row's blocks at their offsets from `place`; SHARED: for other programs of this launch."""
    level: tl.constexpr = ".cg" if SHARED else ""
    tl.store(place + at[0], row[0], mask=masks[0], cache_modifier=level)
    if len(row) > 1:
        tl.store(place + at[1], row[1], mask=masks[1], cache_modifier=level)
