"""The strongest features of tokens, in the order that reads have them. Knows no model and no request."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError


class ActiveFeature(NamedTuple):
    """One feature on one token."""

    position: int
    token: str
    feature: int
    value: float  # in the dictionary's own unit


def strongest(info: CoderInfo, f: Tensor, words: Sequence[str], top_k: int) -> list[list[ActiveFeature]]:
    """The strongest active features of each token, strongest first; ties go to the lowest row.

    The strongest of abstopk have the largest absolute value, whatever their sign.

    Args:
        info: of the dictionary.
        f: [tokens, F], what its ``encode`` returns.
        words: of the tokens.
        top_k: features of a token, at most.

    Raises:
        ConfigError: ``top_k`` is negative.
    """
    if top_k < 0:
        raise ConfigError(f"top_k: got {top_k}, expected 0 or more")
    found = []
    for position, (word, values) in enumerate(zip(words, f, strict=True)):
        rows = values.nonzero()[:, 0]
        key = values[rows].abs() if info.activation == "abstopk" else values[rows]
        rows = rows[key.argsort(descending=True, stable=True)[:top_k]]
        pairs = zip(rows.tolist(), values[rows].tolist(), strict=True)
        found.append([ActiveFeature(position, word, info.ids[row], value) for row, value in pairs])
    return found
