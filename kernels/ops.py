"""The door to the kernels that edit: the ops edit_ and publish_, and map_ and border_, which never run inside a graph.

It sends CUDA tensors to Triton and CPU tensors to the reference, which defines what they mean. Each op changes tensors
that its caller owns and returns nothing. So its fake does nothing, and it fits into a compiled model and into a CUDA
graph. It allocates nothing, but for a tensor that is spread over ranks. What ops have captured is computed with beside
them, by read/features.py and read/rows.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from saesteer.kernels.arguments import check_border, check_edit, check_map, check_publish
from saesteer.kernels.bound import Bound, bound_at, spread_at
from saesteer.kernels.reference import border_ref_, edit_ref_, map_ref_, publish_ref_
from saesteer.kernels.step.updates import News

# How often the real ops ran, by the address of edit_'s `site` and of publish_'s `published`. An address that is missing
# belongs to a call that a compiled graph has lost.
hits: dict[int, int] = {}
# Addresses of the same kind: there the ops do nothing for now.
_silent: set[int] = set()
# Addresses of `site`s: there tokens are only captured for now.
_copying: set[int] = set()


@contextmanager
def _noted(among: set[int], tensors: Iterable[Tensor]) -> Iterator[None]:
    new = {tensor.data_ptr() for tensor in tensors} - among
    among |= new
    try:
        yield
    finally:
        among -= new


def silenced(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Until this ends, edit_ and publish_ launch nothing there, so CUDA graphs that are captured meanwhile lack them.

    Args:
        tensors: the `site` of each edit_ that is meant, and the `published` of each publish_.
    """
    return _noted(_silent, tensors)


