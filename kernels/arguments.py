"""Checks of what the ops get: a kernel would read a tensor of the wrong shape, dtype or layout as garbage."""

import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.step.updates import News

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP32 = (torch.float32,)
INT32 = (torch.int32,)
INTS = (torch.int32, torch.int64)


def check_edit(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    counts: Tensor,
    table: Tensor,
    width: int,
    form: int,
) -> None:
    """Check one call of ops.edit_ at a site of this width.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    need(stream, "stream", FLOATS, "tokens", width)
    if form not in (layout.BARE, layout.NORMED, layout.PAIR) or (second is None) != (form == layout.BARE):
        given = "without second" if second is None else "with second"
        raise ValueError(f"form {form} {given}: expected 0 without, 1 or 2 with it")
    if second is not None:
        need(second, "second", (stream.dtype,), *stream.shape)
    if norm_weight is not None and (norm_weight.shape != (width,) or not norm_weight.is_contiguous()):
        raise wrong(norm_weight, "norm_weight", f"contiguous [{width}]")
    _need_counts(counts, table)


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
    need_work(work)
    need_table(table)
    need_line(slots, "slots", INTS, num_reqs)
    need_line(query_start_loc, "query_start_loc", INTS, num_reqs + 1)
    _need_counts(counts, table)
    need(sites, "sites", INT32, "sites", layout.SITE_STRIDE)
    if layout.head(sites.shape[0]) > table.shape[1]:
        raise wrong(sites, "sites", "at most the sites of `table`")
    least = layout.news_words((len(table), table.shape[1]), len(news.values), news.lines, news.width)
    need_line(news.words, "news", INT32, least)
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
    need_table(table)
    need_line(slots, "slots", INTS, num_reqs)
    need_line(query_start_loc, "query_start_loc", INTS, num_reqs + 1)
    need_line(tokens, "tokens", INTS, 0)
    need_line(positions, "positions", INTS, 0)
    if not (sites >= 0 and layout.head(sites) <= table.shape[1]):
        raise ValueError(f"sites {sites}: expected at most those of a row of {table.shape[1]} words")


def check_publish(table: Tensor, counts: Tensor, steps: Tensor, published: Tensor) -> None:
    """Check the arguments of ops.publish_.

    Raises:
        ValueError: with the tensor's name, what it is and what was expected.
    """
    _need_counts(counts, table)
    if not counts.is_contiguous():
        raise wrong(counts, "counts", "contiguous")
    need(steps, "steps", INT32, 1)
    need(published, "published", INT32, layout.PUBLISHED, 1 + counts.numel(), host=True)


def need_table(table: Tensor) -> None:
    if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise wrong(table, "table", "int32 [rows, words]")


def _need_counts(counts: Tensor, table: Tensor) -> None:
    if counts.dim() != 2 or counts.shape[0] != table.shape[0] or counts.dtype != torch.int32:
        raise wrong(counts, "counts", f"int32 [{table.shape[0]} rows, counters]")


def need_work(work: Tensor) -> None:
    need(work, "work", INT32, "max_tokens + 1", 4)
    if not len(work):
        raise wrong(work, "work", "at least one row")


def need(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], *sizes: int | str, host: bool = False) -> None:
    """Refuse a tensor that is not contiguous, or has another dtype or shape; a word stands for an axis of any size."""
    shape = tensor.shape
    fits = tensor.dtype in dtypes and len(shape) == len(sizes) and tensor.is_contiguous()
    if fits and shape != sizes:
        fits = all(type(size) is str or have == size for have, size in zip(shape, sizes, strict=True))
    if not fits or (host and tensor.is_cuda):
        raise wrong(tensor, name, f"contiguous {_one_of(dtypes)} [{', '.join(map(str, sizes))}]{', CPU' * host}")


def need_line(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], least: int) -> None:
    """Refuse a tensor that is not contiguous, has another dtype, or is not one axis of at least this size."""
    if tensor.dim() != 1 or tensor.shape[0] < least or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise wrong(tensor, name, f"contiguous {_one_of(dtypes)} [{least} or more]")


def _one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def wrong(tensor: Tensor, name: str, expected: str) -> ValueError:
    return ValueError(
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}: "
        f"expected {expected}"
    )
