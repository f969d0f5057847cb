"""The definition of the ops in plain torch, and their implementation on a CPU. It uses no tricks and no Triton."""

import math
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.kernels.step.updates import News

_SPAN = layout.BEGIN, layout.END, layout.KIND, layout.DENSE_BASE, layout.DENSE_SIZE
_PLENTY = 1 << 24  # pre-activations in memory at once when a whole dictionary is encoded


def edit_ref_(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    counts: Tensor,
    bound: Bound,
    form: int,
    eps: float,
    weight_offset: float,
) -> None:
    """x[token] += the groups of its row at this site; tokens without an edit keep their bits. See ops.edit_."""
    table, work, positions = bound.table, bound.work, bound.positions
    n = int(work[0, 0])
    if n == 0 or bound.index[0] < 0:
        return
    span = layout.HEAD + layout.SPAN * int(bound.index[0])
    tokens_of, rows = _unfold(work[1 : 1 + n].long())
    for row in torch.unique(rows).tolist():
        begin, end, kind, *dense = table[row, [span + word for word in _SPAN]].tolist()
        if not kind:
            continue
        tokens = tokens_of[rows == row]
        x = _now(stream, second, tokens, form)
        if kind & layout.BEFORE:
            assert bound.before is not None
            bound.before[tokens] = x
        listed = tokens
        x = was = x.float()
        changed = torch.zeros(len(tokens), dtype=torch.bool)
        while begin < end:
            stop = int(table[row, begin + layout.GROUP_END])
            group = table[row, begin:stop].view(-1, layout.ENTRY)
            change, touched = _group(x, positions[tokens], tokens, group, dense, bound)
            x = x + change
            counts[row].index_add_(0, group[:, layout.FLAGS] >> layout.COUNTER, touched.sum(0).to(torch.int32))
            changed |= touched.any(1)
            begin = stop
        tokens, was, x = tokens[changed], was[changed], _finite(x[changed], stream.dtype)
        if doses := kind >> layout.DOSE:
            limit = table[row].view(torch.float32)[layout.LIMIT]
            x = _dosed(_finite(was, stream.dtype), x, limit, counts[row, doses : doses + layout.DOSE_WORDS])
        x = x.to(stream.dtype)
        stream[tokens] = x
        if second is not None:
            second[tokens] = rms_norm_ref(x, norm_weight, eps, weight_offset) if form == layout.NORMED else 0
        if kind & layout.AFTER:
            assert bound.after is not None
            bound.after[listed] = _now(stream, second, listed, form)


