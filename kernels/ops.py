"""The only door to the kernels: edit_ and publish_, which are ops, and map_, which no graph holds and so is none.

Chooses Triton or the reference; the meaning is there. Each op mutates tensors that its caller owns and returns nothing,
so it needs no allocation, its fake does nothing, and it can stand in a compiled model and in a CUDA graph. CUDA tensors
go to Triton, CPU tensors to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saesteer.kernels.arguments import check_edit, check_map, check_publish
from saesteer.kernels.reference import edit_ref_, map_ref_, publish_ref_
from saesteer.kernels.step.updates import News

# Calls of the real ops by the address of edit_'s `site` and of publish_'s `published`; a compiled graph that lost one
# leaves it out.
hits: dict[int, int] = {}


def edit_(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    table: Tensor,
    site: Tensor,
    work: Tensor,
    positions: Tensor,
    kinds: Tensor,
    w_enc: Tensor,
    w_dec: Tensor,
    b_enc: Tensor,
    threshold: Tensor,
    b_dec: Tensor,
    cells: Tensor,
    counts: Tensor,
    scratch: Tensor,
    form: int,
    eps: float,
    weight_offset: float,
    dense_size: int,
    has_norms: bool,
) -> None:
    """x[token] += the deltas of its row's entries at this site; tokens not listed, or without a delta, keep their bits.

    For each token of `work`, group after group of table[row]'s entries, all entries of one group reading the same x, in
    fp32, rounded once at the end:

        pre    = scale_in * (x . w_enc[slot]) + bias
        f      = pre where pre > threshold (ranked: and fewer than top_k of its range come before it) else 0
        delta  = gain * min(max(mul * f + add, low - f), high - f)
        delta  = 0 where position is outside [lo, hi), or cells lack a bit of gates, or f == 0 and only_if_active
        x     += sum of scale_out * delta * w_dec[slot]
        x     += gain * (scale_out * (f(all) @ w_dec + b_dec[slot]) + mean - x)   for a reconstruction
        x      = between -LARGEST and LARGEST, 0 where it is no number
        x      = x before + (x - x before) * limit / dose   where the row has a limit and the token's dose is above it

    scale_in and scale_out are 1, or those of the dictionary's input norm, whose encoder has been centred for a layer
    norm; scale_out is |x| for a delta in lengths of x. A gate changes nothing but its bit of cells[token].
    counts[row] grows at each entry's counter by the tokens that it changed, and by the doses of the site, where the
    row asks for them; what a dose is, and where it is counted, is in layout.py.

    Args:
        stream: [T, d] contiguous, bf16, fp16 or fp32; changed in place.
        second: like `stream`, changed in place; None for BARE.
        norm_weight: [d] for NORMED; None there leaves the factor out.
        table: [rows, words] int32, see layout.py.
        site: [1] int32, the site's number in the table; below 0 where there is nothing to do, see layout.py.
        work: [max_tokens + 1, 4] int32, see layout.py. Filled by `map_`.
        positions: [>= tokens] int32 or int64, of each token in its request; neighbours of a request follow one another.
        kinds: [1] int32 on the CPU: the kinds of layout.py that the step's rows have, 0 when nobody is steered. Spares
            launches outside of CUDA graphs; not looked at while one is captured.
        w_enc: [slots, d] contiguous, any float dtype.
        w_dec: like `w_enc`.
        b_enc: [slots] fp32, read where whole dictionaries are encoded.
        threshold: [slots] fp32, as b_enc.
        b_dec: [any, d] fp32, read for reconstructions.
        cells: [max_tokens] int32, see layout.py; changed in place.
        counts: [rows, counters] int32, see layout.py; changed in place.
        scratch: fp32, `layout.scratch_words` or more, zeros at first; the kernels' own, on a GPU.
        form: BARE: x is the stream. NORMED: `second` is its RMS norm and made anew from the rounded x'.
            PAIR: x is stream + second, rounded; x' goes to the stream and 0 to `second`.
        eps: of the norm.
        weight_offset: added to `norm_weight` (1 for Gemma).
        dense_size: features of the largest dictionary at this site that an entry may rank or reconstruct; 0 for none.
        has_norms: whether an entry may ask for an input norm.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    check_edit(
        stream,
        second,
        norm_weight,
        table,
        site,
        work,
        positions,
        w_enc,
        w_dec,
        b_enc,
        threshold,
        b_dec,
        cells,
        counts,
        kinds,
        scratch,
        form,
        dense_size,
    )
    _hit(site)
    weights = (w_enc, w_dec, b_enc, threshold, b_dec)
    if stream.is_cuda:
        from saesteer.kernels.edit.launch import edit_triton  # Triton need not be there on a CPU

        edit_triton(
            stream,
            second,
            norm_weight,
            table,
            site,
            work,
            positions,
            kinds,
            *weights,
            cells,
            counts,
            scratch,
            form,
            eps,
            weight_offset,
            dense_size,
            has_norms,
        )
    else:
        edit_ref_(
            stream, second, norm_weight, table, site, work, positions, *weights, cells, counts, form, eps, weight_offset
        )


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
    """Put `news` where they belong, and then work <- items (token, row, tokens, 0) of the batch's steered requests, in
    batch order.

    Batch entry b has row slots[b] + row_offset and tokens query_start_loc[b] to query_start_loc[b + 1]; it is steered
    where table[row, 0] > 0. Items behind work[0, 0] are left as they are.

    Args:
        work: [max_tokens + 1, 4] int32, contiguous; changed in place.
        slots: [>= num_reqs] int32 or int64.
        row_offset: row of slot 0.
        query_start_loc: [>= num_reqs + 1] int32 or int64.
        table: [rows, words] int32, see layout.py; changed in place.
        counts: [rows, counters] int32; zeros then in rows that came.
        sites: [sites, SITE_STRIDE] int32, see layout.py; says then where rows of the batch have entries.
        news: as news.pack makes them, on the device of the table.
        num_reqs: requests of the batch, known on the host; 0 empties the list, and below 0 it stays as it is.
        num_tokens: query_start_loc[num_reqs], known on the host, too; at most max_tokens.
        span: tokens of an item at most, 1 or layout.TILE.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    check_map(work, slots, query_start_loc, table, counts, sites, news, num_reqs, num_tokens, span)
    batch = work, slots, row_offset, query_start_loc, table, counts, sites, news, num_reqs, span
    if work.is_cuda:
        from saesteer.kernels.step.map import map_triton  # Triton need not be there on a CPU

        map_triton(*batch)
    else:
        map_ref_(*batch)


def publish_(table: Tensor, work: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """published <- counts as they stand, in a step in which somebody is steered; to be called behind its last edit.

    As part of a step's graph it costs the host nothing: no copy to ask for, and no event to wait for.

    Args:
        table: [rows, words] int32, see layout.py.
        work: [max_tokens + 1, 4] int32, see layout.py.
        counts: [rows, counters] int32, one counter of all rows behind the other.
        steps: [1] int32, the number of the last such step; one more then.
        published: [PUBLISHED, 1 + rows * counters] int32 on the CPU, in pinned memory where the rest is on a GPU; see
            layout.py. Changed, though the schema does not say so: nothing in a graph reads it, and a compiler that
            knew would keep a copy.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    check_publish(table, work, counts, steps, published)
    _hit(published)
    if work.is_cuda:
        from saesteer.kernels.step.publish import publish_triton  # Triton need not be there on a CPU

        publish_triton(table, work, counts, steps, published)
    else:
        publish_ref_(table, work, counts, steps, published)


