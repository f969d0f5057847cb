"""The only door to the kernels: torch.ops.saesteer.edit_ and map_. Checks and chooses; the meaning is in reference.py.

Each op mutates tensors that its caller owns and returns nothing, so it needs no allocation, its fake does nothing, and
it can stand in a compiled model and in a CUDA graph. CUDA tensors go to Triton, CPU tensors to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.configs import MAX_WIDTH
from saesteer.kernels.reference import edit_ref_, map_ref_

# Calls of edit_'s real implementation by the address of `site`; a compiled graph that lost the op leaves its site out.
hits: dict[int, int] = {}

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTS = (torch.int32, torch.int64)


def edit_(
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
    has_topk: bool,
) -> None:
    """x[token] += the deltas of its row's entries at this site; tokens not listed, or without a delta, keep their bits.

    For each item (token, row, position) of `work`, group after group of table[row]'s entries, all entries of one group
    reading the same x, in fp32, rounded once at the end:

        pre    = x . w_enc[slot] + bias
        f      = pre where pre > threshold (top-k entries: and fewer than k of their dictionary come before) else 0
        delta  = gain * min(max(mul * f + add, low - f), high - f)
        delta  = 0 where position is outside [lo, hi), or f == 0 and the entry is only_if_active
        x     += sum of delta * w_dec[slot]

    Args:
        stream: [T, d] contiguous, bf16, fp16 or fp32; changed in place.
        second: like `stream`, changed in place; None for BARE.
        norm_weight: [d] for NORMED; None there leaves the factor out.
        table: [rows, words] int32, see layout.py.
        site: [1] int32, the site's index in the table.
        work: [max_tokens + 1, 4] int32, see layout.py. Filled by `map_`.
        w_enc: [slots, d] contiguous, any float dtype.
        w_dec: like `w_enc`.
        b_enc: [slots] fp32, read for top-k entries alone.
        form: BARE: x is the stream. NORMED: `second` is its RMS norm and made anew from the rounded x'.
            PAIR: x is stream + second, rounded; x' goes to the stream and 0 to `second`.
        eps: of the norm.
        weight_offset: added to `norm_weight` (1 for Gemma).
        has_topk: whether a top-k entry may stand in the table; without it the flag is not looked at on a GPU.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    _check_edit(stream, second, norm_weight, table, site, work, w_enc, w_dec, b_enc, form)
    address = site.data_ptr()
    hits[address] = hits.get(address, 0) + 1
    if stream.is_cuda:
        from saesteer.kernels.edit import edit_triton  # Triton need not be there on a CPU

        edit_triton(
            stream, second, norm_weight, table, site, work, w_enc, w_dec, b_enc, form, eps, weight_offset, has_topk
        )
    else:
        edit_ref_(stream, second, norm_weight, table, site, work, w_enc, w_dec, b_enc, form, eps, weight_offset)


def map_(
    work: Tensor,
    slots: Tensor,
    row_offset: int,
    query_start_loc: Tensor,
    positions: Tensor,
    table: Tensor,
    num_reqs: int,
) -> None:
    """work <- (token, row, position, 0) of every token of the batch's steered requests, in batch order.

    Batch entry b has row slots[b] + row_offset and tokens query_start_loc[b] to query_start_loc[b + 1]; it is steered
    where table[row, 0] > 0. Items behind work[0, 0] are left as they are.

    Args:
        work: [max_tokens + 1, 4] int32, contiguous; changed in place.
        slots: [>= num_reqs] int32 or int64.
        row_offset: row of slot 0.
        query_start_loc: [>= num_reqs + 1] int32 or int64.
        positions: [tokens] int32 or int64, position of each token of the batch in its request.
        table: [rows, words] int32, see layout.py.
        num_reqs: requests of the batch, known on the host; 0 empties the list.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or layout.
    """
    _check_map(work, slots, query_start_loc, positions, table, num_reqs)
    if work.is_cuda:
        from saesteer.kernels.work import map_triton  # Triton need not be there on a CPU

        map_triton(work, slots, row_offset, query_start_loc, positions, table, num_reqs)
    else:
        map_ref_(work, slots, row_offset, query_start_loc, positions, table, num_reqs)