def _now(stream: Tensor, second: Tensor | None, tokens: Tensor, form: int) -> Tensor:
    """The tensor of a site as it is now, [tokens, d]."""
    if form != layout.PAIR:
        return stream[tokens]
    assert second is not None
    return stream[tokens] + second[tokens]


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, bounded: a value that overflows in the stream would outlive its request in the KV cache."""
    largest = layout.LARGEST_HALF if dtype == torch.float16 else layout.LARGEST
    return x.nan_to_num(largest).clamp(-largest, largest)


def _dosed(was: Tensor, x: Tensor, limit: Tensor, counts: Tensor) -> Tensor:
    """x [tokens, d] with every dose at or below the limit; adds the doses to counts [DOSE_WORDS]."""
    change = x - was
    dose = torch.linalg.vector_norm(change, dim=1)
    dose = dose / torch.linalg.vector_norm(was, dim=1).clamp_min(layout.SHORTEST)
    over = (limit > 0) & (dose > limit)
    reals = counts.view(torch.float32)  # the same memory
    if len(dose):
        reals[layout.DOSE_MAX] = torch.maximum(reals[layout.DOSE_MAX], dose.max())
    reals[layout.DOSE_SUM] += dose.sum()
    counts[layout.DOSE_TOKENS] += len(dose)
    counts[layout.DOSE_LIMITED] += int(over.sum())
    return torch.where(over[:, None], was + change * (limit / dose)[:, None], x)


def _unfold(items: Tensor) -> tuple[Tensor, Tensor]:
    """Token and row of every token of the items."""
    first, rows, lengths, _ = items.unbind(1)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return first.repeat_interleave(lengths) + within, rows.repeat_interleave(lengths)


def _group(
    x: Tensor, positions: Tensor, tokens: Tensor, group: Tensor, dense: list[int], bound: Bound
) -> tuple[Tensor, Tensor]:
    """The change of x by one group, [tokens, d] fp32, and which entries changed which token, [tokens, entries] bool."""
    w_enc, w_dec, b_enc, cells, registers = bound.w_enc, bound.w_dec, bound.b_enc, bound.cells, bound.registers
    flags, gates = group[:, layout.FLAGS], group[:, layout.GATES]
    applies = (positions[:, None] >= group[:, layout.LO]) & (positions[:, None] < group[:, layout.HI])
    mul, add, low, high = group.view(torch.float32)[:, layout.MUL : layout.HIGH + 1].unbind(1)
    gain = group.view(torch.float32)[:, layout.GAIN]
    whole = (flags & layout.RECONSTRUCT) != 0
    held, scaled = ((flags & layout.HELD) != 0) & ~whole, (flags & layout.SCALED) != 0
    f, outward = _features(x, group, dense[0], w_enc, b_enc)
    f[:, held] = registers[tokens][:, group[held, layout.SIZE].long()]
    if flags[0] & (layout.GATE | layout.READ):
        holds = ((low < f) & (f < high)).int()
        found = torch.minimum(torch.maximum(mul * f + add, low), high)
        for entry, word in enumerate(gates.tolist()):
            if whole[entry]:
                assert bound.kept is not None
                bound.kept[tokens] = _decoded(x, group[entry], dense, bound).to(bound.kept.dtype)
            elif flags[entry] & layout.READ:
                registers[tokens, word] = found[:, entry]
            else:
                cells[tokens] = (cells[tokens] & ~word) | word * holds[:, entry]
        return torch.zeros_like(x), torch.zeros_like(applies)
    applies &= (cells[tokens][:, None] & gates) == gates
    factor = torch.ones_like(f)
    factor[:, scaled] = registers[tokens][:, group[scaled, layout.FACTOR].long()]
    delta = factor * gain * torch.minimum(torch.maximum(mul * f + add, low - f), high - f)
    applies &= ((flags & layout.ONLY_IF_ACTIVE) == 0) | (f != 0)
    delta = torch.where(applies & ~whole, delta, 0.0)
    slots = group[:, layout.SLOT].long()
    change = (delta * outward)[:, ~whole] @ w_dec[slots[~whole]].float()
    touched = delta != 0
    for entry in whole.nonzero().flatten().tolist():
        if flags[entry] & layout.HELD:
            assert bound.kept is not None
            y = bound.kept[tokens].float()
        else:
            y = _decoded(x, group[entry], dense, bound)
        strength = factor[:, entry] * gain[entry]
        touched[:, entry] = applies[:, entry] & (strength != 0)
        change = change + torch.where(touched[:, entry, None], strength[:, None] * (y - x), 0.0)
    return change, touched


def _decoded(x: Tensor, entry: Tensor, dense: list[int], bound: Bound) -> Tensor:
    """What a dictionary makes of x, [tokens, d] fp32: decoded, with its bias, and back out of its input norm.

    What a transcoder makes of it is no image of x, and keeps its size.
    """
    slot, flags = entry[[layout.SLOT, layout.FLAGS]].tolist()
    base, total = dense
    rows = slice(base, base + total)
    scale_in, scale_out, shift = _input_norm(x, flags)
    y = bound.b_dec[slot].expand(x.shape)
    for part, tokens_here in zip(*_parts(x * scale_in[:, None], total), strict=True):
        every = _encode(part, bound.w_enc[rows], bound.b_enc[rows], bound.threshold[rows], entry)
        y = y.index_add(0, tokens_here, every @ bound.w_dec[rows].float())
    return y if flags & layout.READ else y * scale_out[:, None] + shift[:, None]


def _features(x: Tensor, group: Tensor, base: int, w_enc: Tensor, b_enc: Tensor) -> tuple[Tensor, Tensor]:
    """f of each token and entry, and the factor of a delta on its way out, both [tokens, entries] fp32."""
    reals = group.view(torch.float32)
    bias, threshold = reals[:, layout.BIAS], reals[:, layout.THRESHOLD]
    flags = group[:, layout.FLAGS]
    elsewhere = layout.RECONSTRUCT | layout.HELD  # its slot is no row of w_enc
    slots = torch.where((flags & elsewhere) != 0, 0, group[:, layout.SLOT]).long()
    pre = x @ w_enc[slots].float().T
    outward = torch.ones_like(pre)
    among = torch.ones_like(pre, dtype=torch.bool)
    scales = torch.ones_like(pre)
    for norm in (layout.LAYER_NORM, layout.L2_NORM):
        own = (flags & norm) != 0
        if own.any():
            scale_in, scale_out, _ = _input_norm(x, norm)
            scales[:, own], outward[:, own] = scale_in[:, None], scale_out[:, None]
    pre *= scales
    if (match := (flags & layout.MATCH) != 0).any():
        outward[:, match] = torch.linalg.vector_norm(x, dim=1)[:, None]
    ranked = ((flags & layout.RANKED) != 0) & ((flags & layout.RECONSTRUCT) == 0)
    for entry in ranked.nonzero().flatten().tolist():
        among[:, entry], pre[:, entry] = _ranked(x * scales[:, entry, None], group[entry], base, w_enc, b_enc)
    pre = pre + bias
    return torch.where((pre > threshold) & among, pre, 0.0), outward


def _input_norm(x: Tensor, flags: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each token the factor into the dictionary (whose encoder is centred), and the factor and addend out of it."""
    one, zero = torch.ones(len(x)), torch.zeros(len(x))
    if flags & layout.LAYER_NORM:
        std = x.std(-1)
        return 1 / (std + 1e-5), std, x.mean(-1)
    if flags & layout.L2_NORM:
        scale = math.sqrt(x.shape[1]) / torch.linalg.vector_norm(x, dim=1).clamp_min(1e-12)
        return scale, 1 / scale, zero
    return one, one, zero


