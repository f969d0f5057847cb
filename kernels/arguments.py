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
_INTS = (torch.int32, torch.int64)


def check_bound(bound: Bound) -> None:
    """Check the tensors of a site, once for all calls.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    slots, width, tokens = bound.b_enc.shape[0], bound.w_dec.shape[-1], bound.work.shape[0] - 1
    for name in ("w_dec", "w_enc"):
        weights = getattr(bound, name)
        rows = slots if name == "w_enc" else max(1, weights.shape[0])
        fits = weights.shape == (rows, width) and 1 <= width <= MAX_WIDTH
        _need(
            fits and weights.is_contiguous() and weights.dtype in _FLOATS,
            weights,
            name,
            f"contiguous bf16, fp16 or fp32 [{rows} slots, {width}], width 1 to {MAX_WIDTH}",
        )
    for name in ("b_enc", "threshold"):
        vector = getattr(bound, name)
        _need(
            vector.shape == (slots,) and vector.dtype == torch.float32 and vector.is_contiguous(),
            vector,
            name,
            f"contiguous fp32 [{slots} slots]",
        )
    b_dec = bound.b_dec
    _need(
        b_dec.dim() == 2 and b_dec.shape[1] == width and b_dec.dtype == torch.float32 and b_dec.is_contiguous(),
        b_dec,
        "b_dec",
        f"contiguous fp32 [dictionaries, {width}]",
    )
    _need(bound.index.shape == (1,) and bound.index.dtype == torch.int32, bound.index, "index", "int32 [1]")
    _check_table(bound.table)
    _check_work(bound.work)
    for name, dtypes in (("positions", _INTS), ("cells", (torch.int32,))):
        of_tokens = getattr(bound, name)
        _need(
            of_tokens.dim() == 1
            and of_tokens.shape[0] >= tokens
            and of_tokens.dtype in dtypes
            and of_tokens.is_contiguous(),
            of_tokens,
            name,
            f"contiguous {' or '.join(map(str, dtypes))} [{tokens} tokens or more]",
        )
    registers = bound.registers
    _need(
        registers.dim() == 2
        and registers.shape[0] >= tokens
        and registers.dtype == torch.float32
        and registers.is_contiguous(),
        registers,
        "registers",
        f"contiguous fp32 [{tokens} tokens or more, registers]",
    )
    kinds, scratch = bound.kinds, bound.scratch
    _need(kinds.shape == (1,) and kinds.dtype == torch.int32 and not kinds.is_cuda, kinds, "kinds", "int32 [1], CPU")
    words = layout.scratch_words(width, bound.dense_size, layout.TILE) if bound.w_enc.is_cuda else 0
    _need(
        scratch.dim() == 1 and scratch.shape[0] >= words and scratch.dtype == torch.float32 and scratch.is_contiguous(),
        scratch,
        "scratch",
        f"contiguous fp32 [{words} or more]",
    )


def check_edit(
    stream: Tensor, second: Tensor | None, norm_weight: Tensor | None, counts: Tensor, bound: Bound, form: int
) -> None:
    """Check one call of ops.edit_ at this site.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    width = bound.w_dec.shape[1]
    _need(
        stream.dim() == 2 and stream.shape[1] == width and stream.is_contiguous() and stream.dtype in _FLOATS,
        stream,
        "stream",
        f"contiguous bf16, fp16 or fp32 [tokens, {width}]",
    )
    if form not in (layout.BARE, layout.NORMED, layout.PAIR) or (second is None) != (form == layout.BARE):
        given = "without second" if second is None else "with second"
        raise ValueError(f"form {form} {given}: expected 0 without, 1 or 2 with it")
    if second is not None:
        _need(
            second.shape == stream.shape and second.dtype == stream.dtype and second.is_contiguous(),
            second,
            "second",
            f"contiguous {stream.dtype} {tuple(stream.shape)}, like the stream",
        )
    if norm_weight is not None:
        _need(norm_weight.shape == (width,) and norm_weight.is_contiguous(), norm_weight, "norm_weight", f"[{width}]")
    _check_counts(counts, bound.table)


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
    _check_work(work)
    _check_table(table)
    for name, tensor, least in (
        ("slots", slots, num_reqs),
        ("query_start_loc", query_start_loc, num_reqs + 1),
    ):
        _need(
            tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in _INTS and tensor.shape[0] >= least,
            tensor,
            name,
            f"contiguous int32 or int64 [{least} or more]",
        )
    _check_counts(counts, table)
    _need(
        sites.dim() == 2
        and sites.shape[1] == layout.SITE_STRIDE
        and sites.dtype == torch.int32
        and sites.is_contiguous()
        and layout.head(sites.shape[0]) <= table.shape[1],
        sites,
        "sites",
        f"contiguous int32 [sites, {layout.SITE_STRIDE}], with at most the sites of `table`",
    )
    words, least = news.words, layout.news_words((len(table), table.shape[1]), len(news.values), news.lines, news.width)
    _need(
        words.dim() == 1 and words.dtype == torch.int32 and words.is_contiguous() and words.shape[0] >= least,
        words,
        "news",
        f"contiguous int32 [{least} or more]",
    )
    if span not in (1, layout.TILE):
        raise ValueError(f"span {span}: expected 1 or {layout.TILE}")
    if not 0 <= num_tokens < work.shape[0]:  # then every item has a place, and nobody has to ask the device
        raise ValueError(f"num_tokens {num_tokens}: expected 0 to {work.shape[0] - 1}, as `work` has room for")


def check_publish(table: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Check the arguments of ops.publish_.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    _check_counts(counts, table)
    _need(counts.t().is_contiguous(), counts, "counts", "the columns of a contiguous tensor")
    _need(steps.shape == (1,) and steps.dtype == torch.int32, steps, "steps", "int32 [1]")
    _need(
        published.shape == (layout.PUBLISHED, 1 + counts.numel())
        and published.dtype == torch.int32
        and published.is_contiguous()
        and not published.is_cuda,
        published,
        "published",
        f"contiguous int32 [{layout.PUBLISHED}, {1 + counts.numel()}], CPU",
    )


def _need(holds: bool, tensor: Tensor, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}: "
            f"expected {expected}"
        )


def _check_table(table: Tensor) -> None:
    _need(
        table.dim() == 2 and table.dtype == torch.int32 and table.stride(1) == 1, table, "table", "int32 [rows, words]"
    )


def _check_counts(counts: Tensor, table: Tensor) -> None:
    _need(
        counts.dim() == 2 and counts.shape[0] == table.shape[0] and counts.dtype == torch.int32,
        counts,
        "counts",
        f"int32 [{table.shape[0]} rows, counters]",
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
