"""The map kernel and its reference against a list comprehension: which tokens are steered, in batch order."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.kernels.layout import BEGIN, COUNTED, HEAD, KIND, MOST_PARTS, SITE_STRIDE, SPAN, TILE, WHOLE, head
from saesteer.kernels.reference import map_ref_
from saesteer.kernels.step.map import map_triton
from saesteer.kernels.step.updates import News, pack

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
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
    come: float = 0.0,  # of the rows so many are news, and not in the table yet
    packed: bool = False,  # the slots come with them
    vectors: int = 0,
    widths: tuple[int, ...] = (1,),  # of the vectors, in turn
    dtype: torch.dtype = torch.float32,
) -> None:
    n = len(requests)
    slots = torch.randperm(n + 3, generator=torch.Generator().manual_seed(n))[:n].tolist()
    starts = [sum(length for length, _, _ in requests[:b]) for b in range(n + 1)]
    # Parts of rows that are not steered, or of nobody, are what an earlier request left.
    table = torch.full((n + 4, head(SITES)), MOST_PARTS, dtype=torch.int32)
    table[:, 0] = 0
    for slot, (_, parts, first) in zip(slots, requests, strict=True):
        for site in range(SITES):  # as an earlier request left them, too
            table[slot + 1, HEAD + SPAN * site + KIND] = first >> site & 1
        if parts:
            table[slot + 1, :3] = torch.tensor([3, parts, first >> 8 & (WHOLE | COUNTED)])
    assert (table[:, HEAD + BEGIN] == MOST_PARTS).all()
    edited = [any(parts and first >> site & 1 for _, parts, first in requests) for site in range(SITES)]
    want = [
        [starts[b] + i, slots[b] + 1, min(span, length - i), 0]
        for b, (length, parts, first) in enumerate(requests)
        if parts
        for i in range(0, length, span)
    ]
    # Padding as in a captured batch: slots and starts behind the requests are not to be read.
    work = torch.full((starts[-1] + padding + 2, 4), GARBAGE, dtype=torch.int32, device=device)
    draw = np.random.default_rng(n)
    new = [row for row in range(n + 4) if draw.random() < come]
    stale = table.clone()
    stale[new] = GARBAGE  # what an earlier request left, with entries or without
    stale[new, 0] = int(draw.integers(0, 3))
    there, counts = stale.to(device), torch.full((n + 4, 3), GARBAGE, dtype=torch.int32, device=device)
    sites = torch.full((SITES, SITE_STRIDE), GARBAGE, dtype=torch.int32, device=device)
    weights = [torch.full((2, vectors + 2, width), 7.0, dtype=dtype, device=device) for width in widths]
    chosen = [(n % len(widths), int(slot)) for n, slot in enumerate(draw.permutation(vectors + 2)[:vectors])]
    places = [(weights[of][0], weights[of][1], slot) for of, slot in chosen]
    values = [draw.standard_normal(widths[of]).astype(np.float32) for of, _ in chosen]
    slots_there = torch.tensor([*slots, *[10**6] * padding], dtype=slot_dtype, device=device)
    news = News(torch.zeros(1, dtype=torch.int32, device=device), dtype)
    if new or vectors or packed:
        rows = {row: table[row].numpy() for row in new}
        news, numbers = pack(there, dtype, rows, places, values, slots if packed else ())
        slots_there = numbers if packed else slots_there
    starts_there = torch.tensor([*starts, *[-(10**6)] * padding], dtype=torch.int32, device=device)
    run(work, slots_there, 1, starts_there, there, counts, sites, news, n, span)
    want_weights = [torch.full((vectors + 2, width), 7.0, dtype=dtype) for width in widths]
    for (of, slot), one in zip(chosen, values, strict=True):
        want_weights[of][slot] = torch.from_numpy(one).to(dtype)
    for pair, want_pair in zip(weights, want_weights, strict=True):
        assert all(torch.equal(one.cpu(), want_pair) for one in pair)
    assert sites[:, 0].tolist() == [site if edited[site] else ~site for site in range(SITES)]
    assert (sites[:, 1:] == GARBAGE).all()
    # Rows that came count from 0 now; the table is otherwise as it was.
    assert (counts == GARBAGE).all(1).logical_not().nonzero().flatten().tolist() == new
    assert not counts[new].any()
    assert torch.equal(there.cpu(), table)
    assert work[1 : 1 + len(want)].tolist() == want
    assert (work[1 + len(want) :] == GARBAGE).all()
    items, parts, its_span, needs = work[0].tolist()
    assert (items, its_span) == (len(want), span)
    # Requests without tokens in this step need not be looked at, but may.
    every = [first >> 8 & (WHOLE | COUNTED) for _, parts, first in requests if parts]
    here = [first >> 8 & (WHOLE | COUNTED) for length, parts, first in requests if parts and length]
    assert reduce(or_, here, 0) & ~needs == needs & ~reduce(or_, every, 0) == 0
    listed = max([1, *[parts for length, parts, _ in requests if parts and length]])
    assert listed <= parts <= max([1, *[parts for _, parts, _ in requests]])


@pytest.fixture(params=[map_ref_, map_triton], ids=["reference", "kernel"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


@pytest.fixture
def where(run: Callable[..., None], device: torch.device) -> torch.device:
    return torch.device("cpu") if run is map_ref_ else device


LENGTHS = st.integers(0, 5) | st.just(1) | st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE, 150])
WIDTHS = st.sampled_from([1, 2, 3, 17, 64, 1023, 1024, 1025, 2304])
REQUESTS = st.lists(st.tuples(LENGTHS, st.just(0) | st.integers(1, MOST_PARTS), st.integers(0, 2**20)), max_size=20)


@settings(max_examples=300 if GPU else 80, deadline=None, derandomize=True, database=None)
@given(
    requests=REQUESTS,
    span=st.sampled_from(SPANS),
    padding=st.integers(0, 3),
    wide=st.booleans(),
    come=st.sampled_from([0.0, 0.3, 1.0]),
    packed=st.booleans(),
    vectors=st.integers(0, 4),
    widths=st.tuples(WIDTHS) | st.tuples(WIDTHS, WIDTHS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch(requests: list[tuple[int, int, int]], span: int, padding: int, wide: bool, **news: Any) -> None:
    device = torch.device("cuda") if GPU else torch.device("cpu")
    dtypes = [torch.int32, torch.int64]
    for function, place in ((map_ref_, torch.device("cpu")), (map_triton, device)):
        check(function, place, requests, span, padding, dtypes[wide], **news)


@pytest.mark.parametrize("span", SPANS)
def test_an_empty_batch(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [], span)
    check(run, where, [], span, padding=2)


def test_without_a_batch_the_list_stays(run: Callable[..., None], where: torch.device) -> None:
    work, sites = (torch.full((size, 4), GARBAGE, dtype=torch.int32, device=where) for size in (3, SITES))
    table, counts = (
        torch.zeros(2, 48, dtype=torch.int32, device=where),
        torch.ones(2, 3, dtype=torch.int32, device=where),
    )
    weights, nobody = torch.zeros(1, 5, device=where), torch.zeros(2, dtype=torch.int32, device=where)
    row, vector = np.arange(48, dtype=np.int32), np.arange(5, dtype=np.float32)
    news, _ = pack(table, torch.float32, {1: row}, [(weights, weights, 0)], [vector])
    run(work, nobody, 0, nobody, table, counts, sites, news, -1, 1)
    assert (work == GARBAGE).all() and (sites == GARBAGE).all()
    assert table.tolist() == [[0] * 48, row.tolist()] and counts.tolist() == [[1] * 3, [0] * 3]
    assert weights.tolist() == [vector.tolist()]


@pytest.mark.parametrize("span", SPANS)
def test_nobody_is_steered(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [(3, 0, 0), (1, 0, 9)], span)


@pytest.mark.parametrize("span", SPANS)
def test_a_long_prefill_between_decodes(run: Callable[..., None], where: torch.device, span: int) -> None:
    check(run, where, [(1, 1, 50), (3000, 16, 2048), (1, 0, 7), (1, 2, 8)], span)


@pytest.mark.parametrize("span", SPANS if GPU else [TILE])
@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049] if GPU else [1025])
def test_many_requests(run: Callable[..., None], where: torch.device, n: int, span: int) -> None:
    check(run, where, [(1, (b % 3 != 1) * (1 + b // 200), b) for b in range(n)], span)


def test_a_narrow_vector_beside_a_wide_one_leaves_what_lies_behind_it(
    run: Callable[..., None], where: torch.device
) -> None:
    buffer, wide = torch.full((64,), 7.0, device=where), torch.zeros(2, 40, device=where)
    narrow, table = buffer[:10].view(2, 5), torch.zeros(2, 48, dtype=torch.int32, device=where)
    counts, nobody = torch.zeros(2, 3, dtype=torch.int32, device=where), torch.zeros(2, dtype=torch.int32, device=where)
    work, sites = (torch.full((size, 4), GARBAGE, dtype=torch.int32, device=where) for size in (3, SITES))
    slots, values = [(narrow, narrow, 1), (wide, wide, 0)], [np.arange(n, dtype=np.float32) for n in (5, 40)]
    news, _ = pack(table, torch.float32, {}, slots, values)
    run(work, nobody, 0, nobody, table, counts, sites, news, -1, 1)
    assert buffer.tolist() == [7.0] * 5 + values[0].tolist() + [7.0] * 54
    assert wide.tolist() == [values[1].tolist(), [0.0] * 40]
