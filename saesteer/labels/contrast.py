"""Which features tell two texts apart: those whose mean activation differs most. Knows no model and no file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from saesteer.labels.gather import Active


@dataclass(slots=True, eq=False)
class Mean:
    """The mean activation of each feature over what has been read so far."""

    total: Tensor  # [F] float64
    tokens: int = 0

    @classmethod
    def of(cls, features: int) -> "Mean":
        """Of nothing yet."""
        return cls(torch.zeros(features, dtype=torch.float64))

    def add(self, active: Active) -> None:
        """Count a text."""
        self.total.index_add_(0, active.rows, active.values.double())
        self.tokens += active.tokens

    @property
    def value(self) -> Tensor:
        """[F] float64, in the dictionary's own unit; 0 of no token."""
        return self.total / max(1, self.tokens)


def strongest(positive: Mean, negative: Mean, most: int) -> list[tuple[int, float, float]]:
    """The rows that are stronger in the positive text, the largest difference first.

    Returns:
        Row, mean in the positive text, mean in the negative one.
    """
    here, there = positive.value, negative.value
    gains, rows = (here - there).topk(min(most, len(here)))
    return [
        (row, float(here[row]), float(there[row]))
        for row, gain in zip(rows.tolist(), gains.tolist(), strict=True)
        if gain > 0
    ]
