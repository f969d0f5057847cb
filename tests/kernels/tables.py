"""For tests and benchmarks: tables built by hand, and the measure of accuracy. Knows kernels/layout.py, not plans."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.bound import Bound

END = 2**31 - 1  # the open end of a window


@dataclass(frozen=True, slots=True)
class Entry:
    """One clamp: f' = min(max(scale * f + shift, low), high) for feature `slot` at positions lo to hi.

    With flags of layout.py it is something else: a gate (low < f < high into bit `gates`), a reconstruction.
    """

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
    gates: int = 0  # bits
    flags: int = 0  # of layout.py, beside ONLY_IF_ACTIVE
    counter: int = 0  # column of counts
    factor: int = 0  # for SCALED, a register
    size: int = 0  # of the range that it is ranked in, or that is reconstructed; for HELD, a register
    k: int = 0

    def words(self, group_end: int) -> list[int]:
        """The ENTRY words of the table."""
        flags = self.flags | layout.ONLY_IF_ACTIVE * self.only_if_active | self.counter << layout.COUNTER
        reals = (self.scale - 1.0, self.shift, self.low, self.high, self.bias, self.threshold, self.gain)
        bits = struct.unpack("<7i", struct.pack("<7f", *reals))
        gates = self.gates - (1 << 32 if self.gates >= 1 << 31 else 0)
        return [self.slot, group_end, self.lo, self.hi, flags, gates, self.factor, self.size, self.k, *bits]


Groups = Sequence[Sequence[Entry]]  # of one row at one site


def write_row(
    table: Tensor,
    row: int,
    sites: Sequence[Groups],
    dense: tuple[int, int] = (0, 0),
    doses: Sequence[int] = (),
    limit: float = 0.0,
    captures: int = 0,
) -> None:
    """Fill table[row] (int32 [rows, words]) with the groups of each site, in order.

    Args:
        table: to be written to.
        row: of it.
        sites: the groups of each.
        dense: first slot and size of the dictionary that ranks or reconstructions need.
        doses: columns of counts where those of each site begin, 0 where none are measured; default nowhere.
        limit: of a dose; 0 = any.
        captures: bits of KIND at every site: layout.BEFORE, AFTER.

    Raises:
        ValueError: the row has too few words.
    """
    at = layout.head(len(sites))
    words = [0] * at
    total = 0
    for site, groups in enumerate(sites):
        here = layout.HEAD + layout.SPAN * site
        entries = [entry for group in groups for entry in group]
        # Those that rank or reconstruct are all of the one dictionary.
        whole = [entry.flags for entry in entries if entry.flags & (layout.RANKED | layout.RECONSTRUCT)]
        alone = len(entries) == 1
        words[here : here + layout.ONE] = layout.span_words(
            [entry.flags for entry in entries],
            gated=any(entry.gates for entry in entries),
            groups=len(groups),
            begin=layout.one_at(site) if alone else at,
            dense=(*dense, whole[0] & (layout.LAYER_NORM | layout.L2_NORM)) if whole else (0, 0, 0),
            doses=doses[site] if doses else 0,
            captures=captures,
        )
        words[1] = max(words[1], words[here + layout.PARTS])
        words[layout.NEEDS] |= layout.WHOLE * int(words[here + layout.DENSE_SIZE] > 0)
        total += len(entries)
        if alone:
            one = layout.one_at(site)
            words[one : one + layout.ENTRY] = entries[0].words(one + layout.ENTRY)
            continue
        for group in groups:
            at += layout.ENTRY * len(group)
            for entry in group:
                words += entry.words(at)
    words[0] = max(total, int(captures > 0))
    words[layout.LIMIT : layout.LIMIT + 1] = struct.unpack("<i", struct.pack("<f", limit))
    if at > table.shape[1]:
        raise ValueError(f"a row of {at} words, the table has {table.shape[1]}")
    table[row, :at] = torch.tensor(words, dtype=torch.int32, device=table.device)


def make_table(
    rows: Sequence[Sequence[Groups]],
    sites: int,
    device: str | torch.device = "cpu",
    dense: tuple[int, int] = (0, 0),
) -> Tensor:
    """The table that holds `rows[r]` (groups, site by site) in row r + 1; row 0 stays empty. int32 [rows + 1, words].

    Words behind a row's own are garbage, as in a server after many requests.
    """
    most = max((sum(len(group) for groups in row for group in groups) for row in rows), default=0)
    table = torch.full((len(rows) + 1, layout.width(sites, most)), -(2**30), dtype=torch.int32)
    write_row(table, 0, [()] * sites)
    for row, groups in enumerate(rows):
        write_row(table, row + 1, groups, dense)
    return table.to(device)


def make_work(
    items: Sequence[tuple[int, ...]],
    max_tokens: int,
    device: str | torch.device = "cpu",
    *,
    span: int = 1,
    parts: int = layout.MOST_PARTS,
) -> Tensor:
    """The work list of `items` (token, row, position[, tokens]), int32 [max_tokens + 1, 4]; behind them is garbage.

    Their positions are no part of it: `make_positions` puts them where the ops look for them.
    """
    work = torch.full((max_tokens + 1, 4), -(2**30), dtype=torch.int32)
    work[0] = torch.tensor([len(items), parts, span, 1])
    for at, item in enumerate(items):
        token, row, _, length = (*item, 1)[:4]
        work[1 + at] = torch.tensor([token, row, length, 0], dtype=torch.int32)
    return work.to(device)


def copied(bound: Bound, device: str | torch.device | None = None, **changes: Any) -> Bound:
    """The same over copies, on another device or here, but for the changes; not bound yet."""
    there: dict[str, Any] = {field.name: getattr(bound, field.name) for field in fields(bound)}
    for name, value in there.items():
        if isinstance(value, Tensor):
            there[name] = value.clone() if device is None else value.to(device, copy=True)
    return Bound(**there | changes)


def make_positions(items: Sequence[tuple[int, ...]], max_tokens: int, device: str | torch.device = "cpu") -> Tensor:
    """Position of each token of the `items` of `make_work`, int64 [max_tokens]; of others it is garbage."""
    positions = torch.full((max_tokens,), -(2**30))
    for item in items:
        token, _, first, length = (*item, 1)[:4]
        positions[token : token + length] = torch.arange(first, first + length)
    return positions.to(device)


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