def copying(sites: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Until this ends, edit_ on a GPU only captures tokens there, so CUDA graphs captured meanwhile edit nothing there.

    Args:
        sites: the `site` of each edit_ that is meant; what is bound to it has `before` and `after`.
    """
    return _noted(_copying, sites)


def edit_(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    counts: Tensor,
    site: Tensor,
    form: int,
    eps: float,
    weight_offset: float,
) -> None:
    """x[token] += the deltas of its row's entries at this site; tokens not listed, or without a delta, keep their bits.

    For each token of `work` it applies the groups of table[row]'s entries in order. All entries of a group read the
    same x. It computes in fp32 and rounds once, at the end:

        pre    = scale_in * (x . w_enc[slot]) + bias
        f      = pre where pre > threshold (ranked: and fewer than top_k of its range come before it) else 0
        delta  = gain * min(max(mul * f + add, low - f), high - f)
        delta  = 0 where position is outside [lo, hi), or cells lack a bit of gates, or f == 0 and only_if_active
        x     += sum of scale_out * delta * w_dec[slot]
        x     += gain * (scale_out * (f(all) @ w_dec + b_dec[slot]) + mean - x)   for a reconstruction
        x      = between -LARGEST and LARGEST, one of the two where it is not a number
        x      = x before + (x - x before) * limit / dose   where the row has a limit and the token's dose is above it

    scale_in and scale_out are 1, or come from the dictionary's input norm; for a layer norm, the encoder rows are
    centred already. For a delta in lengths of x, scale_out is |x|. A gate only changes its bit of cells[token].
    A row may also have its tokens captured: x before its first group, and what is stored behind the last one.
    counts[row] grows at each entry's counter by the tokens that the entry changed, and by the doses of the site if the
    row measures them; layout.py defines a dose and its counters.

    The schema names what a compiler must know is read or written. All else is bound to the site (bound.py) and found
    by the address of `site`, a buffer that compiled graphs take as an input. Every call declares that it changes
    `counts`, and so stands for cells and scratch, too. A compiler therefore keeps a call whose stream nobody reads
    again, keeps all calls in their order, so that a site reads the cells that an earlier one wrote, and keeps publish_
    behind the last of them.

    Args:
        stream: [T, d] contiguous, bf16, fp16 or fp32; changed in place. Fewer columns than the site has are this rank's
            part of a tensor that is spread over several (bound.spread): all ranks gather it and edit the whole alike.
        second: like `stream`, changed in place; None for BARE.
        norm_weight: [d] for NORMED; None there leaves the factor out.
        counts: [rows, counters] int32, see layout.py; changed in place. It is not bound, since a compiler may pass a
            copy and write that back later.
        site: [1] int32, the `index` of what is bound.
        form: BARE: x is the stream. NORMED: `second` is the stream's RMS norm, made anew from the rounded x'.
            PAIR: x is stream + second, rounded; x' goes to the stream and 0 to `second`.
        eps: of the norm.
        weight_offset: added to `norm_weight` (1 for Gemma).

    Raises:
        ValueError: nothing is bound to the site, or a tensor has the wrong shape, dtype or layout.
    """
    if site.data_ptr() in _silent:
        return
    bound = bound_at(site)
    mine = stream.shape[-1]
    ranks = spread_at(bound) if mine < bound.width else None
    _hit(site)
    copies = site.data_ptr() in _copying
    if ranks is None and not copies and _idle(stream, bound):
        return
    x = stream if ranks is None else ranks.gather(stream)
    check_edit(x, second, norm_weight, counts, bound.table, bound.width, form)
    if x.is_cuda and copies:
        from saesteer.kernels.edit.captured import capture  # a CPU may have no Triton

        capture(x, second, bound, form)
    elif x.is_cuda:
        from saesteer.kernels.edit.launch import edit_triton

        edit_triton(x, second, norm_weight, counts, bound, form, eps, weight_offset)
    else:
        edit_ref_(x, second, norm_weight, counts, bound, form, eps, weight_offset)
    if ranks is not None:
        stream.copy_(x.narrow(-1, ranks.rank() * mine, mine))


def _idle(stream: Tensor, bound: Bound) -> bool:
    """Whether nobody does anything here in a step that no graph keeps: then the host is done in half the time.

    Not where a tensor is gathered, as all ranks must do that alike.
    """
    return stream.is_cuda and not bound.kinds.item() and not torch.cuda.is_current_stream_capturing()


def map_(
    work: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    table: Tensor,
    counts: Tensor,
    sites: Tensor,
    news: News,
    num_reqs: int,
    num_tokens: int,
    span: int,
) -> None:
    """Put `news` where it belongs; then work <- items (token, row, tokens, 0) of the steered requests in batch order.

    Batch entry b has row slots[b] + row_offset and the tokens from query_start_loc[b] up to query_start_loc[b + 1]. It
    is steered if table[row, 0] > 0. Items behind work[0, 0] stay as they are.

    Args:
        work: [max_tokens + 1, 4] int32, contiguous; changed in place.
        slots: [>= num_reqs] int32 or int64.
        row_offset: row of slot 0.
        query_start_loc: [>= num_reqs + 1] int32 or int64.
        table: [rows, words] int32, see layout.py; changed in place.
        counts: [rows, counters] int32; set to zero in the rows that `news` brings.
        sites: [sites, SITE_STRIDE] int32, see layout.py; records at which sites the batch has entries.
        news: made by updates.pack, on the device of the table.
        num_reqs: requests of the batch, known on the host; 0 empties the list, and below 0 the list stays as it is.
        num_tokens: query_start_loc[num_reqs], known on the host, too; at most max_tokens.
        span: most tokens of an item, 1 or layout.TILE.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    check_map(work, slots, query_start_loc, table, counts, sites, news, num_reqs, num_tokens, span)
    batch = work, slots, row_offset, query_start_loc, table, counts, sites, news, num_reqs, span
    if work.is_cuda:
        from saesteer.kernels.step.map import map_triton  # a CPU may have no Triton

        map_triton(*batch)
    else:
        map_ref_(*batch)


def border_(
    table: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    tokens: Tensor,
    positions: Tensor,
    sites: int,
    num_reqs: int,
) -> None:
    """For each row that waits, in a step that has its border: the windows of its parts begin or end behind it.

    The border of a row is the first of its tokens, at position table[row, FROM] or later, that table[row, CLOSING]
    names. A row that has found it waits no longer, so the row itself is all that is kept between steps. A step that
    computes several generated tokens, after a preemption, edits all of them as if they had come one by one, since
    windows are positions. Call it behind map_, which brings new rows, and before the step's first edit.

    Args:
        table: [rows, words] int32, see layout.py; changed in place.
        slots, row_offset, query_start_loc, num_reqs: the batch, as in map_.
        tokens: [>= tokens of the step] int32 or int64, the ids that are inputs.
        positions: [>= tokens of the step] int32 or int64, of each token in its request.
        sites: number of sites.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    check_border(table, slots, query_start_loc, tokens, positions, sites, num_reqs)
    batch = table, slots, row_offset, query_start_loc, tokens, positions, sites, num_reqs
    if table.is_cuda:
        from saesteer.kernels.step.border import border_triton  # a CPU may have no Triton

        border_triton(*batch)
    else:
        border_ref_(*batch)


def publish_(counts: Tensor, site: Tensor, steps: Tensor, published: Tensor) -> None:
    """published <- the counts of listed rows, in a step with a row that has counters; call it behind the last edit.

    As part of a step's graph it costs the host nothing: the host requests no copy and waits for no event.

    Args:
        counts: [rows, counters] int32, contiguous.
        site: [1] int32, any bound site of the step: its table and its work list are the step's.
        steps: [1] int32, the number of the last such step; grows by one then.
        published: [PUBLISHED, 1 + rows * counters] int32 on the CPU, in pinned memory where the rest is on a GPU; see
            layout.py. Changed, though the schema does not say so: nothing in a graph reads it, and a compiler that
            knew would keep a copy.

    Raises:
        ValueError: nothing is bound to the site, or a tensor has the wrong shape, dtype or layout.
    """
    if published.data_ptr() in _silent:
        return
    bound = bound_at(site)
    check_publish(bound.table, counts, steps, published)
    _hit(published)
    if counts.is_cuda:
        from saesteer.kernels.step.publish import publish_triton  # a CPU may have no Triton

        publish_triton(bound.table, bound.work, counts, steps, published)
    else:
        publish_ref_(bound.table, bound.work, counts, steps, published)


def _hit(tensor: Tensor) -> None:
    address = tensor.data_ptr()
    hits[address] = hits.get(address, 0) + 1


def _nothing(*_: object) -> None:
    """The fake of all ops, which return nothing."""


# torch.library.Library rather than custom_op: 2.2 instead of 9 us per call, at every site of every eager step.
def _register() -> torch.library.Library:
    library = torch.library.Library("saesteer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, function, schema in (
        (
            "edit_",
            edit_,
            "(Tensor(a!) stream, Tensor(b!)? second, Tensor? norm_weight, Tensor(c!) counts, Tensor site, int form, "
            "float eps, float weight_offset) -> ()",
        ),
        ("publish_", publish_, "(Tensor counts, Tensor site, Tensor(a!) steps, Tensor published) -> ()"),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        library.impl(name, function, "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"saesteer::{name}", _nothing, lib=library)
    return library


# The ops live as long as this object. It is made once per process, even if the module runs again.
if not hasattr(torch.ops.saesteer, "edit_"):
    LIBRARY = _register()
