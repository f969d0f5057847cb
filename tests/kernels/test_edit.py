"""Every way through the kernels against truth.py, with the reference as yardstick: Hypothesis draws whole steps.

In the interpreter fp16 and fp32 and small sizes; on a GPU bf16 too and full sizes. Tokens near a decision are left out
of the comparison: test_exact.py has those.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saesteer.kernels.edit.configs import EditConfig, block, configs, parts
from saesteer.kernels.layout import BARE, MOST_PARTS, NORMED, PAIR, TILE
from tests.kernels.calls import FORMS
from tests.kernels.harness import GPU, SPANS, TILED, TOKEN, Path, check
from tests.kernels.requests import Wish
from tests.kernels.shapes import DRAWN, DTYPES, MOST_EDITS, PATHS, SHAPES, WIDTHS, Shape

KINDS = ["none", "elsewhere", "clamps", "list", "dense"]
# Doses are not measured, measured, or held to limits that many tokens reach, some, and none.
LIMITS = st.sampled_from([None, None, 0.0, 0.02, 0.2, 1e6])
RUNS = [1, 2, 3, 63, 64, 65, 130]  # tokens of one request in a step: items are cut from them

EACH_PATH = pytest.mark.parametrize("path", PATHS, ids=str)
TYPED = pytest.mark.parametrize(
    ("dtype", "form"),
    [(dtype, form) for dtype in DTYPES for form in (BARE, NORMED, PAIR)]
    if GPU
    else [(torch.float16, BARE), (torch.float32, NORMED), (torch.float16, PAIR)],
    ids=str,
)


@st.composite
def wishes(draw: st.DrawFn, longest: int) -> Wish:
    kind = draw(st.sampled_from(KINDS))
    edits = draw(st.sampled_from([0, 1, 2, 5, 8, 16, MOST_EDITS]) | st.integers(0, MOST_EDITS))
    if kind in ("list", "dense") and not GPU:
        edits = min(edits, 12)
    few = st.integers(0, 3 if edits <= 64 else 2)
    tokens = draw(few | st.sampled_from([run for run in RUNS if run <= longest]) if longest > 3 else few)
    return Wish(kind, edits, tokens, draw(st.booleans()), draw(LIMITS))


def steps(longest: int) -> st.SearchStrategy[list[Wish]]:
    return st.lists(wishes(longest), min_size=0, max_size=3)


@DRAWN
@given(wished=steps(3), shape=SHAPES, seed=st.integers(0, 2**16))
def test_any_step_of_few_tokens(wished: list[Wish], shape: Shape, seed: int) -> None:
    width, dtype, form = shape
    check(wished, TOKEN, width=width, dtype=dtype, form=form, seed=seed)


@DRAWN
@given(
    wished=steps(130 if GPU else 3),
    shape=SHAPES,
    tiled=st.booleans() if GPU else st.just(True),
    seed=st.integers(0, 2**16),
)
def test_any_step_of_items(wished: list[Wish], shape: Shape, tiled: bool, seed: int) -> None:
    width, dtype, form = shape
    check(wished, TILED if tiled else SPANS, width=width, dtype=dtype, form=form, seed=seed)


@TYPED
@pytest.mark.parametrize("edits", [1, 3, 8, 37], ids="edits{}".format)
def test_a_group_on_runs_of_any_length(edits: int, dtype: torch.dtype, form: int) -> None:
    """Items of 1 to TILE tokens, by the tile kernels: one edit in one, several in the other."""
    runs = RUNS if GPU else {1: [1, 65], 3: [3, 63], 8: [64, 2], 37: [130, 1]}[edits]
    wished = [Wish("clamps", edits, tokens) for tokens in runs]
    assert check(wished, TILED, width=37, dtype=dtype, form=form, seed=edits) > sum(runs) // 8


@FORMS
@EACH_PATH
def test_lists_on_items(path: Path, form: int) -> None:
    wished = [Wish("list", 7, 9), Wish("list", 5, 3, True), Wish("elsewhere", 1, 2), Wish("clamps", 12, 4)]
    assert check(wished, path, width=130, dtype=torch.float16, form=form, seed=form) > 4


@pytest.mark.parametrize("form", [BARE, NORMED, PAIR] if GPU else [PAIR])
def test_items_without_tile_kernels(form: int) -> None:
    """As in a captured step of many tokens."""
    wished = [Wish("list", 3, 2, True), Wish("clamps", 3, 65), Wish("clamps", 5, 1)]
    assert check(wished, SPANS, width=17, dtype=torch.float16, form=form, seed=form) > 4


@pytest.mark.parametrize("edits", [5, 16, 17, 61, 64, 65], ids="edits{}".format)
@pytest.mark.parametrize("gated", [False, True], ids=["free", "gated"])
def test_programs_that_share_a_token(edits: int, gated: bool) -> None:
    """A single group of more than four entries is cut in parts; its neighbours have none, or others."""
    wished = [Wish("clamps", edits, 2, gated), Wish("list", 3, 2), Wish("clamps", 6, 1)]
    assert check(wished, TOKEN, width=130, dtype=torch.float32, form=NORMED, seed=edits) > 2


@pytest.mark.parametrize("tokens", [260, 330, 345, 500])
def test_programs_that_share_a_token_at_the_end_of_a_long_step(tokens: int) -> None:
    """Scratch has 1,024 rows for sums of parts: each token has three of them in steps up to 341, and two up to 512."""
    assert parts(tokens, MOST_PARTS) == (3 if tokens <= 341 else 2)
    wished = [Wish("none", 0, tokens - 24), Wish("clamps", 13, 20), Wish("list", 3, 1), Wish("clamps", 1, 3)]
    assert check(wished, TOKEN, width=130, dtype=torch.float32, form=NORMED, seed=tokens) > 2


@FORMS
@EACH_PATH
@pytest.mark.parametrize("seed", range(8 if GPU else 2), ids="seed{}".format)
def test_whole_dictionaries(path: Path, form: int, seed: int) -> None:
    """Ranks and reconstructions; a dictionary for each request."""
    wished = [Wish("dense", 3, 2), Wish("list", 2, 1), Wish("dense", 6, 2, True)]
    check(wished, path, width=64, dtype=torch.float32, form=form, seed=100 * form + seed)


@EACH_PATH
@pytest.mark.parametrize("seed", [1, 2, 3] if GPU else [3], ids="seed{}".format)
def test_more_tokens_than_are_encoded_at_once(path: Path, seed: int) -> None:
    """Scratch has room for TILE tokens: the rest takes other rounds, and items lie across their borders."""
    wished = [Wish("list", 1, 20), Wish("dense", 2, TILE - 10), Wish("dense", 1, 30)]
    assert check(wished, path, width=37, dtype=torch.float16, seed=seed) > TILE // 2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", [TOKEN, TILED], ids=str)
def test_every_width(path: Path, width: int) -> None:
    wished = [Wish("clamps", 5, 3), Wish("list", 3, 2), Wish("clamps", 1, 3)]
    check(wished, path, width=width, dtype=DTYPES[-1], form=NORMED, seed=width)


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("warps", [1, 2, 4], ids="warps{}".format)
def test_every_way_to_launch(chunk: int, warps: int) -> None:
    edit = EditConfig(num_warps=warps, chunk=chunk, programs=2)
    assert -(-576 // block(warps)) == {1: 3, 2: 2, 4: 1}[warps], "blocks of a row"
    path = replace(TOKEN, tuned=replace(configs(576), edit=tuple((most, edit) for most, _ in configs(576).edit)))
    wished = [Wish("clamps", 7, 3), Wish("dense", 3, 2), Wish("list", 5, 2)]
    check(wished, path, width=576, dtype=torch.float32, form=NORMED, seed=chunk)


@pytest.mark.parametrize(("at_once", "form"), [(1, BARE), (2, NORMED), (4, PAIR)])
@pytest.mark.parametrize("warps", [1, 4], ids="warps{}".format)
def test_every_way_to_launch_lone_entries(warps: int, at_once: int, form: int) -> None:
    lone = replace(configs(576).lone, num_warps=warps, at_once=at_once)
    path = replace(TILED, tuned=replace(configs(576), lone=lone))
    check([Wish("clamps", 1, 11), Wish("clamps", 1, 3)], path, width=576, dtype=torch.float32, form=form, seed=at_once)


@TYPED
@EACH_PATH
def test_many_edits(dtype: torch.dtype, path: Path, form: int) -> None:
    wished = [Wish("clamps", MOST_EDITS, 2), Wish("clamps", 9, 3), Wish("list", min(MOST_EDITS, 200), 1)]
    check(wished, path, width=WIDTHS[-1] if GPU else 64, dtype=dtype, form=form, seed=form + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(6), ids="seed{}".format)
def test_a_dictionary_of_a_million_features(seed: int) -> None:
    wished = [Wish("dense", 3, 2), Wish("clamps", 7, 2), Wish("dense", 2, 1)]
    check(wished, TOKEN, width=8, dtype=torch.bfloat16, seed=seed, sizes=(1 << 20,))
