"""Memory in which rows come home: parts never overlap while somebody has them, and all of it comes back."""

import os
from mmap import mmap

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.engine.shared import Shared

NBYTES = 8192


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 9)), max_size=40))
def test_nobody_writes_over_what_somebody_has(steps: list[tuple[int, int]]) -> None:
    memory = Shared(NBYTES, locked=False)
    other = mmap(memory.file, 0)  # as another process has it
    held: list[tuple[int, int, bytes]] = []
    for number, (size, gone) in enumerate(steps):
        lo = memory.take(size)
        if lo is not None:
            memory.at(lo, size)[:] = number
            held.append((lo, lo + size, bytes([number]) * size))
        if gone < len(held):
            lo, hi, _ = held.pop(gone)
            memory.give(lo, hi)
        assert all(other[lo:hi] == was for lo, hi, was in held)
        assert not memory.landed.any(), "the number before all of it stays"
    for lo, hi, _ in held:
        memory.give(lo, hi)
    assert memory.take(NBYTES) is not None, "in one piece again"


def test_what_does_not_fit_is_not_taken() -> None:
    memory = Shared(NBYTES, locked=False)
    assert memory.take(NBYTES + 1) is None
    first, second = memory.take(NBYTES // 2), memory.take(NBYTES // 2)
    assert first is not None and second is not None
    assert memory.take(1) is None
    memory.give(first, first + NBYTES // 2)
    assert memory.take(1) == first


def test_it_ends_with_who_has_made_it() -> None:
    memory = Shared(NBYTES, locked=False)
    number, part = memory.file, memory.at(0, NBYTES)
    part.fill_(3)
    del memory
    assert not os.path.exists(f"/proc/self/fd/{number}")
    assert torch.equal(part, torch.full_like(part, 3)), "but not before all who have a part of it"
