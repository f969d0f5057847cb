"""A request gets the same bits in any company and at any place of the step, and counts are exact over many tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels import layout
from saesteer.kernels.layout import BARE
from tests.kernels.harness import GPU, TILED, TOKEN, Call, Case, Path, State, a_world, bits, kinds_of, work_of
from tests.kernels.requests import Wish
from tests.kernels.shapes import DRAWN, PATHS, SHAPES, Shape
from tests.kernels.tables import Entry, make_positions, make_table, write_row


def alone(case: Case, site: int, path: Path, row: int, skip: int, together: State, before: State) -> None:
    """The request's tokens from the `skip`-th on, at the end of a step of the same size: as they became in company."""
    mine = [listed for listed in case.tokens if listed[1] == row][skip:]
    first = case.room - len(mine)
    moved = [(first + at, row, position) for at, (_, _, position) in enumerate(mine)]
    old, new = [token for token, _, _ in mine], [token for token, _, _ in moved]
    state = State(
        torch.full_like(before.stream, torch.nan),
        None if before.second is None else torch.full_like(before.second, torch.nan),
        torch.zeros_like(before.cells),
        before.counts.clone(),
    )
    for ours, theirs in ((state.stream, before.stream), (state.second, before.second), (state.cells, before.cells)):
        if ours is not None and theirs is not None:
            ours[new] = theirs[old]
    case.call(site, path, moved).kernel(state, path)
    assert torch.equal(bits(state.stream)[new], bits(together.stream)[old])
    assert torch.equal(state.cells[new], together.cells[old])
    if state.second is not None and together.second is not None:
        assert torch.equal(bits(state.second)[new], bits(together.second)[old])
    if not skip:
        ours, theirs = state.counts[row].clone(), together.counts[row].clone()
        if doses := case.doses(row - 1)[site]:  # a sum's last digits depend on who comes first
            at = doses + layout.DOSE_SUM
            torch.testing.assert_close(ours[at : at + 1].view(torch.float32), theirs[at : at + 1].view(torch.float32))
            ours[at] = theirs[at]
        assert torch.equal(ours, theirs)
    others = [other for other in range(len(case.counts)) if other != row]
    assert torch.equal(state.counts[others], before.counts[others])


@settings(DRAWN, max_examples=100 if GPU else 5)
@given(
    kinds=st.lists(st.sampled_from(["clamps", "list", "dense"]), min_size=2, max_size=3),
    edits=st.sampled_from([1, 2, 5, 16, 40]),
    gated=st.booleans(),
    path=st.sampled_from(PATHS),
    shape=SHAPES,
    seed=st.integers(0, 2**16),
)
def test_a_request_gets_the_same_bits_in_any_company(
    kinds: list[str], edits: int, gated: bool, path: Path, shape: Shape, seed: int
) -> None:
    width, dtype, form = shape
    rng = np.random.default_rng(seed)
    runs, limits = [3, 1, 70 if GPU else 2], [0.05, None, 0.0]
    wished = [
        Wish(kind, max(edits // (1 + at), 1) if kind == "clamps" else min(edits, 6), runs[at], gated, limits[at])
        for at, kind in enumerate(kinds)
    ]
    drawer = a_world(rng, width, dtype, 100, edits, (1, 37, 130))
    case = Case(drawer.world, [drawer.request(wish) for wish in wished], dtype, form, seed)
    states = case.run(path)
    for row in range(1, len(kinds) + 1):
        before = case.start(1)
        before.cells, before.counts = states[0].cells, states[0].counts
        # From the second token on: the item then begins there.
        alone(case, 1, path, row, (seed + row) % 2, states[1], before)


@pytest.mark.parametrize("entries", [1, 2, 9, 37, 300 if GPU else 60], ids="entries{}".format)
@pytest.mark.parametrize("path", [None, *PATHS], ids=str)
def test_counts_are_exact_over_many_tokens(path: Path | None, entries: int) -> None:
    """Each entry of two requests changes the tokens of its window; neighbouring ones share a counter."""
    many = 1000 if GPU else 70 if path in (None, TILED) else 5
    lows = [7 * entry % many for entry in range(entries)]
    group = [Entry(0, shift=1.0, lo=lo, hi=many - lo // 2, counter=at // 2) for at, lo in enumerate(lows)]
    table = make_table([[[group]], [[group[: entries // 2 + 1]]]], 1)
    listed = [(t, 1, t) for t in range(many)] + [(many + t, 2, t) for t in range(many // 2)]
    counts = torch.full((3, entries + 1), 2**30, dtype=torch.int32)
    want = counts.clone()
    for row, length in ((1, entries), (2, entries // 2 + 1)):
        tokens = many if row == 1 else many // 2
        for entry in group[:length]:
            want[row, entry.counter] += max(0, min(entry.hi, tokens) - entry.lo)
    eye, zeros = torch.eye(8), torch.zeros(8)
    weights = (eye, eye, zeros, zeros, torch.zeros(1, 8))
    site, room = torch.zeros(1, dtype=torch.int32), len(listed)
    work = work_of(listed, table, path or TOKEN, room)
    call = Call(
        None, table, site, work, make_positions(listed, room), kinds_of(listed, table, 1), weights, BARE, 0, False
    )
    state = State(torch.zeros(room, 8), None, torch.zeros(room, dtype=torch.int32), counts)
    if path is None:
        call.reference(state)
    else:
        call.kernel(state, path)
    assert torch.equal(state.counts, want)


@pytest.mark.parametrize("path", [None, *PATHS], ids=str)
def test_a_feature_is_as_active_for_its_clamp_as_in_the_reconstruction(path: Path | None) -> None:
    """Thresholds are where fp32 may fall on either side: all clamped to 0, nothing but b_dec is left of the token."""
    width, features, tokens = 61, 40, 6
    draw = torch.Generator().manual_seed(0)
    w_enc, w_dec = (torch.randn(features * tokens, width, generator=draw) for _ in range(2))
    x, b_dec = torch.randn(tokens, width, generator=draw), torch.randn(1, width, generator=draw)
    threshold = torch.cat([(x[t] @ w_enc[t * features : (t + 1) * features].T) for t in range(tokens)])
    groups = []
    for base in range(0, features * tokens, features):
        group = [Entry(base + i, scale=0.0, threshold=float(threshold[base + i])) for i in range(features)]
        groups.append([[[*group, Entry(0, flags=layout.RECONSTRUCT, size=features)]]])
    table = make_table(groups, 1)
    for row in range(tokens):  # each token has a dictionary of its own
        write_row(table, row + 1, groups[row], (row * features, features))
    listed = [(t, t + 1, t) for t in range(tokens)]
    weights = (w_enc, w_dec, torch.zeros(len(w_enc)), threshold, b_dec)
    work = work_of(listed, table, path or TOKEN, tokens)
    site = torch.zeros(1, dtype=torch.int32)
    where, kinds = make_positions(listed, tokens), kinds_of(listed, table, 1)
    call = Call(None, table, site, work, where, kinds, weights, BARE, features, False)
    state = State(x, None, torch.zeros(tokens).int(), torch.zeros(tokens + 1, 1).int())
    if path is None:
        call.reference(state)
    else:
        call.kernel(state, path)
    torch.testing.assert_close(state.stream, b_dec.expand(tokens, width), atol=1e-3, rtol=0)
