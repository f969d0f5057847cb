"""The op in compiled graphs and in captured ones: what it changes, in which order, and with which kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.bound import bind
from saesteer.kernels.edit.configs import TILED_ABOVE, configs
from saesteer.kernels.layout import BARE
from saesteer.kernels.step.updates import News
from tests.kernels.calls import (
    COUNTS,
    EDIT,
    FORMS,
    GROUPS,
    MAP,
    MUTATED,
    SITE,
    SLOTS,
    STREAM,
    WHOLE,
    WIDTH,
    clone,
    edit_args,
    replaced,
)
from tests.kernels.tables import Entry, copied, make_table, make_work


@FORMS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_in_one_graph(form: int, backend: str, device: torch.device) -> None:
    """All that the op changes is seen by what stands behind it: a second site reads the cells that the first wrote."""

    def layer(x: Tensor, y: Tensor | None, weight: Tensor | None, counts: Tensor, *sites: Tensor) -> Any:
        for site in sites:
            x = x * 2.0
            y = None if y is None else y + 1.0
            EDIT(x, y, weight, counts, site, form, 1e-6, 1.0)
        return x + 1.0, None if y is None else y * 3.0, counts * 2

    torch._dynamo.reset()
    args, first = edit_args(device, form)
    locked = make_table([[[GROUPS[1]]]], 1, device)  # its gate is at the first site
    second = copied(first, table=locked, cells=first.cells)
    bind(second)
    sites = (first.index, second.index)
    for site in sites:
        ops.hits.pop(site.data_ptr(), None)
    theirs, mine = clone(args), clone(args)
    want = layer(*theirs[:SITE], *sites)
    assert first.cells.any()
    assert theirs[COUNTS][1].tolist() == [4, 4, 0, 0], "the gate lets both sites edit"
    first.cells.zero_()
    got = torch.compile(layer, fullgraph=True, backend=backend)(*mine[:SITE], *sites)
    assert [ops.hits[site.data_ptr()] for site in sites] == [2, 2]
    for ours, expected in zip(got, want, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected)
    assert torch.equal(mine[COUNTS], theirs[COUNTS])


def test_a_call_is_kept_for_its_cells_and_counts_alone(device: torch.device) -> None:
    """A site whose stream nobody reads again still writes what a later site or the answer reads."""

    def layer(x: Tensor, *rest: Any) -> Tensor:
        EDIT(x.clone(), None, *rest)
        return x * 2.0

    torch._dynamo.reset()
    args, bound = edit_args(device, BARE)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(args[0], *args[2:])
    assert args[COUNTS][1].tolist() == [2, 2, 0, 0]
    assert bound.cells.tolist() == [0, 2, 0, 2, 0, 0, 0, 0]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MANY = [[Entry(at % SLOTS, shift=0.01 * at) for at in range(60)]]  # a group in as many parts as there may be


@pytest.mark.gpu
@gpu
def test_no_variant_more_for_any_number_of_tokens() -> None:
    """One launch for each row of the configs is all there is to compile."""
    from triton.runtime.jit import JITFunction

    from saesteer.kernels.edit import launch
    from saesteer.kernels.step import map, publish

    kernels = [k for module in (launch, publish, map) for k in vars(module).values() if isinstance(k, JITFunction)]
    device = torch.device("cuda")

    def step(tokens: int, shift: int) -> None:
        args, bound = edit_args(device, tokens=tokens)
        moved = torch.zeros(5, dtype=torch.int32, device=device)
        work = make_work([(0, 1, 0, min(tokens, 3))], max(tokens, 8), device, span=layout.TILE)
        bound = replace(bound, work=work, index=moved[shift : shift + 1])  # each at another alignment
        bind(bound)
        EDIT(*replaced(args, SITE, bound.index))
        slots = torch.zeros(tokens + 4, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 5, dtype=torch.int32, device=device)
        for span in (1, layout.TILE):
            MAP(
                bound.work,
                slots[shift:],
                1,
                starts[shift:],
                bound.table,
                args[COUNTS],
                torch.zeros(1, layout.SITE_STRIDE, dtype=torch.int32, device=device),
                News(moved, torch.bfloat16),
                tokens * (shift % 2),
                tokens,
                span,
            )

    def variants() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    tuned = configs(WIDTH)
    borders = {most for table in (tuned.edit, tuned.encode) for most, _ in table if most < 8192} | {TILED_ABOVE}
    for tokens in sorted({1, *[most + 1 for most in borders]}):
        step(tokens, 0)
    before = variants()
    assert before >= len(kernels) >= 5
    for tokens in sorted({2, 5, 16, 17, 4096, 8191, *borders, *[most + 15 for most in borders]}):
        step(tokens, tokens % 4)
    assert variants() == before


@pytest.mark.gpu
@gpu
@FORMS
def test_a_captured_launch_serves_any_list_and_table(form: int) -> None:
    device = torch.device("cuda")
    args, bound = edit_args(device, form, tokens=20)
    bound = replace(
        bound,
        table=torch.nn.functional.pad(bound.table, (0, layout.ENTRY * 60)),
        kinds=torch.zeros(1, dtype=torch.int32),  # nothing looks at it during capture
    )
    bind(bound)
    start, began = clone(args), copied(bound)
    eager = copied(bound, index=torch.zeros_like(bound.index), kinds=torch.tensor([7], dtype=torch.int32))
    bind(eager)
    EDIT(*clone(args))  # compile
    EDIT(*replaced(clone(args), SITE, eager.index))
    bound.work[0, 0] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        EDIT(*args)
    graph.replay()
    assert torch.equal(args[STREAM], start[STREAM])
    others = make_work([(t, 1, t) for t in range(20)], 20, device)
    for work, groups in ((began.work, GROUPS), (began.work, MANY), (others, MANY), (others, WHOLE), (others, [])):
        table = make_table([[groups]], 1, device, dense=(0, SLOTS))
        for at in MUTATED:
            if args[at] is not None:
                args[at].copy_(start[at])
        for one in (bound, eager):
            one.table.zero_()
            one.table[:, : table.shape[1]] = table
            one.work.copy_(work)
            one.cells.copy_(began.cells)
            one.scratch.copy_(began.scratch)
        want = replaced(clone(args), SITE, eager.index)
        EDIT(*want)
        graph.replay()
        for at in MUTATED:
            if args[at] is not None:
                assert torch.equal(args[at], want[at])
        assert torch.equal(bound.cells, eager.cells)
        assert torch.equal(args[STREAM], start[STREAM]) == (not groups)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
@pytest.mark.parametrize("groups", [MANY, WHOLE, GROUPS], ids=["parts", "whole", "gated"])
def test_a_thousand_replays_give_the_same_bits(groups: Any, tokens: int) -> None:
    """Parts of a token arrive in any order; the last one leaves no trace of them."""
    device = torch.device("cuda")
    start, first = edit_args(device, tokens=tokens, groups=groups)
    work = make_work([(t, 1, t) for t in range(tokens)], max(tokens, 8), device)
    eager, bound = copied(first, work=work), copied(first, work=work)
    bind(eager)
    bind(bound)
    args, want = replaced(clone(start), SITE, bound.index), replaced(clone(start), SITE, eager.index)
    EDIT(*want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        EDIT(*args)
    for _ in range(1000):
        for at in MUTATED:
            args[at].copy_(start[at])
        bound.cells.copy_(first.cells)
        graph.replay()
        for at in MUTATED:
            assert torch.equal(args[at], want[at])
        assert torch.equal(bound.cells, eager.cells)
        assert not bound.scratch[: layout.PARTIALS].any()
