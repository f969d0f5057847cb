"""What features do on a text: how strong, how often, and where most. Takes activations as they come; knows no model.

Strong is what is far from 0: activations of abstopk are signed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saesteer.labels.store import Spot


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """The active features of a text's tokens, one item for each pair of a token and a feature."""

    positions: Tensor  # [n] int64, of the token in its text
    rows: Tensor  # [n] int64, of the dictionary
    values: Tensor  # [n] float32, in the dictionary's own unit
    tokens: int  # how many tokens counted, active or not

    @classmethod
    def of(cls, dense: Tensor, start: int = 0) -> "Active":
        """Those of activations [tokens, F], of which the first token stands at position ``start``."""
        at, rows = (part.cpu() for part in dense.nonzero(as_tuple=True))
        return cls(at + start, rows, dense.cpu()[at, rows], len(dense))

    @classmethod
    def joined(cls, parts: Sequence["Active"]) -> "Active":
        """Those of a text that was read in parts, at least one."""
        positions, rows, values = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("positions", "rows", "values")
        )
        return cls(positions, rows, values, sum(part.tokens for part in parts))


class Gathered:
    """What has been seen of a dictionary's features so far.

    Args:
        features: rows of the dictionary.
        most: strongest places that are kept of each feature; at most one in a text.
    """

    def __init__(self, features: int, most: int) -> None:
        self.tokens = 0
        self.counts = torch.zeros(features, dtype=torch.int64)
        self.max_act = torch.zeros(features)
        self.total = torch.zeros(features, dtype=torch.float64)
        self._best = torch.zeros(features, most)
        self._where = torch.zeros(features, most, 2, dtype=torch.int64)  # text, position

    def add(self, text: int, active: Active) -> None:
        """Count a text."""
        self.tokens += active.tokens
        self.counts += torch.bincount(active.rows, minlength=len(self.counts))
        self.total.index_add_(0, active.rows, active.values.double())
        sizes, items = active.values.abs(), torch.arange(len(active.rows))
        best = torch.zeros_like(self.max_act).scatter_reduce_(0, active.rows, sizes, "amax")
        self.max_act = torch.maximum(self.max_act, best)
        top = sizes == best[active.rows]
        # Of each row the first of its largest values: items are in the order of their positions.
        first = torch.full_like(self.counts, len(items)).scatter_reduce_(0, active.rows[top], items[top], "amin")
        seen = first < len(items)
        here = torch.full((len(best), 2), text)
        best[seen], here[seen, 1] = active.values[first[seen]], active.positions[first[seen]]
        # The earlier of equal values comes first: sort is stable, topk is not.
        values, where = torch.cat([self._best, best[:, None]], 1), torch.cat([self._where, here[:, None]], 1)
        order = values.abs().argsort(dim=-1, descending=True, stable=True)[:, :-1]
        self._best, self._where = values.gather(1, order), where.gather(1, order[..., None].expand(-1, -1, 2))

    def density(self, row: int) -> float:
        """The fraction of the tokens on which a feature was active."""
        return int(self.counts[row]) / max(1, self.tokens)

    def spots(self, row: int, spans: Sequence[Sequence[tuple[int, int]]]) -> tuple[Spot, ...]:
        """Where a feature was strongest, strongest first, with the activation's sign.

        Args:
            row: of the dictionary.
            spans: first character and the one after the last of each token of each text.
        """
        places = zip(self._best[row].tolist(), self._where[row].tolist(), strict=True)
        return tuple(Spot(value, text, *spans[text][at]) for value, (text, at) in places if value)


def strongest(positive: Gathered, negative: Gathered, most: int) -> list[tuple[int, float, float]]:
    """The rows with a larger mean activation in the positive text, the largest difference first.

    Returns:
        Row, mean in the positive text, mean in the negative one; a text without a token has the mean 0.
    """
    here, there = (one.total / max(1, one.tokens) for one in (positive, negative))
    gains, rows = (here - there).topk(min(most, len(here)))
    return [(row, float(here[row]), float(there[row])) for row in rows[gains > 0].tolist()]
