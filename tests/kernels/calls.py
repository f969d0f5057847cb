"""Calls of the ops by hand, for the tests of how torch sees them. Knows the schema, and no results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.bound import Bound, bind
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.step.updates import News
from tests.kernels.tables import Entry, make_table, make_work

WIDTH, TOKENS, SLOTS = 64, 5, 7
EDIT = torch.ops.saesteer.edit_.default
MAP = ops.map_
STREAM, SECOND, NORM_WEIGHT, COUNTS, SITE, FORM = range(6)  # places in the schema
MUTATED = (STREAM, SECOND, COUNTS)  # of the arguments; cells and scratch are bound

KEY = Entry(1, low=-1e9, gates=2, flags=layout.GATE)
GROUPS = [[KEY], [Entry(3, shift=2.0, gates=2, counter=1), Entry(0, scale=0.0, shift=4.0)]]
FORMS = pytest.mark.parametrize("form", [BARE, NORMED, PAIR], ids=["bare", "normed", "pair"])
WHOLE = [[Entry(0, flags=layout.RECONSTRUCT, size=SLOTS), Entry(2, shift=1.0)]]


def edit_args(
    device: torch.device,
    form: int = NORMED,
    tokens: int = TOKENS,
    dtype: torch.dtype | None = None,
    groups: Any = GROUPS,
) -> tuple[Any, Bound]:
    """Arguments of edit_ in the order of the schema, and what is bound: token 1 and 3 are steered, by row 1."""
    rng = torch.Generator().manual_seed(form)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=of, device=device)

    room, dense = max(tokens, 8), SLOTS
    bound = Bound(
        index=zeros(1, of=torch.int32),
        table=make_table([[groups]], 1, device, dense=(0, dense)),
        work=make_work([(t, 1, t) for t in (1, 3) if t < tokens], room, device),
        positions=torch.arange(room, device=device),
        kinds=torch.tensor([7], dtype=torch.int32),
        w_enc=normal(SLOTS, WIDTH),
        w_dec=normal(SLOTS, WIDTH),
        b_enc=zeros(SLOTS),
        threshold=zeros(SLOTS),
        b_dec=zeros(2, WIDTH),
        cells=zeros(room, of=torch.int32),
        registers=zeros(room, 4),
        scratch=zeros(layout.scratch_words(WIDTH, dense, layout.TILE)),
        dense_size=dense,
        has_norms=True,
    )
    bind(bound)
    args = [
        normal(tokens, WIDTH),
        None if form == BARE else normal(tokens, WIDTH),
        normal(WIDTH) if form == NORMED else None,
        zeros(2, 4, of=torch.int32),
        bound.index,
        form,
        1e-6,
        1.0,
    ]
    return args, bound


def map_args(device: torch.device, span: int = 1) -> Any:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = make_table([[[[Entry(0)]]], [[]]], 1, device)
    return [
        make_work([], 8, device),
        ints(1, 0, 7),
        1,
        ints(0, 2, 5, 9),
        table,
        ints(*range(12)).view(3, 4),
        ints(*range(4)).view(1, 4),
        News(ints(0), torch.float32),
        2,
        5,
        span,
    ]


def clone(args: Any) -> Any:
    """Copies of all arguments but the site, whose address counts."""
    return [a.clone() if isinstance(a, Tensor) and at != SITE else a for at, a in enumerate(args)]


def replaced(args: Any, at: int, value: object) -> Any:
    return [*args[:at], value, *args[at + 1 :]]
