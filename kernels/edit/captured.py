"""What the edit kernel does with a token of a row that only captures: a copy. It knows no entries and no launches.

Like one.py it is a short way: nobody edits the token here, so what comes in is also what the row's edits leave.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import tile
from saesteer.kernels.edit.row import put
from saesteer.kernels.edit.words import AFTER, BEFORE


@triton.jit
def copy(
    stream,
    second,
    at,  # of the token
    cols,  # its columns
    kind,  # BEFORE, AFTER or both
    before,
    after,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
):
    """before and after <- the token, as far as the row captures them; the stream stays as it is."""
    x = [tile(stream, second, at + col, col < WIDTH, FORM) for col in cols]
    if (kind & BEFORE) != 0:
        put(before + at, cols, x, [col < WIDTH for col in cols])
    if (kind & AFTER) != 0:
        put(after + at, cols, x, [col < WIDTH for col in cols])
