"""What a changed batch brings to the device, packed into one buffer so that one copy suffices. It knows no sites."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.kernels import layout

Slot = tuple[Tensor, Tensor, int]  # two contiguous tensors [slots, width], and the row of both


class News(NamedTuple):
    """The buffer for ops.map_, and what the host knows of its contents."""

    words: Tensor  # int32, see layout.py
    dtype: torch.dtype  # of the weights that vectors are written to
    slots: Sequence[Slot] = ()  # where each vector belongs
    values: Sequence[NDArray[np.float32]] = ()  # of each vector, as wide as the tensors
    lines: int = 0  # number of new rows

    @property
    def width(self) -> int:
        """Elements of the widest vector; 0 without vectors."""
        return widest(self.values)


def widest(values: Sequence[NDArray[np.float32]]) -> int:
    """Elements of the widest vector; 0 without vectors."""
    return max(map(len, values), default=0)


def pack(
    table: Tensor,
    dtype: torch.dtype,
    rows: Mapping[int, NDArray[np.int32]],
    slots: Sequence[Slot] = (),
    values: Sequence[NDArray[np.float32]] = (),
    numbers: Sequence[int] = (),
) -> tuple[News, Tensor]:
    """Copy all news to the table's device at once, in the order of the device's work; the host does not wait.

    Args:
        table: that the rows belong to.
        dtype: of the weights, even without vectors, since each dtype is a kernel of its own.
        rows: new words of its rows, by number.
        slots: where each vector belongs.
        values: of each, as wide as its tensors.
        numbers: more numbers that the device should have.

    Returns:
        The news, and the numbers on the device, int32.

    Raises:
        ValueError: weights of another dtype, device or layout, or a slot that they do not have.
    """
    for (first, second, slot), value in zip(slots, values, strict=True):
        for one in (first, second):
            if one.dtype != dtype or one.device != table.device or not one.is_contiguous() or one.dim() != 2:
                message = f"{one.dtype} {tuple(one.shape)} on {one.device}: expected contiguous {dtype}"
                raise ValueError(f"weights are {message} [slots, width] on {table.device}")
            if not 0 <= slot < one.shape[0] or one.shape[1] != len(value):
                message = f"slot {slot} of weights {tuple(one.shape)}"
                raise ValueError(f"{message}: expected one of {len(value)} elements")
    cuda, width = table.is_cuda, widest(values)
    at = layout.news_words((len(table), table.shape[1]), len(values), len(rows), width)
    # A fresh pinned buffer each time; torch reuses its memory once the copy is done.
    here = torch.empty(max(at + len(numbers), 1), dtype=torch.int32, pin_memory=cuda)
    words = here.numpy()
    if values:
        vectors = words[: len(values) * layout.vector_words(width)].reshape(len(values), -1)
        steps = [slot * first.shape[1] * dtype.itemsize for first, _, slot in slots]
        addresses = [
            (first.data_ptr() + step, second.data_ptr() + step)
            for (first, second, _), step in zip(slots, steps, strict=True)
        ]
        vectors.view(np.int64)[:, :2] = addresses
        vectors[:, layout.VECTOR_WIDTH] = [*map(len, values)]
        for line, value in zip(vectors[:, layout.VECTOR :].view(np.float32), values, strict=True):
            line[: len(value)] = value
    if rows:
        begin = len(values) * layout.vector_words(width)
        lines = words[begin : begin + len(table)]
        lines[:] = -1
        lines[list(rows)] = np.arange(len(rows))
        begin += layout.even(len(table))
        np.stack(list(rows.values()), out=words[begin:at].reshape(len(rows), -1))
    words[at : at + len(numbers)] = numbers
    there = here.to(table.device, non_blocking=True)
    return News(there, dtype, slots, values, len(rows)), there[at : at + len(numbers)]
