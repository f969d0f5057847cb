"""The reductions of rows that requests read. A new one is a row of this table, and touches nothing else."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]


class Reduction(NamedTuple):
    """A reduction of rows to one, part by part.

    ``device`` makes float32 [d] of the rows of one step: their sum, the largest of each column, or the last one.
    """

    device: Literal["sum", "max", "last"]
    join: Callable[[Numbers, Numbers], Numbers]  # two parts, the later one second
    finish: Callable[[Numbers, int], Numbers]  # what all parts come to, and how many rows there were
    by_message: bool = False  # each chat message is reduced for itself


def _add(one: Numbers, two: Numbers) -> Numbers:
    return np.add(one, two, dtype=np.float64)


def _divide(numbers: Numbers, rows: int) -> Numbers:
    return (numbers.astype(np.float64) / rows).astype(np.float32)


def _keep(numbers: Numbers, _: int) -> Numbers:
    return numbers


REDUCTIONS: Mapping[str, Reduction] = {
    "mean": Reduction("sum", _add, _divide),
    "max": Reduction("max", np.maximum, _keep),
    "last": Reduction("last", lambda _, two: two, _keep),
    "message": Reduction("sum", _add, _divide, by_message=True),
}


def is_by_message(name: str) -> bool:
    """Whether this reduction, or "none", reduces each chat message for itself."""
    return name in REDUCTIONS and REDUCTIONS[name].by_message
