"""Tokens that are captured for read-outs: as they come into a site, and as its edits leave them. No other results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from saesteer.kernels import layout
from saesteer.kernels.layout import BARE, NORMED, PAIR
from tests.kernels.exact import Run, ramp
from tests.kernels.harness import bits
from tests.kernels.tables import Entry

CAPTURED: dict[str, Sequence[Sequence[Entry]]] = {
    "nothing is edited": [],
    "one entry": [[Entry(2, shift=1.0, lo=1)]],
    "many": [[Entry(slot, shift=1.0, lo=1) for slot in range(6)]],
    "parts": [[Entry(2, shift=0.25, lo=1)] * 40],
    "two groups behind a gate": [
        [Entry(0, low=0.0, gates=1, flags=layout.GATE)],
        [Entry(4, shift=1.0, gates=1)],
        [Entry(5, scale=3.0)],
    ],
    "a reconstruction": [[Entry(0, flags=layout.RECONSTRUCT, size=4), Entry(2, shift=1.0)]],
    "what overflows": [[Entry(2, shift=60000.0, lo=1)] * 2],
}


BOTH = layout.BEFORE | layout.AFTER
CALLS = [(case, PAIR, one) for case in ("nothing is edited", "one entry") for one in (layout.BEFORE, layout.AFTER)]
CALLS += [(case, form, BOTH) for case in CAPTURED for form in (BARE, NORMED, PAIR)]


@pytest.mark.parametrize(("case", "form", "captures"), CALLS)
def test_a_captured_token_is_what_comes_and_what_stays(run: Run, case: str, form: int, captures: int) -> None:
    """To the bit, next to the same call that captures nothing, which leaves the same stream."""
    stream = torch.tensor(ramp(1.5, 2.0, -3.0), dtype=torch.float16)
    second = None if form == BARE else torch.full_like(stream, 0.125)
    given = {"form": form, "second": second, "dense": (0, 4)}
    plain, out = run(stream, CAPTURED[case], **given), run(stream, CAPTURED[case], **given, captures=captures)
    assert torch.equal(bits(out.stream), bits(plain.stream))
    assert out.counts.tolist() == plain.counts.tolist()

    def whole(x: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
        return x + addend if form == PAIR and addend is not None else x

    nothing = torch.full_like(stream, 77.0)
    assert out.before is not None
    assert out.after is not None
    came, stays = whole(stream, second), whole(plain.stream, plain.second)
    assert torch.equal(bits(out.before), bits(came if captures & layout.BEFORE else nothing))
    assert torch.equal(bits(out.after), bits(stays if captures & layout.AFTER else nothing))


@pytest.mark.parametrize("form", [BARE, NORMED, PAIR])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_of_a_step_is_copied_at_once(form: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the edit kernel in graphs of steps that only read."""
    from saesteer.kernels.edit import captured
    from tests.kernels import exact, harness  # they import Triton

    def capture(x: Any, addend: Any, _weight: Any, _counts: Any, bound: Any, form: int, *_: Any, **__: Any) -> None:
        captured.capture(x, addend, bound, form)

    stream = torch.tensor(ramp(*range(70))).to(dtype)
    second = None if form == BARE else torch.ones_like(stream)  # the interpreter does not round sums in bf16
    given: Any = {"form": form, "second": second, "captures": layout.BEFORE}
    want = exact.edit(None, stream, [], **given)
    monkeypatch.setattr(harness, "edit_triton", capture)
    out = exact.edit(harness.Path(1), stream, [], **given)
    for name in ("stream", "second", "before", "after", "counts"):
        one, other = getattr(out, name), getattr(want, name)
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("kinds", [layout.BEFORE, layout.BEFORE | layout.LONE, layout.BEFORE | layout.AFTER])
@pytest.mark.parametrize("long", [False, True])
def test_a_step_in_which_rows_only_capture_is_copied_at_once(
    kinds: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs, unless somebody edits there or it is long; then tokens of nobody are left out."""
    from saesteer.kernels.edit import launch
    from tests.kernels import exact, harness  # they import Triton

    def launched(*given: Any, **how: Any) -> None:
        bound = given[4]
        bound.kinds[0] = kinds
        bound.work[0, 0] -= 1  # the last token is nobody's
        launch.edit_triton(*given, **how | {"tiled": how["tiled"] or None})

    monkeypatch.setattr(harness, "edit_triton", launched)
    monkeypatch.setattr(launch, "TILED_ABOVE", 4 if long else 512)
    stream = torch.tensor(ramp(*range(6)), dtype=torch.float16)
    out = exact.edit(harness.Path(1), stream, [], captures=layout.BEFORE)
    assert out.before is not None
    same = (bits(out.before) == bits(stream)).all(dim=1).tolist()
    assert same == [True] * 5 + [kinds == layout.BEFORE and not long]
