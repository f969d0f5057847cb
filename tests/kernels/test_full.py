"""Rows that are only reconstructed, in numbers to follow by hand: in long steps, a kernel of their own does them."""

import pytest

pytest.importorskip("triton", reason="no Triton on this platform")

from saesteer.kernels import layout
from tests.kernels.exact import WIDTH, Run, along
from tests.kernels.tables import Entry

ONE = along(1.0)  # a token


def test_a_lone_reconstruction_has_strict_thresholds_and_a_window(run: Run) -> None:
    whole = Entry(0, flags=layout.RECONSTRUCT, size=4, lo=1, hi=3, gain=0.5, counter=1)
    encoder, threshold = along(1.0, 2.0, 3.0, 4.0), [0.0, 2.0, 2.0, 3.0]
    out = run(ONE * 4, [[whole]], encoder=encoder, threshold=threshold, dense=(0, 4), b_dec=[1.0] * WIDTH)
    # Half of x = (1, 0, ...) and half of (1 + 1, 1, 3 + 1, 4 + 1, 1, ...)
    assert out.stream[1].tolist() == out.stream[2].tolist() == [1.5, 0.5, 2.0, 2.5, 0.5, 0.5, 0.5, 0.5]
    assert out.stream[0].tolist() == out.stream[3].tolist() == ONE[0]
    assert out.counts[1].tolist() == [0, 2, 0, 0]
