"""Reductions of what was read, from numbers of some positions after the others'. A new one is a row of ``REDUCTIONS``.

Knows neither how the numbers came nor what an answer makes of them (answers.py).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.planning.plan import Readout

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


_LOOSE = 64  # last pieces that may still fall away: more than a step has guessed tokens


class Piece(NamedTuple):
    """What a reduction has of some positions, which are all in one message if each of these has a mean of its own."""

    first: int
    end: int  # behind the last one
    tokens: int
    numbers: Numbers  # sum, maximum or last row: float32 as it came, sums of several pieces in float64


class Pieces:
    """A reduction in the making, with the memory of a few pieces.

    Args:
        readout: what is reduced.
    """

    def __init__(self, readout: Readout) -> None:
        self._readout = readout
        self._pieces: list[Piece] = []  # ascending

    def add(self, piece: Piece) -> None:
        """Adds a piece, in place of those that it computes again."""
        while self._pieces and self._pieces[-1].first >= piece.first:
            self._pieces.pop()
        self._pieces.append(piece)
        # A preemption computes all again, so of older pieces only what they make together is kept.
        at = len(self._pieces) - _LOOSE
        if at > 0 and self._message(self._pieces[at - 1]) == self._message(self._pieces[at]):
            self._pieces[at - 1 : at + 1] = [self._joined(self._pieces[at - 1], self._pieces[at])]

    def whole(self, end: int) -> dict[int, Piece]:
        """What it comes to at positions below ``end``, in float32: of each message by its number; else one, or none."""
        found: dict[int, Piece] = {}
        for piece in self._pieces:
            if piece.first < end:
                number = self._message(piece)
                found[number] = self._joined(found[number], piece) if number in found else piece
        finish = REDUCTIONS[self._readout.reduce].finish
        return {number: one._replace(numbers=finish(one.numbers, one.tokens)) for number, one in found.items()}

    def _message(self, piece: Piece) -> int:
        """The number of its message, if each has a mean of its own."""
        return bisect_right(self._readout.starts, piece.first) - 1

    def _joined(self, one: Piece, two: Piece) -> Piece:
        """A piece and one behind it."""
        numbers = REDUCTIONS[self._readout.reduce].join(one.numbers, two.numbers)
        return Piece(one.first, two.end, one.tokens + two.tokens, numbers)