def _parts(x: Tensor, size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Rows of x and their numbers, in parts that fit when a dictionary of this size encodes them."""
    most = max(1, _PLENTY // size)
    return torch.split(x, most), torch.split(torch.arange(len(x)), most)


def _dots(x: Tensor, w_enc: Tensor) -> Tensor:
    """x . w_enc, [tokens, features] fp32; widens some rows at a time."""
    return torch.cat([x @ rows.float().T for rows in torch.split(w_enc, 1 << 15)], 1)


def _ranked(x: Tensor, entry: Tensor, base: int, w_enc: Tensor, b_enc: Tensor) -> tuple[Tensor, Tensor]:
    """Whether fewer than k features of the range come before the entry's own, and x . w_enc[slot]; both [tokens].

    The stronger feature comes first; of equal ones, that of lower index. Both results come from the same products, so
    equal encoder rows tie.
    """
    slot, size, k, flags = entry[[layout.SLOT, layout.SIZE, layout.TOP_K, layout.FLAGS]].tolist()
    base += (slot - base) // size * size
    own = slot - base
    before, others = torch.arange(size) < own, torch.arange(size) != own
    ranks, dots = [], []
    for part in _parts(x, size)[0]:
        every = _dots(part, w_enc[base : base + size])
        dots.append(every[:, own].clone())
        every += b_enc[base : base + size]
        key = every.abs() if flags & layout.MAGNITUDE else every
        mine = key[:, own, None]
        ranks.append((((key > mine) | ((key == mine) & before)) & others).sum(1))
    return torch.cat(ranks) < k, torch.cat(dots)


def _encode(x: Tensor, w_enc: Tensor, b_enc: Tensor, threshold: Tensor, entry: Tensor) -> Tensor:
    """f of every feature, [tokens, features] fp32; those behind the entry's SIZE have no rank."""
    pre = _dots(x, w_enc) + b_enc
    active = pre > threshold
    size, k, flags = entry[[layout.SIZE, layout.TOP_K, layout.FLAGS]].tolist()
    if flags & layout.RANKED:
        key = pre[:, :size].abs() if flags & layout.MAGNITUDE else pre[:, :size]
        order = key.argsort(dim=1, descending=True, stable=True)[:, :k]
        active[:, :size] &= torch.zeros_like(active[:, :size]).scatter_(1, order, True)
    return torch.where(active, pre, 0.0)


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """x / rms(x) * (weight + weight_offset) in fp32, rounded once to the dtype of x; without weight no factor."""
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
    table: Tensor,
    counts: Tensor,
    sites: Tensor,
    news: News,
    num_reqs: int,
    span: int,
) -> None:
    """work <- the tokens of every steered request in batch order, in items of at most `span`. See ops.map_."""
    for (first, second, slot), values in zip(news.slots, news.values, strict=True):
        first[slot] = second[slot] = torch.from_numpy(values)
    if news.lines:
        at = layout.vector_words(news.width) * len(news.values)
        numbers = news.words[at : at + len(table)].long()
        come = numbers >= 0
        lines = news.words[at + layout.even(len(table)) :][: news.lines * table.shape[1]].view(news.lines, -1)
        table[come] = lines[numbers[come]]
        counts[come] = 0
    if num_reqs < 0:
        return
    rows = slots[:num_reqs].long() + row_offset
    steered = table[rows, 0] > 0
    work[0] = torch.tensor([0, 1, span, 0])
    for number in range(len(sites)):
        kinds = table[rows[steered], layout.HEAD + layout.SPAN * number + layout.KIND]
        sites[number, 0] = number if kinds.any() else ~number
    if not steered.any():
        return
    starts = query_start_loc[: num_reqs + 1].long()
    lengths = torch.where(steered, starts.diff(), 0)
    items = -(-lengths // span)
    n = int(items.sum())
    within = span * (torch.arange(n) - (items.cumsum(0) - items).repeat_interleave(items))
    tokens = starts[:-1].repeat_interleave(items) + within
    left = lengths.repeat_interleave(items) - within
    columns = (tokens, rows.repeat_interleave(items), left.clamp_max(span), torch.zeros(n))
    work[1 : 1 + n] = torch.stack([column.to(torch.int32) for column in columns], 1)
    work[0, 0] = n
    if n:
        work[0, 1] = table[rows[lengths > 0], 1].max()
        work[0, 3] = reduce(or_, table[rows[lengths > 0], layout.NEEDS].tolist())


def border_ref_(
    table: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    tokens: Tensor,
    positions: Tensor,
    sites: int,
    num_reqs: int,
) -> None:
    """The windows of parts begin or end behind the first token that ends the reasoning. See ops.border_."""
    for request, row in enumerate((slots[:num_reqs].long() + row_offset).tolist()):
        words = table[row]
        if words[layout.FROM] == 0:
            continue
        here = slice(int(query_start_loc[request]), int(query_start_loc[request + 1]))
        closing = words[layout.CLOSING : layout.CLOSING + layout.MOST_CLOSING]
        ends = torch.isin(tokens[here], closing) & (positions[here] >= words[layout.FROM])
        if ends.any():
            close_ref_(words, sites, int(positions[here][ends].min()))


def close_ref_(words: Tensor, sites: int, border: int) -> None:
    """Move the windows of a row's parts to the border; nothing waits there any more.

    Args:
        words: of the row, int32; changed in place.
        sites: number of its sites.
        border: position of the token that ends the reasoning.
    """
    for span in range(layout.HEAD, layout.HEAD + layout.SPAN * sites, layout.SPAN):
        begin, end = words[span + layout.BEGIN : span + layout.END + 1].tolist()
        table = words[begin:end].view(-1, layout.ENTRY)
        lo, hi, flags = table[:, layout.LO], table[:, layout.HI], table[:, layout.FLAGS]
        answer, reasoning = (flags & layout.ANSWER) != 0, (flags & layout.REASONING) != 0
        lo.copy_(torch.where(answer, lo.clamp_min(border + 1), lo))
        hi.copy_(torch.where(answer, ~hi, torch.where(reasoning, hi.clamp_max(border + 1), hi)))
    words[layout.FROM] = 0


def publish_ref_(table: Tensor, work: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """published[step] <- the step's number and the current counters of the listed rows. See ops.publish_."""
    n = int(work[0, 0])
    if not (n and work[0, 3] & layout.COUNTED):
        return
    steps[0] = (steps[0] + 1) % layout.STEPS
    line = published[int(steps[0]) % layout.PUBLISHED]
    line[0] = steps[0]
    of_rows = line[1:].view(counts.shape)
    for row in {*work[1 : 1 + n, 1].tolist()}:
        own = slice(int(table[row, layout.COUNTERS]))
        of_rows[row, own] = counts[row, own]
