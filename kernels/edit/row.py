"""A token's row in registers: a tuple of blocks of BLOCK elements each, the last one padded. It knows no edits.

All blocks lie across the threads in the same way. So a sum over a row adds its blocks element by element, and threads
meet once, whatever the width.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# (a jitted function's arguments have no Python types, and its tuples grow)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import rows


@triton.jit
def columns(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of each block."""
    cols = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        cols = cols + (start + tl.arange(0, BLOCK),)  # noqa: RUF005 (Triton knows no stars)
    return cols


@triton.jit
def zeros(row):
    """A row of zeros in fp32, as long as another one."""
    return [tl.zeros(block.shape, tl.float32) for block in row]


@triton.jit
def plus(row, other):
    """The sum of two rows."""
    found = ()
    for at in tl.static_range(len(row)):
        found = found + (row[at] + other[at],)  # noqa: RUF005
    return found


@triton.jit
def minus(row, other):
    """The difference of two rows."""
    return plus(row, [-block for block in other])


@triton.jit
def times(row, other):
    """The product of two rows, element by element."""
    found = ()
    for at in tl.static_range(len(row)):
        found = found + (row[at] * other[at],)  # noqa: RUF005
    return found


@triton.jit
def either(this, row, other):
    """The one row, or the other if `this` is not so."""
    found = ()
    for at in tl.static_range(len(row)):
        found = found + (tl.where(this, row[at], other[at]),)  # noqa: RUF005
    return found


@triton.jit
def total(row):
    """The sum of a row's blocks: one block, whose own sum is the row's."""
    found = row[0]
    for at in tl.static_range(1, len(row)):
        found += row[at]
    return found


@triton.jit
def put(place, at, row, masks):
    """Store a row's blocks at their offsets from `place`."""
    for block in tl.static_range(len(row)):
        tl.store(place + at[block], row[block], mask=masks[block])


@triton.jit
def share_row(place, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row in fp32 for `plus_shared` of another program: the first 4 of every 8 elements, then the others.

    A thread holds 8 neighbours and moves 4 at once. So threads next to each other fill whole sectors of the L2, and
    nothing goes to another thread first.
    """
    firsts: tl.constexpr = WIDTH // 8 * 4 + (WIDTH % 8 if WIDTH % 8 < 4 else 4)  # noqa: FURB136 (min is a tensor)
    fours = tl.arange(0, BLOCK // 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for block in tl.static_range(len(row)):
        at = block * (BLOCK // 2) + fours
        low, high = tl.split(tl.permute(tl.reshape(row[block], [BLOCK // 8, 2, 4]), (0, 2, 1)))
        tl.store(place + at, low, mask=at < firsts, cache_modifier=".cg")
        tl.store(place + firsts + at, high, mask=firsts + at < WIDTH, cache_modifier=".cg")


@triton.jit
def plus_shared(row, shared, starts, want, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row, plus the sum of those that `share_row` has stored at the wanted ones of these starts."""
    firsts: tl.constexpr = WIDTH // 8 * 4 + (WIDTH % 8 if WIDTH % 8 < 4 else 4)  # noqa: FURB136 (min is a tensor)
    found = ()
    for block in tl.static_range(len(row)):
        at = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        low = tl.sum(rows(shared, starts, want, at, firsts, True), axis=0)
        high = tl.sum(rows(shared, starts, want, firsts + at, WIDTH, True), axis=0)
        both = tl.join(tl.reshape(low, [BLOCK // 8, 4]), tl.reshape(high, [BLOCK // 8, 4]))
        found = found + (row[block] + tl.reshape(tl.permute(both, (0, 2, 1)), [BLOCK]),)  # noqa: RUF005
    return found
