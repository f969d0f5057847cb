"""How tokens of rows that only capture are copied: by the edit kernel, or all of a step at once where nobody edits.

Nobody edits such a token here, so what comes in is also what the row's edits leave. It knows no entries.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from saesteer.kernels import layout
from saesteer.kernels.edit.entries import kernel, tile
from saesteer.kernels.edit.row import put
from saesteer.kernels.edit.words import AFTER, BEFORE

if TYPE_CHECKING:
    from torch import Tensor

    from saesteer.kernels.bound import Bound

_BLOCK = 4096  # numbers that a program copies


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


@kernel("stream", "second", "before")
def _capture_kernel(
    stream,
    second,  # None but for PAIR
    before,
    site,  # [1] int32
    total,  # numbers
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """before <- the stream, if a row of the step has something to do at this site."""
    if tl.load(site) >= 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tile(stream, second, at, at < total, FORM)
        tl.store(before + at, x.to(before.dtype.element_ty), mask=at < total)


def capture(stream: Tensor, second: Tensor | None, bound: Bound, form: int) -> None:
    """before <- every token of a step in which nobody edits here. Arguments as for the op `edit_`, which checked them.

    It looks at no row, and copies tokens of which nobody reads: to learn that they are not wanted takes longer. But
    where no row of the step reads at all, the memory may not be there.

    Args:
        bound: of a site whose tensors may be captured.
    """
    assert bound.before is not None
    total = min(len(stream), len(bound.before)) * stream.shape[1]
    second = second if form == layout.PAIR else None
    _capture_kernel[(triton.cdiv(total, _BLOCK),)](stream, second, bound.before, bound.index, total, form, _BLOCK)