def _need(holds: bool, tensor: Tensor, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}: "
            f"expected {expected}"
        )


def _check_edit(
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
) -> None:
    _need(
        stream.dim() == 2 and stream.is_contiguous() and stream.dtype in _FLOATS and 1 <= stream.shape[1] <= MAX_WIDTH,
        stream,
        "stream",
        f"contiguous bf16, fp16 or fp32 [tokens, width], width 1 to {MAX_WIDTH}",
    )
    width = stream.shape[1]
    if form not in (layout.BARE, layout.NORMED, layout.PAIR) or (second is None) != (form == layout.BARE):
        raise ValueError(f"form {form} with second {second if second is None else 'given'}: expected 0 without, 1 or 2")
    if second is not None:
        _need(
            second.shape == stream.shape and second.dtype == stream.dtype and second.is_contiguous(),
            second,
            "second",
            f"contiguous {stream.dtype} {tuple(stream.shape)}, as the stream",
        )
    if norm_weight is not None:
        _need(norm_weight.shape == (width,) and norm_weight.is_contiguous(), norm_weight, "norm_weight", f"[{width}]")
    for name, weights in (("w_enc", w_enc), ("w_dec", w_dec)):
        _need(
            weights.dim() == 2
            and weights.shape[1] == width
            and weights.shape[0] == b_enc.shape[0]
            and weights.is_contiguous()
            and weights.dtype in _FLOATS,
            weights,
            name,
            f"contiguous bf16, fp16 or fp32 [{b_enc.shape[0]} slots, {width}]",
        )
    _need(b_enc.dim() == 1 and b_enc.dtype == torch.float32 and b_enc.is_contiguous(), b_enc, "b_enc", "fp32 [slots]")
    _need(site.shape == (1,) and site.dtype == torch.int32, site, "site", "int32 [1]")
    _check_table(table)
    _check_work(work)


def _check_map(
    work: Tensor, slots: Tensor, query_start_loc: Tensor, positions: Tensor, table: Tensor, num_reqs: int
) -> None:
    _check_work(work)
    _check_table(table)
    for name, tensor, least in (
        ("slots", slots, num_reqs),
        ("query_start_loc", query_start_loc, num_reqs + 1),
        ("positions", positions, 0),
    ):
        _need(
            tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in _INTS and tensor.shape[0] >= least,
            tensor,
            name,
            f"contiguous int32 or int64 [{least} or more]",
        )
    # Each listed token has a position, so this keeps every item inside the list without asking the device.
    _need(positions.shape[0] < work.shape[0], positions, "positions", f"at most {work.shape[0] - 1}, places of `work`")


def _check_table(table: Tensor) -> None:
    _need(
        table.dim() == 2 and table.dtype == torch.int32 and table.stride(1) == 1, table, "table", "int32 [rows, words]"
    )


def _check_work(work: Tensor) -> None:
    _need(
        work.dim() == 2
        and work.shape[1] == 4
        and work.shape[0] > 0
        and work.dtype == torch.int32
        and work.is_contiguous(),
        work,
        "work",
        "contiguous int32 [max_tokens + 1, 4]",
    )


def _nothing(*_: object) -> None:
    """The fake of both ops: they only change what they are given."""


# torch.library.Library rather than custom_op: 2.2 against 9 us a call, at every site of every eager step.
def _register() -> torch.library.Library:
    library = torch.library.Library("saesteer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, function, schema in (
        (
            "edit_",
            edit_,
            "(Tensor(a!) stream, Tensor(b!)? second, Tensor? norm_weight, Tensor table, Tensor site, Tensor work, "
            "Tensor w_enc, Tensor w_dec, Tensor b_enc, int form, float eps, float weight_offset, bool has_topk) -> ()",
        ),
        (
            "map_",
            map_,
            "(Tensor(a!) work, Tensor slots, int row_offset, Tensor query_start_loc, Tensor positions, Tensor table, "
            "SymInt num_reqs) -> ()",
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
