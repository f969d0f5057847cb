"""What the ops mean, in plain torch, and how they run on a CPU. The definition: no tricks, and no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from saesteer.kernels import layout

_PLENTY = 1 << 24  # pre-activations held at once when a whole dictionary is ranked


def edit_ref_(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    table: Tensor,
    site: Tensor,
    work: Tensor,
    w_enc: Tensor,
    w_dec: Tensor,
    b_enc: Tensor,
    form: int,
    eps: float,
    weight_offset: float,
) -> None:
    """x[token] += the groups of its row at this site; tokens without an edit keep their bits. See ops.edit_."""
    n = int(work[0, 0])
    if n == 0:
        return
    span = 1 + 2 * int(site[0])
    items = work[1 : 1 + n].long()
    for row in torch.unique(items[:, 1]).tolist():
        begin, end = table[row, span : span + 2].tolist()
        if begin == end:
            continue
        tokens, _, positions, _ = items[items[:, 1] == row].unbind(1)
        x = stream[tokens]
        if form == layout.PAIR:
            assert second is not None
            x = x + second[tokens]
        x = x.float()
        changed = torch.zeros(len(tokens), dtype=torch.bool)
        while begin < end:
            stop = int(table[row, begin + layout.GROUP_END])
            group = table[row, begin:stop].view(-1, layout.ENTRY)
            delta = _deltas(x, positions, group, w_enc, b_enc)
            x = x + delta @ w_dec[group[:, layout.SLOT].long()].float()
            changed |= (delta != 0).any(1)
            begin = stop
        tokens, x = tokens[changed], x[changed].to(stream.dtype)
        stream[tokens] = x
        if second is not None:
            second[tokens] = rms_norm_ref(x, norm_weight, eps, weight_offset) if form == layout.NORMED else 0


def _deltas(x: Tensor, positions: Tensor, group: Tensor, w_enc: Tensor, b_enc: Tensor) -> Tensor:
    """f' - f of each token and entry of one group, [tokens, entries] fp32; 0 where the entry does not apply."""
    reals = group.view(torch.float32)
    mul, add, low, high, bias, threshold, gain = reals[:, layout.MUL : layout.GAIN + 1].unbind(1)
    flags = group[:, layout.FLAGS]
    pre = x @ w_enc[group[:, layout.SLOT].long()].float().T + bias
    topk = (flags & layout.TOPK) != 0
    among = torch.ones_like(pre, dtype=torch.bool)
    for entry in topk.nonzero().flatten().tolist():
        slot, base, size, k = group[entry, [layout.SLOT, layout.BASE, layout.SIZE, layout.TOP_K]].tolist()
        rank, dot = _ranks(x, slot, base, size, float(bias[entry]), w_enc, b_enc)
        pre[:, entry] = dot + bias[entry]
        among[:, entry] = rank < k
    f = torch.where((pre > threshold) & among, pre, 0.0)
    delta = gain * torch.minimum(torch.maximum(mul * f + add, low - f), high - f)
    applies = (positions[:, None] >= group[:, layout.LO]) & (positions[:, None] < group[:, layout.HI])
    applies &= ((flags & layout.ONLY_IF_ACTIVE) == 0) | (f != 0)
    return torch.where(applies, delta, 0.0)


def _ranks(
    x: Tensor, slot: int, base: int, size: int, bias: float, w_enc: Tensor, b_enc: Tensor
) -> tuple[Tensor, Tensor]:
    """How many features of the dictionary come before `slot`, by strength and then by index; and x . w_enc[slot].

    Both come from the same products, so that equal encoder rows tie.
    """
    ranks, dots = [], []
    before = torch.arange(size) < slot - base
    others = torch.arange(size) != slot - base
    for part in torch.split(x, max(1, _PLENTY // size)):
        every = torch.cat([part @ rows.float().T for rows in torch.split(w_enc[base : base + size], 1 << 15)], 1)
        dot = every[:, slot - base].clone()
        mine = (dot + bias)[:, None]
        every += b_enc[base : base + size]
        ranks.append((((every > mine) | ((every == mine) & before)) & others).sum(1))
        dots.append(dot)
    return torch.cat(ranks), torch.cat(dots)


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """x / rms(x) * (weight + weight_offset), in fp32, rounded once to the dtype of x; no weight: no factor."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + weight_offset)
    return y.to(x.dtype)


def map_ref_(
    work: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    positions: Tensor,
    table: Tensor,
    num_reqs: int,
) -> None:
    """work <- (token, row, position) of every token of a steered request, in batch order. See ops.map_."""
    rows = slots[:num_reqs].long() + row_offset
    steered = table[rows, 0] > 0
    if not steered.any():
        work[0, 0] = 0
        return
    starts = query_start_loc[: num_reqs + 1].long()
    lengths = torch.where(steered, starts.diff(), 0)
    n = int(lengths.sum())
    within = torch.arange(n) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    tokens = starts[:-1].repeat_interleave(lengths) + within
    columns = (tokens, rows.repeat_interleave(lengths), positions[tokens], torch.zeros(n))
    work[1 : 1 + n] = torch.stack([column.to(torch.int32) for column in columns], 1)
    work[0, 0] = n
