"""Checks of what the ops get: a kernel would read a tensor of the wrong shape, dtype or layout as garbage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.edit.configs import MAX_WIDTH
from saesteer.kernels.step.updates import News

if TYPE_CHECKING:
    from saesteer.kernels.bound import Bound

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP32 = (torch.float32,)
_INT32 = (torch.int32,)
_INTS = (torch.int32, torch.int64)


def check_bound(bound: Bound) -> None:
    """Check the tensors of a site, once for all calls.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    slots, width, tokens = bound.b_enc.shape[0], bound.w_dec.shape[-1], bound.work.shape[0] - 1
    words = layout.scratch_words(width, bound.dense_size, layout.TILE) if bound.w_enc.is_cuda else 0
    _need(bound.w_dec, "w_dec", _FLOATS, "slots", width)
    _need(bound.w_enc, "w_enc", _FLOATS, slots, width)
    if not 1 <= width <= MAX_WIDTH:
        raise _wrong(bound.w_dec, "w_dec", f"a width of 1 to {MAX_WIDTH}")
    _need(bound.b_enc, "b_enc", _FP32, slots)
    _need(bound.threshold, "threshold", _FP32, slots)
    _need(bound.b_dec, "b_dec", _FP32, "dictionaries", width)
    _need(bound.index, "index", _INT32, 1)
    _need_table(bound.table)
    _need_work(bound.work)
    _need_line(bound.positions, "positions", _INTS, tokens)
    _need_line(bound.cells, "cells", _INT32, tokens)
    _need(bound.registers, "registers", _FP32, len(bound.cells), "registers")
    if bound.kept is not None:
        _need(bound.kept, "kept", _FLOATS, len(bound.cells), width)
    for name, captured in (("before", bound.before), ("after", bound.after)):
        if captured is not None:
            _need(captured, name, _FLOATS, len(bound.cells), width)
    if (bound.before is None) != (bound.after is None):
        raise ValueError("one of before and after is None: expected both or neither")
    _need(bound.kinds, "kinds", _INT32, 1, host=True)
    _need_line(bound.scratch, "scratch", _FP32, words)


def check_edit(
    stream: Tensor, second: Tensor | None, norm_weight: Tensor | None, counts: Tensor, bound: Bound, form: int
) -> None:
    """Check one call of ops.edit_ at this site.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    width = bound.width
    _need(stream, "stream", _FLOATS, "tokens", width)
    if form not in (layout.BARE, layout.NORMED, layout.PAIR) or (second is None) != (form == layout.BARE):
        given = "without second" if second is None else "with second"
        raise ValueError(f"form {form} {given}: expected 0 without, 1 or 2 with it")
    if second is not None:
        _need(second, "second", (stream.dtype,), *stream.shape)
    if norm_weight is not None and (norm_weight.shape != (width,) or not norm_weight.is_contiguous()):
        raise _wrong(norm_weight, "norm_weight", f"contiguous [{width}]")
    _need_counts(counts, bound.table)


def check_map(
    work: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    table: Tensor,
    counts: Tensor,
    sites: Tensor,
    news: News,
    num_reqs: int,
    num_tokens: int,
    span: int,
) -> None:
    """Check the arguments of ops.map_.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    _need_work(work)
    _need_table(table)
    _need_line(slots, "slots", _INTS, num_reqs)
    _need_line(query_start_loc, "query_start_loc", _INTS, num_reqs + 1)
    _need_counts(counts, table)
    _need(sites, "sites", _INT32, "sites", layout.SITE_STRIDE)
    if layout.head(sites.shape[0]) > table.shape[1]:
        raise _wrong(sites, "sites", "at most the sites of `table`")
    least = layout.news_words((len(table), table.shape[1]), len(news.values), news.lines, news.width)
    _need_line(news.words, "news", _INT32, least)
    if span not in (1, layout.TILE):
        raise ValueError(f"span {span}: expected 1 or {layout.TILE}")
    if not 0 <= num_tokens < work.shape[0]:  # then every item has a place, and nobody has to ask the device
        raise ValueError(f"num_tokens {num_tokens}: expected 0 to {work.shape[0] - 1}, as `work` has room for")


def check_border(
    table: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    positions: Tensor,
    sites: int,
    num_reqs: int,
) -> None:
    """Check the arguments of ops.border_.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    _need_table(table)
    _need_line(slots, "slots", _INTS, num_reqs)
    _need_line(query_start_loc, "query_start_loc", _INTS, num_reqs + 1)
    _need_line(tokens, "tokens", _INTS, 0)
    _need_line(positions, "positions", _INTS, 0)
    if not (sites >= 0 and layout.head(sites) <= table.shape[1]):
        raise ValueError(f"sites {sites}: expected at most those of a row of {table.shape[1]} words")


def check_publish(table: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Check the arguments of ops.publish_.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    _need_counts(counts, table)
    if not counts.is_contiguous():
        raise _wrong(counts, "counts", "contiguous")
    _need(steps, "steps", _INT32, 1)
    _need(published, "published", _INT32, layout.PUBLISHED, 1 + counts.numel(), host=True)


def _need_table(table: Tensor) -> None:
    if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise _wrong(table, "table", "int32 [rows, words]")


def _need_counts(counts: Tensor, table: Tensor) -> None:
    if counts.dim() != 2 or counts.shape[0] != table.shape[0] or counts.dtype != torch.int32:
        raise _wrong(counts, "counts", f"int32 [{table.shape[0]} rows, counters]")


def _need_work(work: Tensor) -> None:
    _need(work, "work", _INT32, "max_tokens + 1", 4)
    if not len(work):
        raise _wrong(work, "work", "at least one row")


def _need(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], *sizes: int | str, host: bool = False) -> None:
    """Refuse a tensor that is not contiguous, or has another dtype or shape; a word stands for an axis of any size."""
    shape = tensor.shape
    fits = tensor.dtype in dtypes and len(shape) == len(sizes) and tensor.is_contiguous()
    if fits and shape != sizes:
        fits = all(type(size) is str or have == size for have, size in zip(shape, sizes, strict=True))
    if not fits or (host and tensor.is_cuda):
        raise _wrong(tensor, name, f"contiguous {_one_of(dtypes)} [{', '.join(map(str, sizes))}]{', CPU' * host}")


def _need_line(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], least: int) -> None:
    """Refuse a tensor that is not contiguous, has another dtype, or is not one axis of at least this size."""
    if tensor.dim() != 1 or tensor.shape[0] < least or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise _wrong(tensor, name, f"contiguous {_one_of(dtypes)} [{least} or more]")


def _one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _wrong(tensor: Tensor, name: str, expected: str) -> ValueError:
    return ValueError(
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}: "
        f"expected {expected}"
    )
