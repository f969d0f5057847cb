"""For tests and benchmarks: tables built by hand, and the measure of accuracy. Knows kernels/layout.py, not plans."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saesteer.kernels import layout

END = 2**31 - 1  # the open end of a window


@dataclass(frozen=True, slots=True)
class Entry:
    """One clamp: f' = min(max(scale * f + shift, low), high) for feature `slot` at positions lo to hi."""

    slot: int
    scale: float = 1.0
    shift: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    lo: int = 0
    hi: int = END
    only_if_active: bool = False
    bias: float = 0.0
    threshold: float = 0.0
    gain: float = 1.0
    topk: tuple[int, int, int] | None = None  # base, size, k of its dictionary

    def words(self, group_end: int) -> list[int]:
        """The ENTRY words of the table."""
        base, size, k = self.topk or (0, 0, 0)
        flags = layout.ONLY_IF_ACTIVE * self.only_if_active + layout.TOPK * (self.topk is not None)
        reals = (self.scale - 1.0, self.shift, self.low, self.high, self.bias, self.threshold, self.gain, 0.0)
        bits = struct.unpack("<8i", struct.pack("<8f", *reals))
        return [self.slot, group_end, self.lo, self.hi, flags, base, size, k, *bits]


Groups = Sequence[Sequence[Entry]]  # of one row at one site


def write_row(table: Tensor, row: int, sites: Sequence[Groups]) -> None:
    """Fill table[row] (int32 [rows, words]) with the groups of each site, in order.

    Raises:
        ValueError: the row has too few words.
    """
    at = layout.head(len(sites))
    words = [0] * at
    for site, groups in enumerate(sites):
        words[1 + 2 * site] = at
        for group in groups:
            group_end = at + layout.ENTRY * len(group)
            for entry in group:
                words += entry.words(group_end)
            at = group_end
        words[2 + 2 * site] = at
    words[0] = (at - layout.head(len(sites))) // layout.ENTRY
    if at > table.shape[1]:
        raise ValueError(f"a row of {at} words, the table has {table.shape[1]}")
    table[row, :at] = torch.tensor(words, dtype=torch.int32, device=table.device)


def make_table(rows: Sequence[Sequence[Groups]], sites: int, device: str | torch.device = "cpu") -> Tensor:
    """The table that holds `rows[r]` (groups, site by site) in row r + 1; row 0 stays empty. int32 [rows + 1, words].

    Words behind a row's own are garbage, as in a server after many requests.
    """
    most = max((sum(len(group) for groups in row for group in groups) for row in rows), default=0)
    table = torch.full((len(rows) + 1, layout.width(sites, most)), -(2**30), dtype=torch.int32)
    write_row(table, 0, [()] * sites)
    for row, groups in enumerate(rows):
        write_row(table, row + 1, groups)
    return table.to(device)


def make_work(items: Sequence[tuple[int, int, int]], max_tokens: int, device: str | torch.device = "cpu") -> Tensor:
    """The work list of `items` (token, row, position), int32 [max_tokens + 1, 4]; what lies behind them is garbage."""
    work = torch.full((max_tokens + 1, 4), -(2**30), dtype=torch.int32)
    work[0, 0] = len(items)
    for at, (token, row, position) in enumerate(items):
        work[1 + at] = torch.tensor([token, row, position, 0], dtype=torch.int32)
    return work.to(device)


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Norm of ours - truth over the norm of truth, in float64; 0 for two empty tensors."""
    truth = truth.double().cpu()
    off = float(torch.linalg.vector_norm(ours.double().cpu() - truth))
    return off / (float(torch.linalg.vector_norm(truth)) or 1.0)


def assert_as_accurate(ours: Tensor, same_dtype_torch: Tensor, truth: Tensor) -> None:
    """Ours is as near to the truth as plain torch in the same dtype: err(ours) <= 2 * err(torch) + 1e-6.

    Args:
        ours: what is tested.
        same_dtype_torch: the yardstick, of our dtype.
        truth: the same in float64, or fp32 at least.

    Raises:
        AssertionError: ours is worse, or not finite.
    """
    assert ours.dtype == same_dtype_torch.dtype
    assert ours.shape == truth.shape == same_dtype_torch.shape
    mine, yardstick = relative_error(ours, truth), relative_error(same_dtype_torch, truth)
    assert mine <= 2 * yardstick + 1e-6, f"error {mine:.3e}, plain torch has {yardstick:.3e}"
