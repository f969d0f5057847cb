"""The two ops as torch sees them: schema, fake, compiled graphs, captured graphs, and what they refuse."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.edit.configs import TILED_ABOVE, configs
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import edit_ref_
from saesteer.kernels.step.updates import News
from tests.kernels.tables import Entry, make_table, make_work

WIDTH, TOKENS, SLOTS = 64, 5, 7
EDIT = torch.ops.saesteer.edit_.default
MAP = ops.map_
# Places in the schema.
(
    STREAM,
    SECOND,
    NORM_WEIGHT,
    TABLE,
    SITE,
    WORK,
    POSITIONS,
    KINDS,
    W_ENC,
    W_DEC,
    B_ENC,
    THRESHOLD,
    B_DEC,
    CELLS,
    COUNTS,
    SCRATCH,
) = range(16)
FORM = 16
MUTATED = (STREAM, SECOND, CELLS, COUNTS)  # and scratch, which is the kernels' own

KEY = Entry(1, low=-1e9, gates=2, flags=layout.GATE)
GROUPS = [[KEY], [Entry(3, shift=2.0, gates=2, counter=1), Entry(0, scale=0.0, shift=4.0)]]
WHOLE = [[Entry(0, flags=layout.RECONSTRUCT, base=0, size=SLOTS), Entry(2, shift=1.0)]]


def edit_args(
    device: torch.device,
    form: int = NORMED,
    tokens: int = TOKENS,
    dtype: torch.dtype | None = None,
    groups: Any = GROUPS,
) -> Any:
    """Arguments of edit_ in the order of the schema: token 1 and 3 are steered, by row 1."""
    rng = torch.Generator().manual_seed(form)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=of, device=device)

    room, dense = max(tokens, 8), SLOTS
    return [
        normal(tokens, WIDTH),
        None if form == BARE else normal(tokens, WIDTH),
        normal(WIDTH) if form == NORMED else None,
        make_table([[groups]], 1, device, dense=(0, dense)),
        zeros(1, of=torch.int32),
        make_work([(t, 1, t) for t in (1, 3) if t < tokens], room, device),
        torch.arange(room, device=device),
        torch.tensor([7], dtype=torch.int32),
        normal(SLOTS, WIDTH),
        normal(SLOTS, WIDTH),
        zeros(SLOTS),
        zeros(SLOTS),
        zeros(2, WIDTH),
        zeros(room, of=torch.int32),
        zeros(2, 4, of=torch.int32),
        zeros(layout.scratch_words(WIDTH, dense, layout.TILE)),
        form,
        1e-6,
        1.0,
        dense,
        True,
    ]


def map_args(device: torch.device, span: int = 1) -> Any:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = make_table([[[[Entry(0)]]], [[]]], 1, device)
    return [
        make_work([], 8, device),
        ints(1, 0, 7),
        1,
        ints(0, 2, 5, 9),
        table,
        ints(*range(12)).view(3, 4),
        ints(*range(4)).view(1, 4),
        News(ints(0), torch.float32),
        2,
        5,
        span,
    ]


def clone(args: Any) -> Any:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


FORMS = pytest.mark.parametrize("form", [BARE, NORMED, PAIR], ids=["bare", "normed", "pair"])


@FORMS
def test_opcheck_of_edit(form: int, device: torch.device) -> None:
    torch.library.opcheck(EDIT, edit_args(device, form))


@FORMS
@pytest.mark.parametrize("groups", [GROUPS, WHOLE], ids=["gated", "whole"])
def test_the_op_is_the_reference(form: int, groups: Any, device: torch.device) -> None:
    args = edit_args(device, form, groups=groups)
    mine: Any = clone(args)
    theirs: Any = [a.cpu() if isinstance(a, Tensor) else a for a in clone(args)]
    EDIT(*mine)
    edit_ref_(*theirs[:KINDS], *theirs[W_ENC:SCRATCH], *theirs[FORM : FORM + 3])
    for at in MUTATED:
        if mine[at] is not None:
            torch.testing.assert_close(mine[at].cpu(), theirs[at])
            assert not torch.equal(mine[at], args[at]) or (at == CELLS and groups is WHOLE)


@FORMS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_in_one_graph(form: int, backend: str, device: torch.device) -> None:
    """All that the op changes is seen by what stands behind it."""

    def layer(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
        x = x * 2.0
        y = None if y is None else y + 1.0
        EDIT(x, y, *rest)
        cells, counts = rest[CELLS - 2], rest[COUNTS - 2]
        return x + 1.0, None if y is None else y * 3.0, cells + 1, counts * 2

    torch._dynamo.reset()
    args = edit_args(device, form)
    want = layer(*clone(args))
    before = sum(ops.hits.values())
    mine = clone(args)
    got = torch.compile(layer, fullgraph=True, backend=backend)(*mine)
    assert sum(ops.hits.values()) == before + 1
    for ours, expected in zip(got, want, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected)
    assert mine[CELLS].any()
    assert mine[COUNTS].any()


def test_a_call_is_kept_for_its_cells_and_counts_alone(device: torch.device) -> None:
    """A site whose stream nobody reads again still writes what a later site or the answer reads."""

    def layer(x: Tensor, *rest: Any) -> Tensor:
        EDIT(x.clone(), None, *rest)
        return x * 2.0

    torch._dynamo.reset()
    args = edit_args(device, BARE)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(args[0], *args[2:])
    assert args[COUNTS][1].tolist() == [2, 2, 0, 0]
    assert args[CELLS].tolist() == [0, 2, 0, 2, 0, 0, 0, 0]


def test_hits_count_calls_by_site(device: torch.device) -> None:
    args = edit_args(device)
    site = args[SITE]
    ops.hits.pop(site.data_ptr(), None)
    for calls in (1, 2):
        EDIT(*args)
        assert ops.hits[site.data_ptr()] == calls


def test_no_tokens(device: torch.device) -> None:
    EDIT(*edit_args(device, tokens=0))


def replaced(args: Any, at: int, value: object) -> Any:
    return [*args[:at], value, *args[at + 1 :]]


WRONG: dict[str, tuple[int, Callable[[Any], object], str]] = {
    "stream-strided": (STREAM, lambda a: a.T.contiguous().T, "stream"),
    "stream-3d": (STREAM, lambda a: a[None], "stream"),
    "stream-float64": (STREAM, lambda a: a.double(), "stream"),
    "stream-int": (STREAM, lambda a: a.int(), "stream"),
    "second-strided": (SECOND, lambda a: a.T.contiguous().T, "second"),
    "second-dtype": (SECOND, lambda a: a.half(), "second"),
    "second-missing": (SECOND, lambda a: None, "form 1"),
    "second-short": (SECOND, lambda a: a[:-1], "second"),
    "norm-weight-width": (NORM_WEIGHT, lambda a: a[:-1], "norm_weight"),
    "norm-weight-strided": (NORM_WEIGHT, lambda a: a.repeat(2)[::2], "norm_weight"),
    "table-int64": (TABLE, lambda a: a.long(), "table"),
    "table-flat": (TABLE, lambda a: a[0], "table"),
    "table-strided": (TABLE, lambda a: a.T.contiguous().T, "table"),
    "site-number": (SITE, lambda a: a[:0], "site"),
    "site-int64": (SITE, lambda a: a.long(), "site"),
    "work-columns": (WORK, lambda a: a[:, :3].contiguous(), "work"),
    "work-strided": (WORK, lambda a: a.T.contiguous().T, "work"),
    "work-empty": (WORK, lambda a: a[:0], "work"),
    "kinds-two": (KINDS, lambda a: a.repeat(2), "kinds"),
    "kinds-int64": (KINDS, lambda a: a.long(), "kinds"),
    "scratch-dtype": (SCRATCH, lambda a: a.half(), "scratch"),
    "scratch-strided": (SCRATCH, lambda a: a[::2], "scratch"),
    "positions-short": (POSITIONS, lambda a: a[:1], "positions"),
    "positions-strided": (POSITIONS, lambda a: a.repeat(2)[::2], "positions"),
    "positions-float": (POSITIONS, lambda a: a.float(), "positions"),
    "encoder-width": (W_ENC, lambda a: a[:, :-1].contiguous(), "w_enc"),
    "encoder-strided": (W_ENC, lambda a: a.T.contiguous().T, "w_enc"),
    "encoder-float64": (W_ENC, lambda a: a.double(), "w_enc"),
    "decoder-rows": (W_DEC, lambda a: a[:-1], "w_dec"),
    "bias-dtype": (B_ENC, lambda a: a.half(), "b_enc"),
    "bias-strided": (B_ENC, lambda a: a.repeat(2)[::2], "b_enc"),
    "threshold-rows": (THRESHOLD, lambda a: a[:-1], "threshold"),
    "threshold-dtype": (THRESHOLD, lambda a: a.half(), "threshold"),
    "output-width": (B_DEC, lambda a: a[:, :-1].contiguous(), "b_dec"),
    "output-dtype": (B_DEC, lambda a: a.half(), "b_dec"),
    "output-flat": (B_DEC, lambda a: a[0], "b_dec"),
    "cells-short": (CELLS, lambda a: a[:-1], "cells"),
    "cells-int64": (CELLS, lambda a: a.long(), "cells"),
    "cells-strided": (CELLS, lambda a: a.repeat(2)[::2], "cells"),
    "counts-rows": (COUNTS, lambda a: a[:-1], "counts"),
    "counts-int64": (COUNTS, lambda a: a.long(), "counts"),
    "form": (FORM, lambda a: 3, "form 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str, device: torch.device) -> None:
    at, change, name = WRONG[case]
    args = edit_args(device)
    before = clone(args)
    with pytest.raises(ValueError, match=f"^{name}"):
        EDIT(*replaced(args, at, change(args[at])))
    for kept in (*MUTATED, SCRATCH):
        assert torch.equal(args[kept], before[kept])


@pytest.mark.parametrize(
    ("at", "value", "name"),
    [
        (0, torch.zeros(9, 3, dtype=torch.int32), "work"),
        (1, torch.zeros(3), "slots"),
        (1, torch.zeros(1, dtype=torch.int32), "slots"),
        (3, torch.zeros(2, dtype=torch.int32), "query_start_loc"),
        (4, torch.zeros(2, 32, dtype=torch.int64), "table"),
        (6, torch.zeros(1, 3, dtype=torch.int32), "sites"),
        (6, torch.zeros(4, 4, dtype=torch.int32), "sites"),
        (7, torch.zeros(2, dtype=torch.int64), "news"),
        (7, torch.zeros(8, 2, dtype=torch.int32)[:, 0], "news"),
    ],
)
def test_what_does_not_fit_the_map_is_refused(at: int, value: Tensor, name: str, device: torch.device) -> None:
    there: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)  # .to() packs it
    there.zero_()
    if name == "news":
        there = News(there, torch.float32, lines=1)
    with pytest.raises(ValueError, match=f"^{name}"):
        MAP(*replaced(map_args(device), at, there))


@pytest.mark.parametrize("span", [0, 2, layout.TILE - 1, 2 * layout.TILE])
def test_other_spans_are_refused(span: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"^span {span}"):
        MAP(*map_args(device, span))


def test_the_module_may_be_imported_twice() -> None:
    code = (
        "import importlib, sys, torch; from saesteer.kernels import ops; importlib.reload(ops);"
        "assert 'triton' not in sys.modules;"  # a CPU without Triton runs the reference
        "w, i, t, c = (torch.zeros(*shape, dtype=torch.int32) for shape in ((3, 4), (1,), (2, 16), (2, 1)));"
        "ops.map_(w, i, 1, i, t, c, w[:1], ops.News(i, torch.float32), 0, 0, 1)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


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
        args = edit_args(device, tokens=tokens)
        args[WORK] = make_work([(0, 1, 0, min(tokens, 3))], max(tokens, 8), device, span=layout.TILE)
        moved = torch.zeros(5, dtype=torch.int32, device=device)
        EDIT(*replaced(args, SITE, moved[shift : shift + 1]))  # each at another alignment
        slots = torch.zeros(tokens + 4, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 5, dtype=torch.int32, device=device)
        for span in (1, layout.TILE):
            MAP(
                args[WORK],
                slots[shift:],
                1,
                starts[shift:],
                args[TABLE],
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
    args = edit_args(device, form, tokens=20)
    args[TABLE] = torch.nn.functional.pad(args[TABLE], (0, layout.ENTRY * 60))
    args[KINDS].zero_()  # not looked at while capturing
    start, listed = clone(args), args[WORK].clone()
    EDIT(*clone(args))  # compile
    EDIT(*replaced(clone(args), KINDS, torch.tensor([7], dtype=torch.int32)))
    args[WORK][0, 0] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        EDIT(*args)
    graph.replay()
    assert torch.equal(args[STREAM], start[STREAM])
    others = make_work([(t, 1, t) for t in range(20)], 20, device)
    for work, groups in ((listed, GROUPS), (listed, MANY), (others, MANY), (others, WHOLE), (others, [])):
        table = make_table([[groups]], 1, device, dense=(0, SLOTS))
        args[TABLE].zero_()
        args[TABLE][:, : table.shape[1]] = table
        args[WORK].copy_(work)
        for at in (*MUTATED, SCRATCH):
            if args[at] is not None:
                args[at].copy_(start[at])
        want = clone(args)
        want[KINDS] = torch.tensor([7], dtype=torch.int32)
        EDIT(*want)
        graph.replay()
        for at in MUTATED:
            if args[at] is not None:
                assert torch.equal(args[at], want[at])
        assert torch.equal(args[STREAM], start[STREAM]) == (not groups)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
@pytest.mark.parametrize("groups", [MANY, WHOLE, GROUPS], ids=["parts", "whole", "gated"])
def test_a_thousand_replays_give_the_same_bits(groups: Any, tokens: int) -> None:
    """Parts of a token arrive in any order; the last one leaves no trace of them."""
    device = torch.device("cuda")
    start = edit_args(device, tokens=tokens, groups=groups)
    start[WORK] = make_work([(t, 1, t) for t in range(tokens)], max(tokens, 8), device)
    args, want = clone(start), clone(start)
    EDIT(*want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        EDIT(*args)
    for _ in range(1000):
        for at in MUTATED:
            args[at].copy_(start[at])
        graph.replay()
        for at in MUTATED:
            assert torch.equal(args[at], want[at])
        assert not args[SCRATCH][: layout.PARTIALS].any()
