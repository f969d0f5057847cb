"""How much the reference computes, which serves on a CPU; what it computes is the other files' subject."""

from __future__ import annotations

import pytest
from torch import Tensor

from saesteer.kernels import layout, reference
from tests.kernels.exact import WIDTH, edit, ramp
from tests.kernels.tables import Entry


@pytest.mark.parametrize(("flags", "norms"), [(0, 0), (layout.LAYER_NORM, 1), (layout.MATCH, 0)])
def test_a_group_of_many_entries_is_taken_at_once(flags: int, norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, 60 clamps of one request took everybody's step from 29 to 107 ms."""
    found: list[int] = []
    whole = reference._input_norm

    def counted(x: Tensor, flag: int) -> tuple[Tensor, Tensor, Tensor]:
        found.append(flag)
        return whole(x, flag)

    monkeypatch.setattr(reference, "_input_norm", counted)
    group = [Entry(n % WIDTH, scale=0.0, shift=1.0, flags=flags, counter=n % 4) for n in range(60)]
    out = edit(None, ramp(0.5, 1.5), [group], norms=True)
    assert found == [flags] * norms and out.counts[1].sum() > 0
