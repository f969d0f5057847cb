"""How a token of a row that only captures is copied: by the edit kernel, or by one of its own where nobody can edit.

Nobody edits such a token here, so what comes in is also what the row's edits leave. It knows no entries.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.early import early
from saesteer.kernels.edit.configs import block, configs
from saesteer.kernels.edit.entries import kept, kernel, tile
from saesteer.kernels.edit.row import columns, put
from saesteer.kernels.edit.words import AFTER, BEFORE, HEAD, KIND, SPAN

if TYPE_CHECKING:
    from torch import Tensor

    from saesteer.kernels.bound import Bound

_PROGRAMS = 2048  # at most; more tokens are copied in turns


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


@kernel("stream", "second", "table", "before", "after")
def capture_kernel(
    stream,  # [T, WIDTH]
    second,  # [T, WIDTH]; None for the bare form
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    before,  # [tokens, WIDTH]
    after,  # [tokens, WIDTH]
    stride_table,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row's block
    FORM: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """before[token], after[token] <- the token, for all listed tokens whose rows capture it here; see ops.copying."""
    if PDL:
        gdc_wait()
    # The first item comes with the header, in one round trip, where items are single tokens.
    first = tl.program_id(0)
    item = work + 4 + first * 4
    token = kept(item)
    row = kept(item + 1)
    length = kept(item + 2)
    within = 0
    span = kept(work + 2)
    site_number = kept(site)
    units = tl.where(site_number < 0, 0, kept(work) * span)
    number = HEAD + SPAN * site_number
    cols = columns(WIDTH, BLOCK)
    for unit in range(first, units, tl.num_programs(0)):
        if (span > 1) | (unit > first):
            item = work + 4 + (unit // span) * 4
            within = unit % span
            token = kept(item)
            row = kept(item + 1)
            length = kept(item + 2)
        kind = kept(table + row.to(tl.int64) * stride_table + number + KIND)
        if within < length:
            at = (token + within).to(tl.int64) * WIDTH
            copy(stream, second, at, cols, kind, before, after, WIDTH, FORM)


def capture_triton(stream: Tensor, second: Tensor | None, bound: Bound, form: int) -> None:
    """Launch the kernel with a program for each token. Arguments as for the op `edit_`, which has checked them.

    Args:
        bound: of a site whose tensors may be captured.
    """
    tokens, width = stream.shape
    places = min(tokens, bound.work.shape[0] - 1)
    if places <= 0:
        return
    warps = configs(width).edit[0][1].num_warps
    capture_kernel[(min(places, _PROGRAMS),)](
        stream,
        second,
        bound.table,
        bound.index,
        bound.work,
        bound.before,
        bound.after,
        bound.table.stride(0),
        WIDTH=width,
        BLOCK=block(warps),
        FORM=form,
        num_warps=warps,
        **early(stream.device.index),
    )
