"""One call of the op on a few small tokens, by the reference or by a way through the kernels. Judges nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saesteer.kernels.layout import BARE
from tests.kernels.harness import TOKEN, Call, Path, State, kinds_of, work_of
from tests.kernels.tables import Entry, Groups, make_positions, make_table, write_row

WIDTH = 8
Run = Callable[..., State]
Rows = list[list[float]]


def edit(
    path: Path | None,
    x: Rows | Tensor,
    groups: Groups,
    *,
    start: int = 0,
    form: int = BARE,
    second: Tensor | None = None,
    encoder: Rows | None = None,
    b_enc: list[float] | None = None,
    threshold: list[float] | None = None,
    b_dec: list[float] | None = None,
    dense: tuple[int, int] = (0, 0),
    cells: list[int] | None = None,
    registers: Rows | None = None,
    kept: Rows | None = None,
    norms: bool = False,
    limit: float | None = None,
    captures: int = 0,
) -> State:
    """One request's tokens; features are the unit vectors, or the encoder rows given. None: the reference.

    With a limit (0: any) doses are measured, in columns 4 to 7 of counts.
    """
    stream = x.clone() if isinstance(x, Tensor) else torch.tensor(x)
    tokens = len(stream)
    eye = torch.eye(WIDTH).to(stream.dtype)
    w_enc = eye if encoder is None else torch.tensor(encoder).to(stream.dtype)
    slots = len(w_enc)
    listed = [(t, 1, start + t) for t in range(tokens)]
    table = make_table([[groups]], 1, dense=dense)
    if limit is not None or captures:
        write_row(table, 1, [groups], dense, () if limit is None else [4], limit or 0.0, captures)
    weights = (
        w_enc,
        eye[torch.arange(slots) % WIDTH],
        torch.tensor(b_enc or [0.0] * slots),
        torch.tensor(threshold or [0.0] * slots),
        torch.tensor([b_dec or [0.0] * WIDTH]),
    )
    site = torch.zeros(1, dtype=torch.int32)
    work = work_of(listed, table, path or TOKEN, tokens)
    where = make_positions(listed, tokens)
    call = Call(None, table, site, work, where, kinds_of(listed, table, 1), weights, form, dense[1], norms)
    before = torch.tensor(cells or [0] * tokens, dtype=torch.int64).int()
    counts = torch.zeros(2, 4 if limit is None else 8, dtype=torch.int32)
    state = State(stream, None if second is None else second.clone(), before, counts)
    if registers is not None:
        state.registers = torch.tensor(registers)
    if kept is not None:
        state.kept = torch.tensor(kept)
    if captures:
        state.before, state.after = torch.full_like(stream, 77.0), torch.full_like(stream, 77.0)
    if path is None:
        call.reference(state)
    else:
        call.kernel(state, path)
    return state


def ramp(*firsts: float) -> Rows:
    """Tokens whose element 0 is given and whose others are 1, 2, 3, ..."""
    return [[first, *map(float, range(1, WIDTH))] for first in firsts]


def along(*values: float) -> Rows:
    """Encoder rows that read these multiples of element 0."""
    return [[value, *[0.0] * (WIDTH - 1)] for value in values]


NOTHING = [Entry(7, shift=1.0, hi=0)] * 8  # fills a group up, so that another kernel form takes it
