"""A token's row in registers: a block of HEAD elements, and a second one of TAIL if that is not 0. It knows no edits.

Where TAIL is 0, the second block stands for nothing, and the compiler drops what is computed with it. Sums over a row
are spelled out where they stand: ptxas turns other orders of their parts into spills.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(HEAD: tl.constexpr, TAIL: tl.constexpr):
    """The columns of both blocks."""
    return tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL if TAIL > 0 else 1)


@triton.jit
def put(place, cols0, cols1, row0, row1, mask0, mask1, TAIL: tl.constexpr):
    """Store a row whose first element belongs at `place`."""
    tl.store(place + cols0, row0, mask=mask0)
    if TAIL > 0:
        tl.store(place + cols1, row1, mask=mask1)
