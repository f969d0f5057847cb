"""What a test of a format consists of, and the activations written out in numpy; knows no loader and no format."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = tuple[str, Callable[[Path], Path], str]  # name, what writes a wrong file, words of the message
Told = tuple[str, Callable[[Path], Path], dict[str, Any]]  # name, what writes a skip transcoder, facts of its info


@dataclass(frozen=True)
class Case:
    """One file and what it must mean: ``encode(x)`` and ``decode(f, x)`` in numpy, and facts of its info."""

    name: str
    write: Callable[[Path], Path]
    encode: Callable[[Array], Array]
    decode: Callable[[Array, Array], Array]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One good dictionary of a format, whose parts are broken one after the other."""

    file: str  # with the arrays, below the folder
    write: Callable[[Path, dict[str, Any]], Path]  # (folder, arrays) -> the place
    arrays: Mapping[str, Any]
    config: str | None = None  # the name of the file, below the folder
    optional: Set[str] = frozenset()  # arrays that it may lack
    tells: Set[str] = frozenset()  # keys without which it is of no known format


def relu(pre: Array) -> Array:
    return np.maximum(pre, 0)


def jumprelu(pre: Array, theta: NDArray[Any]) -> Array:
    return pre * (pre > theta)


def topk(pre: Array, k: int) -> Array:
    keep = np.zeros_like(pre)
    np.put_along_axis(keep, np.argsort(-pre, axis=-1, kind="stable")[..., :k], 1, axis=-1)
    return relu(pre * keep)


def affine(r: Mapping[str, Any]) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    """What the encoder and the decoder of these arrays make, without an activation."""
    return (
        lambda x: np.asarray(x @ r["W_enc"] + r["b_enc"]),
        lambda f, x: np.asarray(f @ r["W_dec"] + r["b_dec"]),
    )
