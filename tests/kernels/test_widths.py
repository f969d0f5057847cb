"""Sites of two widths in one step: kernel and reference agree, and share all but the weights. Knows the op's call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.kernels.edit.launch import edit_triton
from saesteer.kernels.reference import edit_ref_
from tests.kernels.calls import SLOTS, edit_args
from tests.kernels.tables import Entry, copied, make_positions, make_table, make_work

NARROW, WIDE = 40, 136  # with the same blocks for neither
TOKENS, REGISTER = 6, 3
KEY = [
    Entry(1, low=0.0, gates=2, flags=layout.GATE),
    Entry(2, scale=2.0, low=-3.0, high=3.0, threshold=-math.inf, gates=REGISTER, flags=layout.READ),
]
MANY = [Entry(n % SLOTS, shift=1.0 + n, scale=0.0, counter=n % 4) for n in range(11)]  # more than one program's part
WHOLE = [Entry(0, flags=layout.RECONSTRUCT, size=SLOTS), Entry(2, shift=1.0)]
HELD = [Entry(3, shift=2.0, gates=2, factor=REGISTER, flags=layout.SCALED, counter=1)]
# What a row does at the one site, and then at the other.
ROWS = {
    "a gate and a read": ([KEY], [HELD]),
    "programs that share a token": ([MANY], [MANY]),
    "whole dictionaries": ([WHOLE], [WHOLE]),
    "one entry": ([[Entry(4, shift=2.0)]], [[Entry(4, shift=2.0)]]),
}


def sites(groups: Any, device: torch.device, span: int) -> list[Bound]:
    """What is bound to two sites, with one table, list, cells, registers and scratch."""
    draw = torch.Generator().manual_seed(1)
    items = [(0, 1, 3, 4), (5, 1, 9, 1)] if span > 1 else [(t, 1, 3 + t) for t in (0, 1, 2, 3)] + [(5, 1, 9)]
    shared = copied(
        edit_args(device)[1],
        table=make_table([groups], 2, device, dense=(0, SLOTS)),
        work=make_work(items, 8, device, span=span),
        positions=make_positions(items, 8, device),
        cells=torch.zeros(8, dtype=torch.int32, device=device),
        registers=torch.zeros(8, 4, device=device),
        scratch=torch.full((layout.scratch_words(WIDE, SLOTS, layout.TILE),), torch.nan, device=device),
    )
    shared.scratch[: layout.PARTIALS] = 0

    def site(number: int, width: int) -> Bound:
        own = {
            "index": torch.tensor([number], dtype=torch.int32, device=device),
            "w_enc": torch.randn(SLOTS, width, generator=draw).to(device) / width**0.5,
            "w_dec": torch.randn(SLOTS, width, generator=draw).to(device),
            "b_dec": torch.randn(2, width, generator=draw).to(device),
        }
        kept = ("table", "work", "positions", "cells", "registers", "scratch")
        return copied(shared, **own, **{name: getattr(shared, name) for name in kept})

    return [site(number, width) for number, width in enumerate((NARROW, WIDE))]


def run(kernel: bool, bounds: list[Bound], tiled: bool) -> tuple[list[Tensor], Tensor]:
    """Both sites in turn, and the first once more, whose table says the same: the streams, and the counts."""
    draw, device = torch.Generator().manual_seed(2), bounds[0].table.device
    counts = torch.zeros(2, 4, dtype=torch.int32, device=device)
    found = []
    for bound in (*bounds, bounds[0]):
        stream = torch.randn(TOKENS, bound.width, generator=draw).to(device)
        with np.errstate(all="ignore"):
            if kernel:
                edit_triton(stream, None, None, counts, bound, layout.BARE, 0.0, 0.0, tiled=tiled)
            else:
                edit_ref_(stream, None, None, counts, bound, layout.BARE, 0.0, 0.0)
        found.append(stream.cpu())
    assert not bounds[0].scratch[: layout.PARTIALS].any(), "arrivals are left behind"
    return found, counts.cpu()


@pytest.mark.parametrize("span", [1, layout.TILE])
@pytest.mark.parametrize("name", ROWS)
def test_sites_of_two_widths(name: str, span: int, device: torch.device) -> None:
    truth, counted = run(False, sites(ROWS[name], torch.device("cpu"), span), False)
    ours, counts = run(True, sites(ROWS[name], device, span), span > 1)
    draw = torch.Generator().manual_seed(2)
    for one, expected in zip(ours, truth, strict=True):
        before = torch.randn(TOKENS, one.shape[1], generator=draw)
        assert torch.equal(one[4], before[4]), "nobody's token"
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(counts, counted)
    assert counted.any(), "the row changes something"
