"""The ops as PyTorch sees them: schema, compilation, graphs, refusals. What they compute is tested next door."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import ops
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import edit_ref_
from saesteer.testing import Entry, make_table, make_work

WIDTH, TOKENS = 64, 5
EDIT = torch.ops.saesteer.edit_.default
MAP = torch.ops.saesteer.map_.default


def edit_args(device: torch.device, form: int = NORMED, tokens: int = TOKENS, dtype: torch.dtype | None = None) -> Any:
    """Arguments of edit_ in the order of the schema: token 1 and 3 are steered, by row 1."""
    rng = torch.Generator().manual_seed(form)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    second = None if form == BARE else normal(tokens, WIDTH)
    weight = normal(WIDTH) if form == NORMED else None
    table = make_table([[[[Entry(3, shift=2.0), Entry(0, scale=0.0, shift=4.0)]]]], 1, device)
    work = make_work([(t, 1, t) for t in (1, 3) if t < tokens], max(tokens, 8), device)
    site = torch.zeros(1, dtype=torch.int32, device=device)
    weights = normal(7, WIDTH), normal(7, WIDTH), torch.zeros(7, device=device)
    return [normal(tokens, WIDTH), second, weight, table, site, work, *weights, form, 1e-6, 1.0, False]


def map_args(device: torch.device) -> Any:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = make_table([[[[Entry(0)]]], [[]]], 1, device)
    return [make_work([], 8, device), ints(1, 0, 7), 1, ints(0, 2, 5, 9), torch.arange(5, device=device), table, 2]


def clone(args: Any) -> Any:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


FORMS = pytest.mark.parametrize("form", [BARE, NORMED, PAIR], ids=["bare", "normed", "pair"])


@FORMS
def test_opcheck_of_edit(form: int, device: torch.device) -> None:
    torch.library.opcheck(EDIT, edit_args(device, form))


def test_opcheck_of_map(device: torch.device) -> None:
    torch.library.opcheck(MAP, map_args(device))


@FORMS
def test_the_op_is_the_reference(form: int, device: torch.device) -> None:
    args = edit_args(device, form)
    mine: Any = clone(args)
    theirs: Any = [a.cpu() if isinstance(a, Tensor) else a for a in clone(args)]
    EDIT(*mine)
    edit_ref_(*theirs[:-1])
    for ours, expected in zip(mine[:2], theirs[:2], strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), expected)
    assert not torch.equal(mine[0], args[0])


@FORMS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_in_one_graph(form: int, backend: str, device: torch.device) -> None:
    def layer(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
        x = x * 2.0
        y = None if y is None else y + 1.0
        EDIT(x, y, *rest)
        return x + 1.0, None if y is None else y * 3.0

    torch._dynamo.reset()
    args = edit_args(device, form)
    want = layer(*clone(args))
    before = sum(ops.hits.values())
    got = torch.compile(layer, fullgraph=True, backend=backend)(*clone(args))
    assert sum(ops.hits.values()) == before + 1
    for ours, expected in zip(got, want, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected)


def test_hits_count_calls_by_site(device: torch.device) -> None:
    args = edit_args(device)
    site = args[4]
    ops.hits.pop(site.data_ptr(), None)
    for calls in (1, 2):
        EDIT(*args)
        assert ops.hits[site.data_ptr()] == calls


def test_no_tokens(device: torch.device) -> None:
    EDIT(*edit_args(device, tokens=0))


def replaced(args: Any, at: int, value: object) -> Any:
    return [*args[:at], value, *args[at + 1 :]]


WRONG: dict[str, tuple[int, Callable[[Any], object], str]] = {
    "stream-strided": (0, lambda a: a[0].T.contiguous().T, "stream"),
    "stream-3d": (0, lambda a: a[0][None], "stream"),
    "stream-float64": (0, lambda a: a[0].double(), "stream"),
    "stream-int": (0, lambda a: a[0].int(), "stream"),
    "second-strided": (1, lambda a: a[1].T.contiguous().T, "second"),
    "second-dtype": (1, lambda a: a[1].half(), "second"),
    "second-missing": (1, lambda a: None, "form 1"),
    "second-short": (1, lambda a: a[1][:-1], "second"),
    "norm-weight-width": (2, lambda a: a[2][:-1], "norm_weight"),
    "table-int64": (3, lambda a: a[3].long(), "table"),
    "site-number": (4, lambda a: a[4][:0], "site"),
    "work-columns": (5, lambda a: a[5][:, :3], "work"),
    "encoder-width": (6, lambda a: a[6][:, :-1].contiguous(), "w_enc"),
    "encoder-strided": (6, lambda a: a[6].T.contiguous().T, "w_enc"),
    "decoder-rows": (7, lambda a: a[7][:-1], "w_dec"),
    "bias-dtype": (8, lambda a: a[8].half(), "b_enc"),
    "form": (9, lambda a: 3, "form 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str, device: torch.device) -> None:
    at, change, name = WRONG[case]
    args = edit_args(device)
    before = args[0].clone()
    with pytest.raises(ValueError, match=f"^{name}"):
        EDIT(*replaced(args, at, change(args)))
    assert torch.equal(args[0], before)


@pytest.mark.parametrize(
    ("at", "value", "name"),
    [
        (0, torch.zeros(9, 3, dtype=torch.int32), "work"),
        (1, torch.zeros(3), "slots"),
        (1, torch.zeros(1, dtype=torch.int32), "slots"),
        (3, torch.zeros(2, dtype=torch.int32), "query_start_loc"),
        (4, torch.zeros(9, dtype=torch.int32), "positions"),
        (4, torch.zeros(8, dtype=torch.int32)[::2], "positions"),
    ],
)
def test_what_does_not_fit_the_map_is_refused(at: int, value: Tensor, name: str, device: torch.device) -> None:
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)  # .to() packs it
    with pytest.raises(ValueError, match=f"^{name}"):
        MAP(*replaced(map_args(device), at, there.zero_()))


def test_the_module_may_be_imported_twice() -> None:
    code = (
        "import importlib, sys, torch; from saesteer.kernels import ops; importlib.reload(ops);"
        "assert 'triton' not in sys.modules;"  # a CPU without Triton runs the reference
        "w = torch.zeros(3, 4, dtype=torch.int32); i = torch.zeros(1, dtype=torch.int32);"
        "torch.ops.saesteer.map_(w, i, 1, i, i, torch.zeros(2, 16, dtype=torch.int32), 0)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
def test_no_variant_more_for_any_number_of_tokens() -> None:
    from saesteer.kernels.edit import _edit_kernel
    from saesteer.kernels.work import _map_kernel

    def variants() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in (_edit_kernel, _map_kernel))

    device = torch.device("cuda")
    seen = set()
    for tokens in (5, 1, 2, 16, 17, 4096):
        args = edit_args(device, tokens=tokens)
        sites = torch.zeros(5, dtype=torch.int32, device=device)
        for site in range(5):  # each at another alignment
            EDIT(*replaced(args, 4, sites[site : site + 1]))
        slots = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 2, dtype=torch.int32, device=device)
        positions = torch.arange(tokens, device=device)
        for shift in (0, 1):
            MAP(args[5], slots[shift:], 1, starts[shift:], positions, args[3], tokens * (1 - shift))
        seen.add(variants())
    assert len(seen) == 1


@pytest.mark.gpu
@gpu
@FORMS
def test_a_captured_launch_serves_any_list_and_table(form: int) -> None:
    args = edit_args(torch.device("cuda"), form)
    start = clone(args)
    work = args[5].clone()
    EDIT(*clone(args))  # compile
    args[5][0, 0] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        EDIT(*args)
    graph.replay()
    assert torch.equal(args[0], start[0])
    args[5].copy_(work)
    graph.replay()
    want = clone(start)
    EDIT(*want)
    assert torch.equal(args[0], want[0])
    args[3].zero_()
    unchanged = args[0].clone()
    graph.replay()
    assert torch.equal(args[0], unchanged)


@pytest.mark.gpu
@gpu
def test_a_thousand_replays_give_the_same_bits() -> None:
    args = edit_args(torch.device("cuda"), tokens=512)
    args[5] = make_work([(t, 1, t) for t in range(512)], 512, "cuda")
    want = clone(args)
    EDIT(*want)
    for _ in range(1000):
        again = clone(args)
        EDIT(*again)
        assert torch.equal(again[0], want[0])
