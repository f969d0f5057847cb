"""Launches of the edit kernels: which of them run in a step, and with how many programs. It knows no requests."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from saesteer.kernels import layout
from saesteer.kernels.early import early
from saesteer.kernels.edit.captured import capture
from saesteer.kernels.edit.configs import (
    EXACT_ENCODE,
    TILED_ABOVE,
    Configs,
    at_once,
    block,
    configs,
    for_tokens,
    parts,
)
from saesteer.kernels.edit.edit import edit_kernel
from saesteer.kernels.edit.encode import encode_kernel
from saesteer.kernels.edit.full import full_kernel
from saesteer.kernels.edit.lone import lone_kernel
from saesteer.kernels.edit.many import many_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from saesteer.kernels.bound import Bound

_OF_HOST = ("num_warps", "programs", "parts")  # fields of configs that are not constants of a kernel


@cache
def _multiprocessors(device: int | None) -> int:
    """The multiprocessors of a CUDA device; 1 for the interpreter, which runs on CPU tensors."""
    return 1 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _constants(config: Any) -> dict[str, Any]:
    """What a kernel is compiled for: its warps, and the constants that are named as the config's fields."""
    names = [field.name for field in fields(config) if field.name not in _OF_HOST]
    return {"num_warps": config.num_warps, **{name.upper(): getattr(config, name) for name in names}}


def edit_triton(
    stream: Tensor,
    second: Tensor | None,
    norm_weight: Tensor | None,
    counts: Tensor,
    bound: Bound,
    form: int,
    eps: float,
    weight_offset: float,
    *,
    tuned: Configs | None = None,
    tiled: bool | None = None,
) -> None:
    """Launch what the step needs. Arguments as for the op `edit_`, which has checked them.

    During capture, and in steps of up to TILED_ABOVE tokens, the edit kernel does every row, so a captured launch
    serves any work list. In other steps the host's `kinds` choose the kernels.

    Args:
        tuned: other launch parameters, for benchmarks.
        tiled: whether to choose by `kinds`, whatever the step is; for tests and benchmarks. Items span layout.TILE
            tokens.
    """
    tokens, width = stream.shape
    places = min(tokens, bound.work.shape[0] - 1)
    if places <= 0:
        return
    wanted = layout.KERNELS
    captured = stream.is_cuda and torch.cuda.is_current_stream_capturing()
    if tiled or (tiled is None and not captured):
        kinds = int(bound.kinds.item())
        if kinds == layout.BEFORE and tokens <= TILED_ABOVE:
            capture(stream, second, bound, form)
            return
        wanted = kinds & layout.KERNELS | layout.ANY * (kinds & (layout.BEFORE | layout.AFTER) != 0)
        if not wanted:
            return
    if tiled is None:
        tiled = tokens > TILED_ABOVE and not captured
    tuned = tuned or configs(width)
    read: Any = (stream, second, norm_weight, bound.table, bound.index, bound.work, bound.positions)
    common: Any = (*read, bound.w_enc, bound.w_dec)
    rest: Any = (eps, weight_offset, bound.table.stride(0), *counts.stride())
    scratch, dense_size = bound.scratch, layout.even(bound.dense_size)
    cores = _multiprocessors(stream.device.index)
    waits = early(stream.device.index)
    form_of: Any = {"WIDTH": width, "FORM": form, "HAS_WEIGHT": norm_weight is not None}
    exact = stream.dtype != bound.w_enc.dtype or stream.dtype == torch.float32
    if tiled and wanted & layout.LONE:
        lone = tuned.lone
        lone_kernel[(min(tokens, cores * lone.programs),)](
            *common,
            counts,
            *rest,
            BLOCK=block(lone.num_warps),
            LEAST=max(lone.at_once, 4),
            **form_of,
            **_constants(lone),
            **waits,
        )
    if tiled and wanted & layout.MANY:
        many = tuned.many
        room = layout.dense_words(width) - layout.PARTIALS
        most = -(-layout.MOST_MANY // many.entries) * many.entries
        many_kernel[(min(tokens, room // (many.tokens * most), cores * many.programs),)](
            *common,
            counts,
            scratch,
            *rest,
            most,
            SHARES=layout.TILE // many.tokens,
            EXACT=exact,
            **form_of,
            **_constants(many),
            **waits,
        )
    full = tiled and dense_size > 0 and wanted & layout.FULL
    kept = layout.ANY if tiled else layout.KERNELS
    if not (full or wanted & kept):
        return
    edit = for_tokens(tuned.edit, tokens)
    dense = scratch[layout.dense_words(width) :]
    round_ = at_once(scratch.numel(), width, dense_size, places)
    share = 1 if tiled else parts(round_, edit.parts)  # there are enough tokens for every program
    for first in range(0, places, round_):
        if dense_size:
            encode = EXACT_ENCODE if exact else for_tokens(tuned.encode, round_)
            tiles = -(-round_ // encode.block_m) * -(-dense_size // encode.block_n)
            encode_kernel[(min(tiles, cores * encode.programs),)](
                stream,
                second,
                bound.table,
                bound.index,
                bound.work,
                bound.w_enc,
                bound.b_enc,
                bound.threshold,
                dense,
                bound.table.stride(0),
                dense_size,
                first,
                round_,
                WIDTH=width,
                FORM=form,
                HAS_NORMS=bound.has_norms,
                ROUNDS=round_ < places,
                EXACT=exact,
                **_constants(encode),
                **waits,
            )
        if full:
            of_full = tuned.full
            full_kernel[(min(round_, cores * of_full.programs),)](
                *read,
                bound.w_dec,
                bound.b_dec,
                counts,
                dense,
                *rest,
                dense_size,
                first,
                round_,
                BLOCK=block(of_full.num_warps),
                ROUNDS=round_ < places,
                **form_of,
                **_constants(of_full),
                **waits,
            )
        if not wanted & kept:
            continue
        programs = cores * edit.programs
        edit_kernel[(round_, share) if round_ * share <= programs else (programs, 1)](
            *common,
            bound.threshold,
            bound.b_dec,
            bound.cells,
            bound.registers,
            bound.kept,
            bound.before,
            bound.after,
            counts,
            scratch,
            dense,
            *rest,
            dense_size,
            bound.registers.stride(0),
            kept,
            first,
            round_,
            share,
            BLOCK=block(edit.num_warps),
            HAS_DENSE=dense_size > 0,
            HAS_NORMS=bound.has_norms,
            HAS_KEPT=bound.kept is not None,
            HAS_CAPTURES=bound.before is not None,
            ROUNDS=round_ < places,
            **form_of,
            **_constants(edit),
            **waits,
        )
