"""The Triton kernel that writes rows of weights to the slots where they belong, and its launcher. Knows no sites."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_FRONT = 4  # words: two addresses
_BLOCK = 1024
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["staged", "stride_staged", "width"])
def _place_kernel(
    staged,  # [rows, stride_staged] fp32: two int64 addresses, then the row
    stride_staged,
    width,
    FRONT: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row = staged + tl.program_id(0).to(tl.int64) * stride_staged
    addresses = row.to(tl.pointer_type(tl.int64))
    first = tl.load(addresses).to(tl.pointer_type(DTYPE))
    second = tl.load(addresses + 1).to(tl.pointer_type(DTYPE))
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        values = tl.load(row + FRONT + cols, mask=cols < width, other=0.0).to(DTYPE)
        tl.store(first + cols, values, mask=cols < width)
        tl.store(second + cols, values, mask=cols < width)


def place_triton(slots: Sequence[tuple[Tensor, Tensor, int]], rows: Sequence[NDArray[np.float32]]) -> None:
    """One copy to the device and one launch; arguments as of ops.place, checked there."""
    n, width, pair = len(rows), len(rows[0]), slots[0][0]
    size = width * pair.element_size()
    # A fresh pinned buffer each time, whose memory torch uses again once the copy is done. Rows begin at whole int64.
    staged = torch.empty(n, _FRONT + width + width % 2, pin_memory=pair.is_cuda)
    addresses = [(first.data_ptr() + slot * size, second.data_ptr() + slot * size) for first, second, slot in slots]
    staged.view(torch.int64).numpy()[:, :2] = addresses
    np.stack(rows, out=staged.numpy()[:, _FRONT : _FRONT + width])
    there = staged.to(pair.device, non_blocking=True)
    _place_kernel[(n,)](
        there, there.stride(0), width, FRONT=_FRONT, BLOCK=_BLOCK, DTYPE=_DTYPES[pair.dtype], num_warps=4
    )
