"""The map kernel and its reference against a loop in Python: which tokens are steered, in batch order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels.reference import map_ref_
from saesteer.kernels.work import map_triton

GARBAGE = -77


def check(
    run: Callable[..., None],
    device: torch.device,
    requests: list[tuple[int, bool, int]],  # tokens, steered, first position
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int32,
    position_dtype: torch.dtype = torch.int64,
) -> None:
    n, tokens = len(requests), sum(length for length, _, _ in requests)
    slots = torch.randperm(n + 3, generator=torch.Generator().manual_seed(n))[:n]
    table = torch.zeros(n + 4, 48, dtype=torch.int32)
    want: list[list[int]] = []
    positions: list[int] = []
    starts = [0]
    for slot, (length, steered, first) in zip(slots.tolist(), requests, strict=True):
        table[slot + 1, 0] = 3 * steered
        for i in range(length):
            if steered:
                want.append([len(positions), slot + 1, first + i, 0])
            positions.append(first + i)
        starts.append(len(positions))
    # Padding as in a captured batch: slots and starts behind the requests are not to be read.
    work = torch.full((tokens + padding + 2, 4), GARBAGE, dtype=torch.int32, device=device)
    run(
        work,
        torch.tensor([*slots.tolist(), *[10**6] * padding], dtype=slot_dtype, device=device),
        1,
        torch.tensor([*starts, *[-(10**6)] * padding], dtype=torch.int32, device=device),
        torch.tensor([*positions, *[GARBAGE] * padding], dtype=position_dtype, device=device),
        table.to(device),
        n,
    )
    assert work[0, 0] == len(want)
    assert work[1 : 1 + len(want)].tolist() == want
    assert (work[1 + len(want) :] == GARBAGE).all()


@pytest.fixture(params=[map_ref_, map_triton], ids=["reference", "kernel"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


@pytest.fixture
def where(run: Callable[..., None], device: torch.device) -> torch.device:
    return torch.device("cpu") if run is map_ref_ else device


REQUESTS = st.lists(st.tuples(st.integers(0, 40) | st.just(1), st.booleans(), st.integers(0, 2**20)), max_size=20)


@settings(max_examples=100 if torch.cuda.is_available() else 25, deadline=None, derandomize=True, database=None)
@given(requests=REQUESTS, padding=st.integers(0, 3), wide=st.booleans(), long=st.booleans())
def test_any_batch(requests: list[tuple[int, bool, int]], padding: int, wide: bool, long: bool) -> None:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtypes = [torch.int32, torch.int64]
    for function, place in ((map_ref_, torch.device("cpu")), (map_triton, device)):
        check(function, place, requests, padding, dtypes[wide], dtypes[long])


def test_an_empty_batch(run: Callable[..., None], where: torch.device) -> None:
    check(run, where, [])
    check(run, where, [], padding=2)


def test_nobody_is_steered(run: Callable[..., None], where: torch.device) -> None:
    check(run, where, [(3, False, 0), (1, False, 9)])


def test_a_long_prefill_between_decodes(run: Callable[..., None], where: torch.device) -> None:
    check(run, where, [(1, True, 50), (3000, True, 2048), (1, False, 7), (1, True, 8)])


@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049] if torch.cuda.is_available() else [1025])
def test_many_requests(run: Callable[..., None], where: torch.device, n: int) -> None:
    check(run, where, [(1, b % 3 != 1, b) for b in range(n)])
