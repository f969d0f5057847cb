"""The kernel that writes rows to their slots and its reference, against torch's own assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels import ops
from saesteer.kernels.place import place_triton
from saesteer.kernels.reference import place_ref

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]


@settings(max_examples=100 if GPU else 40, deadline=None, derandomize=True, database=None)
@given(
    sites=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 3, 17, 64, 1023, 1024, 1025, 2304]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_rows_go_to_their_slots_and_nowhere_else(sites: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
    draw = np.random.default_rng(seed)
    wanted = [(site, slot) for site, slots in enumerate(sites) for slot in range(slots) if draw.random() < 0.5]
    rows = [draw.standard_normal(width).astype(np.float32) for _ in wanted]
    for function, device in ((place_ref, "cpu"), (place_triton, "cuda" if GPU else "cpu")):
        weights = [torch.full((2, slots, width), 7.0, dtype=dtype, device=device) for slots in sites]
        if wanted:
            function([(weights[site][0], weights[site][1], slot) for site, slot in wanted], rows)
        for site, slots in enumerate(sites):
            want = torch.full((slots, width), 7.0, dtype=dtype)
            for (at, slot), row in zip(wanted, rows, strict=True):
                if at == site:
                    want[slot] = torch.from_numpy(row).to(dtype)
            assert all(torch.equal(one.cpu(), want) for one in weights[site])


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], int, str]] = {
    "another dtype": (lambda w: w.double(), 0, "weights"),
    "strided": (lambda w: w.t().contiguous().t(), 0, "weights"),
    "a row": (lambda w: w[0], 0, "weights"),
    "narrow": (lambda w: w[:, :-1].contiguous(), 0, "slot 0"),
    "behind the last": (lambda w: w, 3, "slot 3"),
    "in front of the first": (lambda w: w, -1, "slot -1"),
}


@pytest.mark.parametrize(("change", "slot", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(change: Any, slot: int, said: str, device: torch.device) -> None:
    weights, row = torch.zeros(3, 4, device=device), np.zeros(4, dtype=np.float32)
    with pytest.raises(ValueError, match=f"^{said}"):
        ops.place([(weights, change(weights), slot)], [row])
    ops.place([], [])
