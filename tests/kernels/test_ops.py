"""The ops as torch sees them: schema and fake, how a site is found, and what they refuse."""

import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.bound import Spread, bind, bound_at, spread
from saesteer.kernels.layout import BARE
from saesteer.kernels.reference import edit_ref_
from saesteer.kernels.step.updates import News
from tests.kernels.calls import (
    COUNTS,
    EDIT,
    FORM,
    FORMS,
    GROUPS,
    MAP,
    MUTATED,
    NORM_WEIGHT,
    SECOND,
    SITE,
    STREAM,
    WHOLE,
    WIDTH,
    clone,
    edit_args,
    map_args,
    replaced,
)
from tests.kernels.tables import copied


@FORMS
def test_opcheck_of_edit(form: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    args, bound = edit_args(device, form)
    # It calls the op with copies of the site, too.
    monkeypatch.setattr("saesteer.kernels.bound._sites", defaultdict(lambda: bound))
    torch.library.opcheck(EDIT, args)


@FORMS
@pytest.mark.parametrize("groups", [GROUPS, WHOLE], ids=["gated", "whole"])
def test_the_op_is_the_reference(form: int, groups: Any, device: torch.device) -> None:
    args, bound = edit_args(device, form, groups=groups)
    mine: Any = clone(args)
    theirs: Any = [a.cpu() if isinstance(a, Tensor) else a for a in clone(args)]
    reference = copied(bound, torch.device("cpu"))
    EDIT(*mine)
    edit_ref_(*replaced(theirs, SITE, reference))
    for at in MUTATED:
        if mine[at] is not None:
            torch.testing.assert_close(mine[at].cpu(), theirs[at])
            assert not torch.equal(mine[at], args[at])
    assert torch.equal(bound.cells.cpu(), reference.cells)
    assert bound.cells.any() == (groups is GROUPS)


def test_hits_count_calls_by_site(device: torch.device) -> None:
    args, bound = edit_args(device)
    ops.hits.pop(bound.index.data_ptr(), None)
    for calls in (1, 2):
        EDIT(*args)
        assert ops.hits[bound.index.data_ptr()] == calls


def test_where_it_is_silenced_nothing_happens(device: torch.device) -> None:
    args, bound = edit_args(device)
    other = copied(bound)
    bind(other)
    elsewhere = replaced(clone(args), SITE, other.index)
    published = torch.zeros(layout.PUBLISHED, 1 + args[COUNTS].numel(), dtype=torch.int32, pin_memory=args[0].is_cuda)
    steps = torch.zeros(1, dtype=torch.int32, device=device)
    before = dict(ops.hits)
    mine = replaced(clone(args), SITE, args[SITE])
    with ops.silenced([other.index]):
        with ops.silenced([bound.index, published]):
            EDIT(*mine)
            EDIT(*elsewhere)
            torch.ops.saesteer.publish_(mine[COUNTS], bound.index, steps, published)
        assert ops.hits == before and not steps.any()
        assert all(torch.equal(mine[at], args[at]) for at in MUTATED if args[at] is not None)
        EDIT(*elsewhere)
        assert ops.hits == before, "the outer one still holds"
        EDIT(*mine)
        assert not torch.equal(mine[STREAM], args[STREAM])
    EDIT(*elsewhere)
    assert torch.equal(elsewhere[STREAM], mine[STREAM])


@pytest.mark.parametrize("where", ["anywhere", "copying", "spread"])
def test_an_idle_op_is_done_at_once_but_not_where_graphs_or_other_ranks_rely_on_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of graphs are compiled while nobody asks for anything, and all ranks gather alike."""
    args, bound = edit_args(torch.device("cpu"), BARE)
    mine, parts = replaced(clone(args), SITE, args[SITE]), list[Tensor]()
    if where == "spread":
        mine[STREAM] = mine[STREAM][:, : WIDTH // 2].contiguous()

        def gather(part: Tensor) -> Tensor:
            parts.append(part)
            return clone(args)[STREAM]

        spread(bound, Spread(gather, lambda: 0))
    ops.hits.pop(bound.index.data_ptr(), None)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_idle", lambda *_: True)
        with ops.copying([bound.index]) if where == "copying" else nullcontext():
            EDIT(*mine)
    assert ops.hits[bound.index.data_ptr()] == 1 and len(parts) == (where == "spread")
    assert torch.equal(mine[STREAM], args[STREAM][:, : mine[STREAM].shape[1]]) == (where == "anywhere")


def test_no_tokens(device: torch.device) -> None:
    args, _bound = edit_args(device, tokens=0)
    EDIT(*args)


def test_a_site_is_bound_while_somebody_keeps_what_is_bound(device: torch.device) -> None:
    """Neither does the table of sites keep an engine alive, nor is a new tensor at an old address taken for the old."""
    args, bound = edit_args(device)
    numbers = torch.zeros(2, 4, dtype=torch.int32, device=device)
    owner = copied(bound, index=numbers[1, :1])
    bind(owner)
    args[SITE] = numbers[1, :1]
    EDIT(*args)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    for unbound in (numbers[1, :1], numbers[0, :1]):
        with pytest.raises(ValueError, match=r"^site is a tensor at address 0x.*: nothing is bound to it"):
            EDIT(*replaced(args, SITE, unbound))
    bind(copied(bound, index=numbers[1, :1]))  # nobody keeps it
    with pytest.raises(ValueError, match="nothing is bound"):
        EDIT(*args)
    old, new = copied(bound, index=numbers[1, :1]), copied(bound, index=numbers[1, :1])
    bind(old)
    bind(new)
    del old  # the end of the one leaves the other bound
    assert bound_at(numbers[1, :1]) is new


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
    "counts-rows": (COUNTS, lambda a: a[:-1], "counts"),
    "counts-int64": (COUNTS, lambda a: a.long(), "counts"),
    "form": (FORM, lambda a: 3, "form 3"),
    "stream-width": (STREAM, lambda a: a[:, :-1].contiguous(), "stream"),
    "counts-flat": (COUNTS, lambda a: a[0], "counts"),
}
WRONGLY_BOUND: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "table-int64": ("table", lambda a: a.long()),
    "table-flat": ("table", lambda a: a[0]),
    "table-strided": ("table", lambda a: a.T.contiguous().T),
    "site-number": ("index", lambda a: a[:0]),
    "site-int64": ("index", lambda a: a.long()),
    "work-columns": ("work", lambda a: a[:, :3].contiguous()),
    "work-strided": ("work", lambda a: a.T.contiguous().T),
    "work-empty": ("work", lambda a: a[:0]),
    "kinds-two": ("kinds", lambda a: a.repeat(2)),
    "kinds-int64": ("kinds", lambda a: a.long()),
    "scratch-dtype": ("scratch", lambda a: a.half()),
    "scratch-strided": ("scratch", lambda a: a[::2]),
    "positions-short": ("positions", lambda a: a[:1]),
    "positions-strided": ("positions", lambda a: a.repeat(2)[::2]),
    "positions-float": ("positions", lambda a: a.float()),
    "encoder-width": ("w_enc", lambda a: a[:, :-1].contiguous()),
    "encoder-strided": ("w_enc", lambda a: a.T.contiguous().T),
    "encoder-float64": ("w_enc", lambda a: a.double()),
    "bias-dtype": ("b_enc", lambda a: a.half()),
    "bias-strided": ("b_enc", lambda a: a.repeat(2)[::2]),
    "threshold-rows": ("threshold", lambda a: a[:-1]),
    "threshold-dtype": ("threshold", lambda a: a.half()),
    "output-width": ("b_dec", lambda a: a[:, :-1].contiguous()),
    "output-dtype": ("b_dec", lambda a: a.half()),
    "output-flat": ("b_dec", lambda a: a[0]),
    "cells-short": ("cells", lambda a: a[:-1]),
    "cells-int64": ("cells", lambda a: a.long()),
    "registers-short": ("registers", lambda a: a[:-1]),
    "registers-half": ("registers", lambda a: a.half()),
    "registers-flat": ("registers", lambda a: a[:, 0].contiguous()),
    "cells-strided": ("cells", lambda a: a.repeat(2)[::2]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str, device: torch.device) -> None:
    at, change, name = WRONG[case]
    args, bound = edit_args(device)
    before, was = clone(args), copied(bound)
    with pytest.raises(ValueError, match=f"^{name}"):
        EDIT(*replaced(args, at, change(args[at])))
    for kept in MUTATED:
        assert torch.equal(args[kept], before[kept])
    assert torch.equal(bound.cells, was.cells)
    assert torch.equal(bound.scratch, was.scratch)


@pytest.mark.parametrize("case", WRONGLY_BOUND)
def test_what_does_not_fit_is_not_bound(case: str, device: torch.device) -> None:
    name, change = WRONGLY_BOUND[case]
    _args, bound = edit_args(device)
    with pytest.raises(ValueError, match=f"^{name} is "):
        replace(bound, **{name: change(getattr(bound, name))})


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
        "w, i, t, c = (torch.zeros(*shape, dtype=torch.int32) for shape in ((3, 4), (1,), (2, 32), (2, 1)));"
        "ops.map_(w, i, 1, i, t, c, w[:1], ops.News(i, torch.float32), 0, 0, 1)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)
