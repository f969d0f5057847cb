"""Doses as they are counted and limited: of random steps against truth.py, and exactly where numbers are round."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels import layout
from saesteer.kernels.edit.configs import EditConfig, configs
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import rms_norm_ref
from tests.kernels.calls import FORMS
from tests.kernels.exact import NOTHING, Run, edit
from tests.kernels.harness import EPS, GPU, OFFSET, SPANS, TILED, TOKEN, Case, Path, State, a_world, bits, check
from tests.kernels.requests import Wish
from tests.kernels.shapes import DRAWN, SHAPES, Shape
from tests.kernels.tables import Entry, Groups

# Rows of each kind: the first are measured and limited, the last are not, and stand between.
COMPANY = [
    [Wish("clamps", 1, 2, False, 0.02), Wish("clamps", 5, 2), Wish("clamps", 37, 2, False, 0.3)],
    [Wish("list", 7, 2, True, 0.05), Wish("list", 5, 2, True), Wish("list", 4, 2, False, 0.0)],
    [Wish("dense", 3, 2, False, 0.1), Wish("clamps", 3, 1, True, 0.01), Wish("dense", 5, 2, True)],
    [Wish("elsewhere", 1, 3, True, 0.0), Wish("none", 0, 2), Wish("list", 6, 2, False, 1e-3)],
]
# A token held as three blocks, which tokens of a small width are not.
BLOCKS = replace(TOKEN, tuned=replace(configs(576), edit=((2**31, EditConfig(num_warps=1, chunk=4, programs=2)),)))


@FORMS
@pytest.mark.parametrize("wished", COMPANY, ids=["clamps", "lists", "dense", "elsewhere"])
@pytest.mark.parametrize("seed", range(6 if GPU else 1), ids="seed{}".format)
def test_doses_of_every_kind(wished: list[Wish], form: int, seed: int) -> None:
    path, width = (BLOCKS, 576) if wished in (COMPANY[0], COMPANY[3]) else (TOKEN, 130)
    check(wished, path, width=width, dtype=torch.float16, form=form, seed=7 * seed + form)


@pytest.mark.parametrize("form", [BARE, NORMED, PAIR] if GPU else [PAIR])
@pytest.mark.parametrize("path", [TILED, *([SPANS] if GPU else [])], ids=str)
def test_measured_rows_on_items(path: Path, form: int) -> None:
    """The kernels for long spans leave them to the edit kernel."""
    wished = [Wish("clamps", 1, 3, False, 0.02), Wish("clamps", 5, 2, False, 0.0), Wish("clamps", 6, 4)]
    assert check(wished, path, width=37, dtype=torch.float32, form=form, seed=form) > 4


@settings(DRAWN, max_examples=100 if GPU else 3)
@given(
    kinds=st.lists(st.sampled_from(["clamps", "list", "dense"]), min_size=1, max_size=2),
    edits=st.sampled_from([1, 5, 16]),
    gated=st.booleans(),
    shape=SHAPES,
    limit=st.sampled_from([0.0, 1e30]),
    seed=st.integers(0, 2**16),
)
def test_measuring_changes_nothing(
    kinds: list[str], edits: int, gated: bool, shape: Shape, limit: float, seed: int
) -> None:
    """Nor does a limit that no token reaches. A lone entry has a way of its own unless it is measured, and on a GPU the
    two may differ in a last bit of what they add up."""
    width, dtype, form = shape
    near = partial(torch.testing.assert_close, rtol=0, atol=8 * torch.finfo(dtype).eps, equal_nan=True)
    found: list[list[State]] = []
    for one in (None, limit):
        drawer = a_world(np.random.default_rng(seed), width, dtype, 100, edits, (1, 37, 130))
        wished = [Wish(kind, min(edits, 16 if kind == "clamps" else 6), 2, gated, one) for kind in kinds]
        case = Case(drawer.world, [drawer.request(wish) for wish in wished], dtype, form, seed)
        found.append(case.run(TOKEN))
        edits_end = case.edits
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.cells, theirs.cells)
        assert torch.equal(ours.counts[:, :edits_end], theirs.counts[:, :edits_end])
        for one, other in ((ours.stream, theirs.stream), (ours.second, theirs.second)):
            if one is None or other is None:
                continue
            if GPU:
                near(one, other)
            else:
                assert torch.equal(bits(one), bits(other))


@pytest.fixture(params=[None, TOKEN, TILED], ids=["reference", "span1", "tiled"])
def run(request: pytest.FixtureRequest) -> Run:
    return partial(edit, request.param)


def doses(state: State) -> tuple[Any, ...]:
    """Largest, sum, tokens and tokens above the limit."""
    words = state.counts[1, 4 : 4 + layout.DOSE_WORDS]
    most, total = words.view(torch.float32)[: layout.DOSE_TOKENS].tolist()
    return most, total, *words[layout.DOSE_TOKENS :].tolist()


FIVE = [3.0, 4.0, *[0.0] * 6]  # of length 5
ROUND = 2.0**-22  # of a square root, a division and two products, each to one part in 2^24 or, on a GPU, 2^23


def test_a_dose_is_of_what_was_asked_for_not_of_what_is_stored(run: Run) -> None:
    """1/8 is lost where a stream of 16 bits stands at 4096."""
    x = torch.tensor([[4096.0, *[0.0] * 7]], dtype=torch.float16)
    out = run(x, [[Entry(0, shift=0.125)]], limit=0.0)
    assert torch.equal(out.stream, x)
    assert doses(out) == (2.0**-15, 2.0**-15, 1, 0)


@pytest.mark.parametrize("filler", [[], NOTHING * 2], ids=["one", "parts"])
def test_a_limit_is_not_exceeded_and_may_be_reached(run: Run, filler: list[Entry]) -> None:
    group = [[Entry(0, shift=5.0), *filler]]
    at, below, half = (run([FIVE], group, limit=limit) for limit in (1.0, float(np.nextafter(np.float32(1), 0)), 0.5))
    assert doses(at) == (1.0, 1.0, 1, 0)
    assert at.stream[0].tolist() == [8.0, 4.0, *[0.0] * 6]
    # What is reported is what was asked for.
    assert doses(below) == doses(half) == (1.0, 1.0, 1, 1)
    assert below.stream[0, 0].item() == pytest.approx(8.0, rel=ROUND)
    assert half.stream[0].tolist() == [5.5, 4.0, *[0.0] * 6]


def test_only_edited_tokens_are_measured(run: Run) -> None:
    """One gate is open, and a window, and one feature is active."""
    key = Entry(1, low=0.0, gates=2, flags=layout.GATE)
    x = torch.tensor([[1.0, float(t % 2), *[0.0] * 6] for t in range(6)])
    out = run(x, [[key], [Entry(0, shift=1.0, gates=2, lo=2)]], limit=0.25)
    edited = [3, 5]
    assert out.stream[edited, 0].tolist() == [pytest.approx(1 + 0.25 * 2**0.5, rel=ROUND)] * 2
    assert out.stream[[0, 1, 2, 4]].tolist() == x[[0, 1, 2, 4]].tolist()
    assert doses(out) == (pytest.approx(0.5**0.5, rel=ROUND), pytest.approx(2**0.5, rel=ROUND), 2, 2)


@pytest.mark.parametrize("form", [NORMED, PAIR], ids=["normed", "pair"])
def test_both_tensors_are_of_the_limited_stream(run: Run, form: int) -> None:
    x = torch.tensor([FIVE, FIVE], dtype=torch.float16)
    second = torch.full_like(x, 7.0) if form == NORMED else x * 3
    out = run(x, [[Entry(2, shift=40.0, hi=1)]], form=form, second=second, limit=0.5)
    assert out.second is not None
    assert torch.equal(out.second[1], second[1])
    assert torch.equal(out.stream[1], x[1])
    if form == PAIR:  # the sum is four times FIVE
        assert out.stream[0].tolist() == [12.0, 16.0, 10.0, *[0.0] * 5]
        assert not out.second[0].any()
        assert doses(out) == (2.0, 2.0, 1, 1)
    else:
        assert out.stream[0].tolist() == [3.0, 4.0, 2.5, *[0.0] * 5]
        torch.testing.assert_close(out.second[:1], rms_norm_ref(out.stream[:1], None, EPS, OFFSET))


@pytest.mark.parametrize("limit", [0.0, 0.5, 2.0**-126], ids="limit{}".format)
@pytest.mark.parametrize("above", [1.0, 3e38, float("inf"), float("nan")], ids="x{}".format)
def test_doses_are_numbers_whatever_happens(run: Run, limit: float, above: float) -> None:
    """What is no number anywhere would be none in the counts for as long as the row lives."""
    x = [[above, *[1.0] * 7], [1.0] * 8]
    groups: Groups = [[Entry(at, shift=(-1) ** at * 3e38, gain=4.0) for at in range(8)], [Entry(0, shift=1.0)]]
    out = run(x, groups, limit=limit)
    assert out.stream.isfinite().all()
    assert np.isfinite(doses(out)[:2]).all()
    assert doses(out)[2:] == (2, 2 * (limit > 0))
    if limit:
        length = torch.linalg.vector_norm(out.stream[1] - 1)
        assert length <= limit * 8**0.5 * (1 + 1e-5) + 8 * 2.0**-24
