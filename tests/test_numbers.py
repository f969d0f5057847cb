"""Numbers of answers have seven digits, and those of many are what those of few are."""

import math

import numpy as np
import pytest

from saesteer.planning import figures


@pytest.mark.parametrize("seed", range(4))
def test_many_numbers_are_rounded_as_text_is(seed: int) -> None:
    draw = np.random.default_rng(seed)
    found = draw.standard_normal(20_000) * 10.0 ** draw.uniform(-9, 9, 20_000)
    halves = (2 * np.arange(4096) + 1) / 2.0 ** draw.integers(0, 14, 4096)  # ties
    tens = 10.0 ** np.arange(-12, 12)
    near = [np.nextafter(tens.astype(np.float32), np.float32(side)) for side in (0, math.inf)]
    special = np.array([0.0, -0.0, math.inf, -math.inf, 9999999.5])
    numbers = np.concatenate([found, halves, tens, *near, -tens, special]).astype("<f4")
    one_by_one = [float(f"{number:.7g}") for number in numbers.tolist()]
    assert list(map(str, figures.floats(numbers.tobytes()))) == list(map(str, one_by_one))
    assert figures.floats(numbers[:7].tobytes()) == one_by_one[:7]
    assert all(map(math.isnan, figures.floats(np.full(100, np.nan, "<f4").tobytes())))