def _hit(tensor: Tensor) -> None:
    address = tensor.data_ptr()
    hits[address] = hits.get(address, 0) + 1


def _nothing(*_: object) -> None:
    """The fake of all ops: they only change what they are given."""


# torch.library.Library rather than custom_op: 2.2 against 9 us a call, at every site of every eager step.
def _register() -> torch.library.Library:
    library = torch.library.Library("saesteer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, function, schema in (
        (
            "edit_",
            edit_,
            "(Tensor(a!) stream, Tensor(b!)? second, Tensor? norm_weight, Tensor table, Tensor site, Tensor work, "
            "Tensor positions, Tensor kinds, Tensor w_enc, Tensor w_dec, Tensor b_enc, Tensor threshold, Tensor b_dec, "
            "Tensor(c!) cells, Tensor(d!) counts, Tensor(e!) scratch, int form, float eps, float weight_offset, "
            "int dense_size, bool has_norms) -> ()",
        ),
        (
            "publish_",
            publish_,
            "(Tensor table, Tensor work, Tensor counts, Tensor(a!) steps, Tensor published) -> ()",
        ),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        library.impl(name, function, "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"saesteer::{name}", _nothing, lib=library)
    return library


# Kept alive here, for the ops go with it; once a process, though the module may be run again.
if not hasattr(torch.ops.saesteer, "edit_"):
    LIBRARY = _register()
