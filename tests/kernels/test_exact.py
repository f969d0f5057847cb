"""What must be exact, of kernel and reference: thresholds met, ties, borders of windows, groups, untouched bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels.edit import edit_triton
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import edit_ref_, rms_norm_ref
from saesteer.testing import Entry, Groups, make_table, make_work

WIDTH = 8


LAUNCH: Any = edit_triton  # its arguments come as one list


def kernel(*args: Any) -> None:
    LAUNCH(*args, has_topk=True)


@pytest.fixture(params=[edit_ref_, kernel], ids=["reference", "kernel"])
def edit(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., Tensor]:
    """x' [T, WIDTH] fp32 of one request's tokens; features are the unit vectors, or the encoder rows given."""

    def run(
        x: list[list[float]],
        groups: Groups,
        *,
        positions: list[int] | None = None,
        encoder: list[list[float]] | None = None,
        b_enc: list[float] | None = None,
    ) -> Tensor:
        stream = torch.tensor(x, device=device)
        eye = torch.eye(WIDTH, device=device)
        w_enc = eye if encoder is None else torch.tensor(encoder, device=device)
        bias = torch.zeros(len(w_enc), device=device) if b_enc is None else torch.tensor(b_enc, device=device)
        where = positions or list(range(len(x)))
        work = make_work([(t, 1, where[t]) for t in range(len(x))], len(x), device)
        site = torch.zeros(1, dtype=torch.int32, device=device)
        table = make_table([[groups]], 1, device)
        on_cpu = request.param is edit_ref_
        args = (stream, None, None, table, site, work, w_enc, eye[torch.arange(len(w_enc)) % WIDTH], bias)
        moved = [a.cpu() if on_cpu and isinstance(a, Tensor) else a for a in args]
        request.param(*moved, BARE, 0.0, 0.0)
        assert isinstance(moved[0], Tensor)
        return moved[0].cpu()

    return run


def ramp(*rows: float) -> list[list[float]]:
    """Tokens whose element 0 is given and whose others are 1, 2, 3, ..."""
    return [[row, *range(1, WIDTH)] for row in rows]


def test_a_threshold_is_strict(edit: Callable[..., Tensor]) -> None:
    above = 0.5 + 2**-20
    out = edit(ramp(0.5, above, 0.25), [[Entry(0, scale=2.0, threshold=0.5)]])
    assert out[:, 0].tolist() == [0.5, 2 * above, 0.25]


def test_zero_is_not_active(edit: Callable[..., Tensor]) -> None:
    out = edit(ramp(0.0, -1.0, 1.0), [[Entry(0, scale=0.0, shift=5.0, only_if_active=True)]])
    assert out[:, 0].tolist() == [0.0, -1.0, 5.0]
    out = edit(ramp(0.0, -1.0, 1.0), [[Entry(0, scale=0.0, shift=5.0)]])
    assert out[:, 0].tolist() == [5.0, 4.0, 5.0]


def test_identity_is_a_threshold_of_minus_infinity(edit: Callable[..., Tensor]) -> None:
    out = edit(ramp(-3.0, 4.0), [[Entry(0, scale=0.0, shift=1.0, threshold=-torch.inf)]])
    assert out[:, 0].tolist() == [1.0, 1.0]
    capped = edit(ramp(-3.0, 4.0, 0.0), [[Entry(0, low=-1.0, high=2.0, threshold=-torch.inf)]])
    assert capped[:, 0].tolist() == [-1.0, 2.0, 0.0]


def test_windows_are_half_open(edit: Callable[..., Tensor]) -> None:
    out = edit(ramp(1.0, 1.0, 1.0, 1.0), [[Entry(0, shift=1.0, lo=6, hi=8)]], positions=[5, 6, 7, 8])
    assert out[:, 0].tolist() == [1.0, 2.0, 2.0, 1.0]


def test_a_group_reads_one_x_and_groups_follow_each_other(edit: Callable[..., Tensor]) -> None:
    double = Entry(0, scale=2.0)
    assert edit(ramp(1.0), [[double, double, double]])[0, 0] == 4.0  # 1 + 1 + 1 + 1
    assert edit(ramp(1.0), [[double], [double], [double]])[0, 0] == 8.0
    assert edit(ramp(1.0), [[double] * 5, [double] * 9, [double]])[0, 0] == 6 * 10 * 2
    assert edit(ramp(1.0), [[double] * 5, [Entry(0, scale=0.0, shift=1.0)]])[0, 0] == 1.0


def test_gain_multiplies_the_delta(edit: Callable[..., Tensor]) -> None:
    assert edit(ramp(2.0), [[Entry(0, scale=0.0, shift=6.0, gain=0.5)]])[0, 0] == 4.0
    assert edit(ramp(2.0), [[Entry(0, scale=0.0, shift=6.0, gain=0.0)]])[0, 0] == 2.0


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_ties_in_topk_go_to_the_lower_index(edit: Callable[..., Tensor], k: int) -> None:
    # Activations 9 | 3 5 3 3 1 | 9 with the dictionary in the middle; the order is 2, 1, 3, 4, 5.
    encoder = [[v, *[0.0] * (WIDTH - 1)] for v in (9, 3, 5, 3, 3, 1, 9)]
    group = [Entry(slot, scale=2.0, topk=(1, 5, k)) for slot in (1, 2, 3, 4, 5)]
    out = edit([[1.0] + [0.0] * (WIDTH - 1)], [group], encoder=encoder)
    kept = {slot for slot, f in ((1, 3), (2, 5), (3, 3), (4, 3), (5, 1)) if out[0, slot] == f}
    assert kept == {2, 1, 3, 4, 5} - set([2, 1, 3, 4, 5][k:])


def test_topk_counts_the_bias_of_the_others(edit: Callable[..., Tensor]) -> None:
    encoder = [[1.0, *[0.0] * (WIDTH - 1)]] * 3
    x = [[1.0] + [0.0] * (WIDTH - 1)]
    for bias, active in ((0.5, False), (-0.5, True)):
        out = edit(x, [[Entry(1, scale=3.0, topk=(0, 3, 1))]], encoder=encoder, b_enc=[bias, 0.0, -2.0])
        assert out[0, 1] == (2.0 if active else 0.0)


def test_topk_and_its_neighbours_in_one_chunk(edit: Callable[..., Tensor]) -> None:
    encoder = [[v, *[0.0] * (WIDTH - 1)] for v in (1, 2, 3, 4)]
    group = [Entry(0, scale=2.0), Entry(2, scale=2.0, topk=(0, 4, 1)), Entry(3, scale=2.0, topk=(0, 4, 1))]
    out = edit([[1.0] + [0.0] * (WIDTH - 1)], [group], encoder=encoder)
    assert out[0].tolist() == [2.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("form", [NORMED, PAIR], ids=["normed", "pair"])
@pytest.mark.parametrize("run", [edit_ref_, kernel], ids=["reference", "kernel"])
def test_a_token_whose_deltas_are_all_zero_keeps_its_bits(
    run: Callable[..., None], form: int, device: torch.device
) -> None:
    device = torch.device("cpu") if run is edit_ref_ else device
    stream = torch.tensor(ramp(-1.0, 1.0, -2.0), dtype=torch.float16, device=device)
    second = torch.full_like(stream, 0.125)  # not the norm of anything: it would change if it were made anew
    before = stream.clone(), second.clone()
    groups = [[Entry(0, scale=0.0, shift=0.0), Entry(1, shift=1.0, lo=7)], [Entry(2, high=100.0)]]
    work = make_work([(0, 1, 0), (1, 1, 1), (2, 1, 2)], 3, device)
    site = torch.zeros(1, dtype=torch.int32, device=device)
    eye = torch.eye(WIDTH, dtype=torch.float16, device=device)
    zeros = torch.zeros(WIDTH, device=device)
    run(stream, second, None, make_table([[groups]], 1, device), site, work, eye, eye, zeros, form, 1e-6, 0.0)
    # Only token 1 has an active feature to set to 0 (at PAIR token 0 and 2 stay below 0 too).
    for after, was in ((stream, before[0]), (second, before[1])):
        assert torch.equal(after[[0, 2]], was[[0, 2]])
        assert not torch.equal(after[1], was[1])
    assert stream[1, 0] == 0.0


@pytest.mark.parametrize("run", [edit_ref_, kernel], ids=["reference", "kernel"])
def test_the_norm_is_of_the_stream_as_it_was_rounded(run: Callable[..., None], device: torch.device) -> None:
    device = torch.device("cpu") if run is edit_ref_ else device
    stream = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).half().to(device)
    second, weight = torch.zeros_like(stream), torch.ones_like(stream[0])
    w = torch.full((1, 1000), 1 / 32, dtype=torch.float16, device=device)
    table = make_table([[[[Entry(0, shift=0.3)]]]], 1, device)
    site = torch.zeros(1, dtype=torch.int32, device=device)
    work = make_work([(t, 1, t) for t in range(4)], 4, device)
    run(stream, second, weight, table, site, work, w, w, torch.zeros(1, device=device), NORMED, 1e-6, 0.0)
    # Of what was there before the rounding, two elements in five would differ.
    assert (second == rms_norm_ref(stream, weight, 1e-6, 0.0)).float().mean() > 0.98


def test_only_the_listed_site_counts(device: torch.device) -> None:
    table = make_table([[[[Entry(0, shift=1.0)]], [], [[Entry(1, shift=10.0)], [Entry(1, shift=20.0)]]]], 3, device)
    eye, zeros = torch.eye(WIDTH, device=device), torch.zeros(WIDTH, device=device)
    work = make_work([(0, 1, 0)], 1, device)
    sites = torch.arange(3, dtype=torch.int32, device=device)
    for site, want in ((0, [1.0, 0.0]), (1, [0.0, 0.0]), (2, [0.0, 30.0])):
        stream = torch.zeros(1, WIDTH, device=device)
        kernel(stream, None, None, table, sites[site : site + 1], work, eye, eye, zeros, BARE, 0.0, 0.0)
        assert stream[0, :2].tolist() == want


def test_row_0_and_an_empty_list_do_nothing(device: torch.device) -> None:
    table = make_table([[[[Entry(0, shift=1.0)]]]], 1, device)
    eye, zeros = torch.eye(WIDTH, device=device), torch.zeros(WIDTH, device=device)
    site = torch.zeros(1, dtype=torch.int32, device=device)
    for items in ([], [(0, 0, 5), (1, 0, 6)]):
        stream = torch.full((2, WIDTH), torch.nan, device=device)
        kernel(stream, None, None, table, site, make_work(items, 2, device), eye, eye, zeros, BARE, 0.0, 0.0)
        assert stream.isnan().all()
