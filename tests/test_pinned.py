"""Memory in which rows come home: parts never overlap while somebody holds them, and all of it comes back."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.engine.pinned import Pinned

NBYTES = 8192
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])


def rows(number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count, 8), number % 128).to(dtype)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 80), DTYPES, st.booleans(), st.integers(0, 9)), max_size=40))
def test_nobody_writes_over_what_is_held(steps: list[tuple[int, torch.dtype, bool, int]]) -> None:
    memory = Pinned(NBYTES, locked=False)
    held: list[tuple[Any, bytes]] = []
    for number, (count, dtype, slices, gone) in enumerate(steps):
        came = rows(number, count, dtype)
        there = memory.copied(came)
        if there is not None:
            expected = came.view(torch.uint8).numpy().tobytes()
            assert there.tobytes() == expected
            # A writer holds slices of it alone.
            held.append((there[5:] if slices else there, expected[5:] if slices else expected))
        del there
        if gone < len(held):
            del held[gone]
        assert all(bytes(one) == was for one, was in held)
    held.clear()
    assert memory.copied(rows(1, NBYTES // 8, torch.uint8)) is not None, "in one piece again"


def test_what_does_not_fit_is_not_taken() -> None:
    memory = Pinned(NBYTES, locked=False)
    assert memory.copied(rows(0, NBYTES // 8 + 1, torch.uint8)) is None
    first = memory.copied(rows(1, NBYTES // 16, torch.uint8))
    second = memory.copied(rows(2, NBYTES // 16, torch.uint8))
    assert first is not None and second is not None
    assert memory.copied(rows(3, 1, torch.uint8)) is None
    del first
    third = memory.copied(rows(4, NBYTES // 16, torch.uint8))
    assert third is not None and third[0] == 4 and second[0] == 2
