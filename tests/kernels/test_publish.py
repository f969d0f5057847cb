"""The kernel that publishes a step's counters and its reference, against slices of the counters themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.bound import Bound, bind
from saesteer.kernels.reference import publish_ref_
from saesteer.kernels.step.publish import publish_triton

GARBAGE = -77
PUBLISH = torch.ops.saesteer.publish_.default
GPU = torch.cuda.is_available()


def tensors(used: list[int], counters: int, step: int, device: torch.device) -> list[Tensor]:
    """Arguments of the op, with rows that use so many counters each (0: not listed), before step number `step`; every
    third of them has two items, and rows that are not listed are full of requests that have ended."""
    rows = len(used)
    table = torch.full((rows, 32), 10**6, dtype=torch.int32)  # what is not asked for would end in a fault
    table[:, 0] = 0
    table[:, 0], table[:, layout.COUNTERS] = 3, counters
    listed: list[int] = []
    for row, its in enumerate(used):
        if its:
            table[row, layout.COUNTERS] = its
            listed += [row] * (1 + (row % 3 == 0))
    counts = torch.arange(rows * counters, dtype=torch.int32).view(rows, counters)
    work = torch.zeros(2 * rows + 1, 4, dtype=torch.int32)
    work[0, 0], work[0, 3] = len(listed), layout.COUNTED
    work[1 : 1 + len(listed), 1] = torch.tensor(listed, dtype=torch.int32)
    published = torch.full((layout.PUBLISHED, 1 + rows * counters), GARBAGE, dtype=torch.int32, pin_memory=GPU)
    before = torch.tensor([(step - 1) % layout.STEPS], dtype=torch.int32)
    return [table.to(device), work.to(device), counts.to(device), before.to(device), published]


def op_args(args: list[Tensor]) -> tuple[list[Tensor], Bound]:
    """Arguments of the op with these tensors, and what is bound to its site."""
    table, work, counts, steps, published = args
    none = torch.zeros(1, device=table.device)
    bound = Bound(
        index=torch.zeros(1, dtype=torch.int32, device=table.device),
        table=table,
        work=work,
        positions=work[:, 0].contiguous(),
        kinds=torch.zeros(1, dtype=torch.int32),
        w_enc=none[None],
        w_dec=none[None],
        b_enc=none,
        threshold=none,
        b_dec=none[None],
        cells=work[:, 0].contiguous(),
        registers=none.expand(len(work), 1).contiguous(),
        scratch=torch.zeros(layout.scratch_words(1, 0, layout.TILE), device=table.device),
        dense_size=0,
        has_norms=False,
    )
    bind(bound)
    return [counts, bound.index, steps, published], bound


def settle() -> None:
    if GPU:
        torch.cuda.synchronize()


def check(run: Callable[..., None], used: list[int], counters: int, step: int, device: torch.device) -> None:
    args = tensors(used, counters, step, device)
    *_, counts, steps, published = args
    for number in (step, step + 1):
        run(*args)
        settle()
        number %= layout.STEPS
        place = published[number % layout.PUBLISHED]
        assert int(steps[0]) == place[0] == number
        its = torch.arange(counters) < torch.tensor(used)[:, None]
        assert torch.equal(place[1:].view(len(used), -1), torch.where(its, counts.cpu(), GARBAGE)), "and nothing else"
        counts += 1
    assert (published == GARBAGE).all(1).sum() == layout.PUBLISHED - 2


@settings(max_examples=200 if GPU else 40, deadline=None, derandomize=True, database=None)
@given(
    used=st.lists(st.integers(0, 7), min_size=1, max_size=300).filter(any),
    more=st.integers(0, 3),
    step=st.integers(0, 9) | st.integers(layout.STEPS - 2, layout.STEPS - 1),
)
def test_any_rows(used: list[int], more: int, step: int) -> None:
    device = torch.device("cuda") if GPU else torch.device("cpu")
    for function, place in ((publish_ref_, torch.device("cpu")), (publish_triton, device)):
        check(function, used, max(used) + more, step, place)


@pytest.mark.parametrize("function", [publish_ref_, publish_triton], ids=["reference", "kernel"])
def test_many_counters(function: Callable[..., None], device: torch.device) -> None:
    check(function, [0, 200, 3] + [1] * 200, 200, 5, torch.device("cpu") if function is publish_ref_ else device)


@pytest.mark.parametrize("function", [publish_ref_, publish_triton], ids=["reference", "kernel"])
def test_nothing_is_written_where_nobody_is_steered(function: Callable[..., None], device: torch.device) -> None:
    args = tensors([0, 2, 1], 2, 4, torch.device("cpu") if function is publish_ref_ else device)
    args[1][0, 0] = 0  # rows of requests that are not in this step
    function(*args)
    args[1][0, 0], args[1][0, 3] = 2, layout.WHOLE  # or those that are only read
    function(*args)
    settle()
    assert int(args[3][0]) == 3 and (args[4] == GARBAGE).all()


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    # It copies arguments: the site, too, and `published` into memory that a GPU cannot write to.
    args, bound = op_args(tensors([1, 0, 2], 3, 1, torch.device("cpu")))
    monkeypatch.setattr("saesteer.kernels.bound._sites", defaultdict(lambda: bound))
    # Without test_schema, as it does not say that `published` changes.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(PUBLISH, tuple(args), test_utils=checks)


def test_a_compiled_model_keeps_it_behind_the_counting(device: torch.device) -> None:
    torch._dynamo.reset()
    args, _bound = op_args(tensors([1, 0, 2], 3, 1, device))
    counts, _site, _steps, published = args

    def model(x: Tensor, counts: Tensor, *rest: Tensor) -> Tensor:
        counts += 5  # as the last site's edit does
        PUBLISH(counts, *rest)
        return x + 1

    ops.hits.pop(published.data_ptr(), None)
    want = counts.cpu() + 5
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.zeros(3, device=device), *args)
    settle()
    assert ops.hits.pop(published.data_ptr()) == 1
    assert published[1, 0] == 1
    there = published[1, 1:].view(3, 3)
    assert there[0, 0] == want[0, 0] and torch.equal(there[2, :2], want[2, :2])


WRONG: dict[str, tuple[int, Callable[[Tensor], Tensor], str]] = {
    "counts of other rows": (0, lambda a: a[1:], "counts"),
    "column by column": (0, lambda a: a.t().contiguous().t(), "counts"),
    "nobody's site": (1, lambda a: a.clone(), "site"),
    "steps": (2, lambda a: a.repeat(2), "steps"),
    "too short": (3, lambda a: a[:, :-1].contiguous(), "published"),
    "too few": (3, lambda a: a[1:], "published"),
    "wide": (3, lambda a: a.long(), "published"),
}


@pytest.mark.parametrize(("at", "change", "name"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(
    at: int, change: Callable[[Tensor], Tensor], name: str, device: torch.device
) -> None:
    args, _bound = op_args(tensors([1, 2], 2, 1, device))
    with pytest.raises(ValueError, match=f"^{name}"):
        PUBLISH(*args[:at], change(args[at]), *args[at + 1 :])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_graph_publishes_step_after_step(device: torch.device) -> None:
    args = tensors([1, 0, 2], 3, 1, device)
    counts = args[2]
    publish_triton(*args)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts += 1
        publish_triton(*args)
    first = counts.cpu()
    for step in range(2, 12):
        graph.replay()
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        place = args[4][step % layout.PUBLISHED]
        assert place[0] == step
        rows = place[1:].view(3, 3)
        assert rows[0, 0] == first[0, 0] + step - 1 and torch.equal(rows[2, :2], first[2, :2] + step - 1)
