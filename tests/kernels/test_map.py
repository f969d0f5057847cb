"""The map kernel and its reference against a list comprehension: which tokens are steered, in batch order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels.layout import BEGIN, END, HEAD, MOST_PARTS, NEW, SITE_STRIDE, SPAN, TILE
from saesteer.kernels.reference import map_ref_
from saesteer.kernels.work import map_triton

GARBAGE = -77
SPANS = [1, TILE]
SITES = 4


def check(
    run: Callable[..., None],
    device: torch.device,
    requests: list[tuple[int, int, int]],  # tokens, parts (0: not steered), first position
    span: int,
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int32,
) -> None:
    n = len(requests)
    slots = torch.randperm(n + 3, generator=torch.Generator().manual_seed(n))[:n].tolist()
    starts = [sum(length for length, _, _ in requests[:b]) for b in range(n + 1)]
    # Parts of rows that are not steered, or of nobody, are what an earlier request left.
    table = torch.full((n + 4, 48), MOST_PARTS, dtype=torch.int32)
    table[:, 0] = 0
    for slot, (_, parts, first) in zip(slots, requests, strict=True):
        for site in range(SITES):  # as an earlier request left them, too
            table[slot + 1, HEAD + SPAN * site + END] = MOST_PARTS + (first >> site & 1)
        if parts:
            table[slot + 1, :4] = torch.tensor([3, parts, 0, parts % 2])
    assert table.shape[1] >= SPAN * SITES + HEAD and (table[:, HEAD + BEGIN] == MOST_PARTS).all()
    edited = [any(parts and first >> site & 1 for _, parts, first in requests) for site in range(SITES)]
    want = [
        [starts[b] + i, slots[b] + 1, min(span, length - i), 0]
        for b, (length, parts, first) in enumerate(requests)
        if parts
        for i in range(0, length, span)
    ]
    # Padding as in a captured batch: slots and starts behind the requests are not to be read.
    work = torch.full((starts[-1] + padding + 2, 4), GARBAGE, dtype=torch.int32, device=device)
    there, counts = table.to(device), torch.full((n + 4, 3), GARBAGE, dtype=torch.int32, device=device)
    sites = torch.full((SITES, SITE_STRIDE), GARBAGE, dtype=torch.int32, device=device)
    run(
        work,
        torch.tensor([*slots, *[10**6] * padding], dtype=slot_dtype, device=device),
        1,
        torch.tensor([*starts, *[-(10**6)] * padding], dtype=torch.int32, device=device),
        there,
        counts,
        sites,
        n,
        span,
    )
    assert sites[:, 0].tolist() == [site if edited[site] else ~site for site in range(SITES)]
    assert (sites[:, 1:] == GARBAGE).all()
    # Rows that were new count from 0 now; the table is otherwise as it was.
    new = [slot + 1 for slot, (_, parts, _) in zip(slots, requests, strict=True) if parts % 2]
    assert (counts == GARBAGE).all(1).logical_not().nonzero().flatten().tolist() == sorted(new)
    assert not counts[new].any()
    table[new, NEW] = 0
    assert torch.equal(there.cpu(), table)
    assert work[1 : 1 + len(want)].tolist() == want
    assert (work[1 + len(want) :] == GARBAGE).all()
    items, parts, its_span, _ = work[0].tolist()
    assert (items, its_span) == (len(want), span)
    # Requests without tokens in this step need not be looked at, but may.
    listed = max([1, *[parts for length, parts, _ in requests if parts and length]])
    assert listed <= parts <= max([1, *[parts for _, parts, _ in requests]])


@pytest.fixture(params=[map_ref_, map_triton], ids=["reference", "kernel"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


@pytest.fixture
def where(run: Callable[..., None], device: torch.device) -> torch.device:
    return torch.device("cpu") if run is map_ref_ else device


LENGTHS = st.integers(0, 5) | st.just(1) | st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE, 150])
REQUESTS = st.lists(st.tuples(LENGTHS, st.just(0) | st.integers(1, MOST_PARTS), st.integers(0, 2**20)), max_size=20)


@settings(max_examples=200 if torch.cuda.is_available() else 40, deadline=None, derandomize=True, database=None)
@given(requests=REQUESTS, span=st.sampled_from(SPANS), padding=st.integers(0, 3), wide=st.booleans())
def test_any_batch(requests: list[tuple[int, int, int]], span: int, padding: int, wide: bool) -> None:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtypes = [torch.int32, torch.int64]
    for function, place in ((map_ref_, torch.device("cpu")), (map_triton, device)):
        check(function, place, requests, span, padding, dtypes[wide])


@pytest.mark.parametrize("span", SPANS)
def test_an_empty_batch(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [], span)
    check(run, where, [], span, padding=2)


@pytest.mark.parametrize("span", SPANS)
def test_nobody_is_steered(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [(3, 0, 0), (1, 0, 9)], span)


@pytest.mark.parametrize("span", SPANS)
def test_a_long_prefill_between_decodes(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [(1, 1, 50), (3000, 16, 2048), (1, 0, 7), (1, 2, 8)], span)


@pytest.mark.parametrize("span", SPANS if torch.cuda.is_available() else [TILE])
@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049] if torch.cuda.is_available() else [1025])
def test_many_requests(run: Callable[..., None], where: torch.device, n: int, span: int) -> None:
    check(run, where, [(1, (b % 3 != 1) * (1 + b // 200), b) for b in range(n)], span)
