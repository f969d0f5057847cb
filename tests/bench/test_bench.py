"""The benchmark's own rules, without a GPU: what it measures, what it lets through, and what it counts as ours."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.batch import FORMS, TINY, Batches, edit, floor
from bench.cases import CASES, WIDTHS, Case
from bench.gate import Gate
from bench.layers import CASES as LAYER_CASES
from bench.layers import TOKENS, Layers
from bench.timing import Ceilings

CEILING = Ceilings(copy_gb_s=4300, matmul_tflop_s=790, launch_us=0.5)
BY_NAME = {case.name: case for case in CASES}


def small(case: Case) -> Case:
    """The same case with fewer tokens and edits, for the reference to be quick."""
    lengths = tuple(min(length, 3) for length in case.lengths[:20])
    return replace(case, lengths=lengths, edits=min(case.edits, 9))


@pytest.mark.parametrize("case", LAYER_CASES)
def test_a_models_layers_are_edited_where_the_case_says(case: str) -> None:
    model = Layers(40, 3, read=1 << 12, device="cpu", dtype=torch.float32)
    run, counts = model.step(case)
    run()
    at = {"nobody steered": [], "a clamp at one layer": [1]}.get(case, [0, 1, 2])
    assert model.steered(case) == at
    expected = torch.zeros(1 + TOKENS, counts.shape[1], dtype=torch.int32)
    expected[1:, at] = 1
    assert torch.equal(counts, expected)


@pytest.fixture(scope="module")
def batches() -> Batches:
    return Batches(40, "cpu", torch.float32, features=256)


# Of issue and README: tokens, requests, floor in µs at both widths with cold weights, on one tensor.
@pytest.mark.parametrize(
    ("name", "tokens", "steered", "at_2304", "at_5376"),
    [
        ("256 x 1", 256, 256, 1.1, 2.6),
        ("8192 x 1", 8192, 8192, 17.6, 41.0),
        ("8192 x 1, one in ten", 8192, 820, 1.8, 4.1),
        ("16 x 32", 16, 16, 1.1, 2.6),
        ("8192 x 32", 8192, 8192, 18.7, 43.5),
        ("16 x 256", 16, 16, 8.8, 20.5),
    ],
)
def test_floors(name: str, tokens: int, steered: int, at_2304: float, at_5376: float) -> None:
    case = BY_NAME[name]
    assert (case.tokens, case.steered_tokens) == (tokens, steered)
    for width, expected in zip(WIDTHS, (at_2304, at_5376), strict=True):
        assert floor(case, "bare", "cold", width, CEILING) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gate_lets_the_reference_through_and_nothing_else(batches: Batches, case: Case, form: str) -> None:
    gate = Gate(batches, small(case), form)
    assert gate.wrong(edit) is None
    if not case.steered:
        return
    assert gate.wrong(lambda *_: None), "doing nothing is wrong"

    def poisoned(stream: Any, *rest: Any) -> None:
        edit(stream, *rest)
        stream[int(gate.tokens[0]), 0] = float("nan")

    assert "finite" in str(gate.wrong(poisoned))


def test_the_gate_sees_a_changed_token_that_nobody_steers(batches: Batches) -> None:
    gate = Gate(batches, small(BY_NAME["8192 x 1, one in ten"]), "normed")

    def untidy(stream: Any, *rest: Any) -> None:
        edit(stream, *rest)
        stream[3] += 1

    assert "without an edit" in str(gate.wrong(untidy))


@pytest.mark.parametrize("kind", ["clamp", "add", "cap", "ablate", "match", "topk", "reconstruct"])
def test_what_is_timed_edits_in_full_and_leaves_the_stream(kind: str) -> None:
    batches = Batches(48, "cpu", torch.bfloat16, features=128)
    case = Case("some", (2, 2), edits=1 if kind == "reconstruct" else 3, kind=kind)
    assert 0 < TINY < 1e-9
    [call, *_] = batches.calls(case, "bare", "warm")
    before, counts = call[0].clone(), call[3]
    edit(*call)
    assert torch.equal(call[0], before)
    # Nearly no projection is within a cap, but one may be.
    assert int(counts[1:, : case.edits].sum()) >= 0.9 * case.tokens * case.edits
