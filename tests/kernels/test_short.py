"""Rows whose only entry reads a feature into a register, or takes one from there: the short way, against float64.

Their neighbours in the step go other ways. It knows the two halves of a clamp that reads at one site and writes at
another, and which rows layout.py calls SHORT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.layout import ANY, BARE, HELD, LONE, MATCH, NORMED, PAIR, READ, SHORT
from saesteer.kernels.reference import rms_norm_ref
from tests.kernels.exact import Run, along, ramp
from tests.kernels.harness import EPS, GPU, NEAR, OFFSET, TOKEN, Call, Path, State, bits, kinds_of, work_of
from tests.kernels.shapes import DRAWN, PATHS, SHAPES, Shape
from tests.kernels.tables import Entry, assert_as_accurate, make_positions, make_table

REGISTERS, SLOTS, START = 5, 9, 3
Listed = Sequence[tuple[int, int, int]]
REAL = st.floats(-3, 3, width=32)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """A READ, an entry with HELD or a plain one, with any law."""
    kind = draw(st.sampled_from([READ, HELD, HELD, 0]))
    low, high = sorted((draw(REAL), draw(REAL)))
    law: dict[str, Any] = draw(
        st.sampled_from([{"scale": 0.0}, {}, {"low": low}, {"high": high}, {"low": low, "high": high}])
    )
    lo = START + draw(st.integers(-1, 3))
    one = Entry(
        draw(st.integers(0, SLOTS - 1)),
        shift=draw(REAL),
        bias=draw(REAL),
        threshold=draw(st.sampled_from([0.0, -math.inf, 0.5])),
        lo=draw(st.sampled_from([0, lo])),
        hi=lo + draw(st.sampled_from([1, 2, 100])),
        gain=draw(st.sampled_from([1.0, 0.5, -2.0])),
        only_if_active=draw(st.booleans()),
        flags=kind | MATCH * (kind != READ and draw(st.booleans())),
        counter=draw(st.integers(0, 2)),
        **law,
    )
    register = draw(st.integers(0, REGISTERS - 1))
    if kind == READ:  # its MUL is that of f itself
        return replace(one, scale=1.0 + draw(REAL), gates=register, lo=0, only_if_active=False)
    return replace(one, size=register if kind else 0)


@dataclass
class Step:
    """Requests with one entry each, the last one with two."""

    rows: list[list[Entry]]
    listed: Listed  # token, row, position
    state: State
    norm_weight: Tensor | None
    weights: tuple[Tensor, ...]
    form: int

    def run(self, path: Path | None, only: int | None = None) -> State:
        """All requests, or only one row."""
        listed = [one for one in self.listed if only in (None, one[1])]
        table, room = make_table([[[group]] for group in self.rows], 1), len(self.state.stream)
        for row, group in enumerate(self.rows):
            kind = int(table[row + 1, layout.HEAD + layout.KIND])
            assert bool(kind & SHORT) == (len(group) == 1 and bool(group[0].flags & (READ | HELD)))
        work, where = work_of(listed, table, path or TOKEN, room), make_positions(listed, room)
        site, kinds = torch.zeros(1, dtype=torch.int32), kinds_of(listed, table, 1)
        call = Call(self.norm_weight, table, site, work, where, kinds, self.weights, self.form, 0, False)
        state = self.state.clone()
        call.reference(state) if path is None else call.kernel(state, path)
        return state


def a_step(rows: list[list[Entry]], tokens: list[int], shape: Shape, seed: int) -> Step:
    width, dtype, form = shape
    draw = torch.Generator().manual_seed(seed)
    listed = [(row, at) for row, count in enumerate(tokens, 1) for at in range(count)]
    room = len(listed) + 1
    state = State(
        (2 * torch.randn(room, width, generator=draw)).to(dtype),
        None if form == BARE else torch.randn(room, width, generator=draw).to(dtype),
        torch.randint(-(2**31), 2**31, (room,), generator=draw).int(),
        torch.randint(1000, (len(rows) + 1, 3), generator=draw).int(),
        # Some features are not active.
        torch.randn(room, REGISTERS, generator=draw).clamp_min(0.0),
    )
    encoder = torch.randn(SLOTS, width, generator=draw).to(dtype) / width**0.5
    decoder = torch.randn(SLOTS, width, generator=draw).to(dtype)
    none = torch.zeros(SLOTS)
    weight = torch.rand(width, generator=draw).to(dtype) if form == NORMED and seed % 2 else None
    numbered = [(token, row, START + at) for token, (row, at) in enumerate(listed)]
    return Step(rows, numbered, state, weight, (encoder, decoder, none, none, torch.zeros(1, width)), form)


def judge(step: Step, ours: State, theirs: State) -> None:
    """Hold a step against float64, with the reference as yardstick.

    Raises:
        AssertionError: less accurate, a wrong count or register, or a bit changed that nobody asked for.
    """
    was, form = step.state, step.form
    registers, counts = was.registers.double(), was.counts.clone()
    other = torch.ones_like(was.registers, dtype=torch.bool)  # registers that no entry fills
    edited, want, unsure = [], [], set()
    for token, row, position in step.listed:
        if len(step.rows[row - 1]) > 1:
            unsure.add(row)
            continue
        (one,) = step.rows[row - 1]
        x = was.stream[token]
        if form == PAIR and was.second is not None:
            x = x + was.second[token]
        x = x.double()
        pre = float(x @ step.weights[0][one.slot].double()) + one.bias
        f = pre if pre > one.threshold else 0.0
        if one.flags & READ:
            found = min(max((one.scale - 1.0) * f + one.shift, one.low), one.high)
            registers[token, one.gates] = math.nan if abs(pre - one.threshold) < NEAR else found
            other[token, one.gates] = False  # 0 may become -0
            continue
        if one.flags & HELD:
            f = float(was.registers[token, one.size])
        elif abs(pre - one.threshold) < NEAR:
            unsure.add(row)
            continue
        delta = one.gain * min(max((one.scale - 1.0) * f + one.shift, one.low - f), one.high - f)
        if not one.lo <= position < one.hi or (one.only_if_active and f == 0.0):
            delta = 0.0
        if 0.0 < abs(delta) < NEAR:
            unsure.add(row)
        elif delta:
            length = float(x.norm()) if one.flags & MATCH else 1.0
            edited.append(token)
            want.append(x + delta * length * step.weights[1][one.slot].double())
            counts[row, one.counter] += 1
    rows = [row for row in range(len(counts)) if row not in unsure]
    mine = [token for token, row, _ in step.listed if row not in unsure]
    for state in (ours, theirs):
        assert torch.equal(state.counts[rows], counts[rows])
        assert torch.equal(state.cells, was.cells)
        known = registers.isfinite()
        assert torch.allclose(state.registers[known].double(), registers[known], atol=1e-4, rtol=1e-4)
        assert torch.equal(bits(state.registers)[other], bits(was.registers)[other])
        quiet = [token for token in mine if token not in edited] + [len(was.stream) - 1]
        assert torch.equal(bits(state.stream)[quiet], bits(was.stream)[quiet])
        if state.second is not None and was.second is not None:
            assert torch.equal(bits(state.second)[quiet], bits(was.second)[quiet])
    edited, want = (
        [token for token in edited if token in mine],
        [y for t, y in zip(edited, want, strict=True) if t in mine],
    )
    if not want:
        return
    assert_as_accurate(ours.stream[edited], theirs.stream[edited], torch.stack(want))
    if form == NORMED and ours.second is not None:
        yardstick = rms_norm_ref(ours.stream[edited], step.norm_weight, EPS, OFFSET)
        truth = rms_norm_ref(ours.stream[edited].double(), step.norm_weight, EPS, OFFSET)
        assert_as_accurate(ours.second[edited], yardstick, truth.to(torch.float64))
    if form == PAIR and ours.second is not None:
        assert not ours.second[edited].any()


@settings(DRAWN, max_examples=100 if GPU else 25)
@given(
    singles=st.lists(entries(), min_size=1, max_size=4),
    pair=st.tuples(entries(), entries()).map(list),
    tokens=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    path=st.sampled_from(PATHS),
    shape=SHAPES,
    seed=st.integers(0, 2**16),
)
def test_rows_of_one_entry_beside_others(
    singles: list[Entry], pair: list[Entry], tokens: list[int], path: Path, shape: Shape, seed: int
) -> None:
    """As accurate as plain torch, and with the same bits in any company."""
    pair = [replace(one, flags=one.flags & ~READ, gates=0) for one in pair]  # reads are a group of their own
    step = a_step([*([one] for one in singles), pair], tokens[: len(singles) + 1], shape, seed)
    together = step.run(path)
    judge(step, together, step.run(None))
    row = 1 + seed % len(singles)
    alone, mine = step.run(path, row), [token for token, other, _ in step.listed if other == row]
    assert torch.equal(bits(alone.stream)[mine], bits(together.stream)[mine])
    assert torch.equal(bits(alone.registers)[mine], bits(together.registers)[mine])
    if alone.second is not None and together.second is not None:
        assert torch.equal(bits(alone.second)[mine], bits(together.second)[mine])
    assert torch.equal(alone.counts[row], together.counts[row])


def test_a_read_alone_is_bounded_and_needs_no_window(run: Run) -> None:
    """Its law is that of what it keeps, and a token outside of its window is read all the same."""
    one = Entry(0, scale=1.0 + 2.0, shift=0.5, low=-1.0, high=4.0, threshold=0.25, lo=7, hi=8, gates=2, flags=READ)
    out = run(ramp(0.25, 1.0, 9.0, -3.0), [[one]], encoder=along(1.0), registers=[[7.0] * 4] * 4)
    assert out.registers.tolist() == [[7.0, 7.0, kept, 7.0] for kept in (0.5, 2.5, 4.0, 0.5)]
    assert out.stream.tolist() == ramp(0.25, 1.0, 9.0, -3.0)
    assert not out.counts.any()


PLAIN: dict[str, Any] = {"gated": False, "groups": 1, "begin": 64, "dense": (0, 0, 0)}
OTHERS: dict[str, tuple[list[int], dict[str, Any], int]] = {
    "a read": ([READ], {}, ANY | SHORT),
    "a read into a later register": ([READ], {"gated": True}, ANY | SHORT),
    "held": ([HELD], {}, ANY | SHORT),
    "held, in lengths of x": ([HELD | MATCH | layout.ONLY_IF_ACTIVE], {}, ANY | SHORT),
    "held, for the answer": ([HELD | layout.ANSWER], {}, ANY | SHORT),
    "neither": ([0], {}, LONE),
    "held behind a gate": ([HELD], {"gated": True}, ANY | layout.GATED),
    "two reads": ([READ, READ], {"gated": True}, ANY | layout.GATED),
    "held, and another": ([HELD, 0], {}, ANY),
    "a ranked read": ([READ | layout.RANKED], {}, ANY),
    "a read of a normed dictionary": ([READ | layout.L2_NORM], {}, ANY),
    "a read of a dictionary of differences": ([READ | layout.LAYER_NORM], {}, ANY),
    "a transcoder's output": ([READ | layout.RECONSTRUCT], {}, ANY),
    "and where it is put": ([HELD | layout.RECONSTRUCT], {}, ANY),
    "a reconstruction": ([layout.RECONSTRUCT | layout.ANSWER], {"dense": (0, 4, 0)}, layout.FULL),
    "and an edit": ([layout.RECONSTRUCT, 0], {"dense": (0, 4, 0)}, ANY),
    "a ranked one": ([layout.RECONSTRUCT | layout.RANKED], {"dense": (0, 4, 0)}, ANY),
    "one by what was read": ([layout.RECONSTRUCT | layout.SCALED], {"dense": (0, 4, 0)}, ANY),
    "one behind a gate": ([layout.RECONSTRUCT], {"gated": True, "dense": (0, 4, 0)}, ANY | layout.GATED),
    "a measured one": ([layout.RECONSTRUCT], {"doses": 3, "dense": (0, 4, 0)}, ANY | 3 << layout.DOSE),
    "a captured one": ([layout.RECONSTRUCT], {"captures": layout.AFTER, "dense": (0, 4, 0)}, ANY | layout.AFTER),
    "held and scaled": ([HELD | layout.SCALED], {}, ANY),
    "measured": ([HELD], {"doses": 3}, ANY | 3 << layout.DOSE),
    "captured": ([READ], {"captures": layout.BEFORE}, ANY | layout.BEFORE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_which_kernel_does_a_row(name: str) -> None:
    flags, more, kind = OTHERS[name]
    assert layout.span_words(flags, **(PLAIN | more))[layout.KIND] == kind
