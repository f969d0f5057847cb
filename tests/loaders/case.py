"""What a test of a format consists of, and the activations written out in numpy; knows no loader and no format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.loaders.writers import F

Array = NDArray[np.float64]
Row = tuple[str, Callable[[Path], Path], str]  # name, what writes a wrong file, words of the message


@dataclass(frozen=True)
class Case:
    """One file and what it must mean: ``encode(x)`` and ``decode(f, x)`` in numpy, and facts of its info."""

    name: str
    write: Callable[[Path], Path]
    encode: Callable[[Array], Array]
    decode: Callable[[Array, Array], Array]
    facts: dict[str, Any]


def relu(pre: Array) -> Array:
    return np.maximum(pre, 0)


def jumprelu(pre: Array, theta: NDArray[Any]) -> Array:
    return pre * (pre > theta)


def topk(pre: Array, k: int) -> Array:
    keep = np.zeros_like(pre)
    np.put_along_axis(keep, np.argsort(-pre, axis=-1, kind="stable")[..., :k], 1, axis=-1)
    return relu(pre * keep)


def wrong_arrays(
    name: str, file: str, write: Callable[[Path, dict[str, Any]], Path], good: Mapping[str, Any]
) -> list[Row]:
    """What no format may take: an array that is missing, of another rank or not finite, a matrix turned, one more."""

    def row(what: str, arrays: Mapping[str, Any], words: str) -> Row:
        return f"{name}-{what}", lambda folder: write(folder, dict(arrays)), f"{file}: {words}"

    rows = [row("unknown", {**good, "unknown": np.ones(F, np.float32)}, "unknown: an unknown key")]
    for key, value in good.items():
        spoiled = np.array(value)
        spoiled.flat[-1] = np.nan
        rows.append(row(f"nan-{key}", {**good, key: spoiled}, f"{key}: holds nan; expected finite values"))
        rows.append(row(f"no-{key}", {one: good[one] for one in good if one != key}, f"{key}: missing among the keys"))
        if value.ndim:
            rows.append(row(f"rank-{key}", {**good, key: value[None]}, f"{key}: shape [1, "))
        if value.ndim == 2:
            # Where the shapes alone give the sizes, a turned matrix contradicts the first vector.
            rows.append((f"{name}-turned-{key}", row("", {**good, key: value.T}, "")[1], ": shape ["))
    return rows
