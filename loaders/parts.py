"""From arrays that hold a matrix for each of several layers to the matrices. Knows no format, and reads no value."""

import math
from collections.abc import Mapping
from dataclasses import replace

from saesteer.loaders.arrays import DTYPES, Arrays, StoredArray


def split(arrays: Arrays, key: str, rank: int, names: Mapping[int, str], *, axis: int = 0) -> Arrays:
    """The arrays of a file with parts of one array in its place.

    Args:
        arrays: of a safetensors file.
        key: the array, dense and in the order of its axes.
        rank: how many axes it must have.
        names: the name of each part, by its index in an axis; other parts are left out.
        axis: the axis, 0 or 1, which the parts lack.

    Raises:
        LoadError: the array is missing, or has another rank.
    """
    arrays.shape(key, rank)
    index = dict(arrays.index)
    whole = index.pop(key)
    return replace(arrays, index=index | {name: _part(whole, axis, at) for at, name in names.items()})


def _part(whole: StoredArray, axis: int, at: int) -> StoredArray:
    assert 0 <= at < whole.shape[axis] and not whole.fortran, (at, whole)
    size = DTYPES[whole.dtype].itemsize * math.prod(whole.shape[axis + 1 :])
    shape = whole.shape[:axis] + whole.shape[axis + 1 :]
    pitch = whole.shape[axis] * size if axis else None
    return whole._replace(shape=shape, start=whole.start + at * size, pitch=pitch)
