"""The counters of one step, as the device has left them in host memory (kernels/layout.py). Knows no request."""

import numpy as np
from numpy.typing import NDArray


class Published:
    """The counters of a step, in memory that a later step will write to.

    Args:
        words: [1 + rows * counters], see layout.py.
        counters: the largest number of counters in a row.
    """

    def __init__(self, words: NDArray[np.int32], counters: int) -> None:
        self._words = words
        self._counts = words[1:].reshape(-1, counters)

    def read(self, step: int, rows: list[int], counters: int) -> NDArray[np.int32]:
        """The first counters of these rows, int32 [rows, counters]; a copy. Those that a row does not use are noise.

        Raises:
            RuntimeError: the memory holds the counters of another step.
        """
        if self._words[0] != step:
            raise RuntimeError(f"counters of step {step} were asked for, but the memory holds step {self._words[0]}")
        return self._counts[rows, :counters]
