"""What the ops refuse: tensors of the wrong shape, dtype or layout, which a kernel would read as garbage."""

from __future__ import annotations

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.edit.configs import MAX_WIDTH
from saesteer.kernels.step.updates import News

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTS = (torch.int32, torch.int64)


def check_edit(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    table: Tensor,
    site: Tensor,
    work: Tensor,
    positions: Tensor,
    w_enc: Tensor,
    w_dec: Tensor,
    b_enc: Tensor,
    threshold: Tensor,
    b_dec: Tensor,
    cells: Tensor,
    counts: Tensor,
    kinds: Tensor,
    scratch: Tensor,
    form: int,
    dense_size: int,
) -> None:
    """Arguments of ops.edit_.

    Raises:
        ValueError: naming the tensor, what it is and what was expected.
    """
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
    slots = b_enc.shape[0]
    for name, weights in (("w_enc", w_enc), ("w_dec", w_dec)):
        _need(
            weights.shape == (slots, width) and weights.is_contiguous() and weights.dtype in _FLOATS,
            weights,
            name,
            f"contiguous bf16, fp16 or fp32 [{slots} slots, {width}]",
        )
    for name, vector in (("b_enc", b_enc), ("threshold", threshold)):
        _need(
            vector.shape == (slots,) and vector.dtype == torch.float32 and vector.is_contiguous(),
            vector,
            name,
            f"fp32 [{slots} slots]",
        )
    _need(
        b_dec.dim() == 2 and b_dec.shape[1] == width and b_dec.dtype == torch.float32 and b_dec.is_contiguous(),
        b_dec,
        "b_dec",
        f"contiguous fp32 [dictionaries, {width}]",
    )
    _need(site.shape == (1,) and site.dtype == torch.int32, site, "site", "int32 [1]")
    _check_table(table)
    _check_work(work)
    _need(
        positions.dim() == 1
        and positions.shape[0] >= min(stream.shape[0], work.shape[0] - 1)
        and positions.dtype in _INTS
        and positions.is_contiguous(),
        positions,
        "positions",
        f"contiguous int32 or int64 [{min(stream.shape[0], work.shape[0] - 1)} tokens or more]",
    )
    _need(
        cells.dim() == 1
        and cells.shape[0] >= work.shape[0] - 1
        and cells.dtype == torch.int32
        and cells.is_contiguous(),
        cells,
        "cells",
        f"int32 [{work.shape[0] - 1} tokens or more]",
    )
    _check_counts(counts, table)
    _need(kinds.shape == (1,) and kinds.dtype == torch.int32 and not kinds.is_cuda, kinds, "kinds", "int32 [1], CPU")
    words = layout.scratch_words(width, dense_size, layout.TILE) if stream.is_cuda else 0
    _need(
        scratch.dim() == 1 and scratch.shape[0] >= words and scratch.dtype == torch.float32 and scratch.is_contiguous(),
        scratch,
        "scratch",
        f"fp32 [{words} or more]",
    )


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
    """Arguments of ops.map_.

    Raises:
        ValueError: naming the tensor, what it is and what was expected.
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
        f"contiguous int32 [sites, {layout.SITE_STRIDE}], no more sites than `table` has",
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
    if not 0 <= num_tokens < work.shape[0]:  # then every item has a place, without asking the device
        raise ValueError(f"num_tokens {num_tokens}: expected 0 to {work.shape[0] - 1}, places of `work`")


def check_publish(table: Tensor, work: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Arguments of ops.publish_.

    Raises:
        ValueError: naming the tensor, what it is and what was expected.
    """
    _check_work(work)
    _check_table(table)
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
