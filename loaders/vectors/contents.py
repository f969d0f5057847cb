"""What a file of vectors holds, whatever its container: arrays and words by name. Knows no meaning of a name.

What stands inside another thing has the names of both, with a / between them. A list is an axis. Of a .pt file tensors
and NumPy's arrays are unpickled, and nothing else.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from saesteer.errors import LoadError
from saesteer.loaders.arrays import DTYPES, Arrays
from saesteer.loaders.files import check_fetched, readable, wrong
from saesteer.loaders.opening import ONLY, members, open_arrays, pickled
from saesteer.loaders.vectors import gguf

MAX_FILE_BYTES = 64 << 20  # 126 layers of 16,384 in float32 are 8 MB
_MOST_WHOLE = 10_000  # whole numbers are layers
_DEEPEST = 3
_WHOLE = {"I64": "<i8", "I32": "<i4"} | {name: name for name in ("<i8", "<i4")}
_MAKERS: list[Any] = [np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
# What torch.load may make besides tensors; in NumPy 1, two of them have other names.
_SAFE: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8"))]
_SAFE += [(one, f"numpy.{core}.multiarray.{one.__name__}") for one in _MAKERS for core in ("core", "_core")]

MATRIX = "[d] or [layers, d]; axes of length 1 do not count"

Numbers = NDArray[Any]  # of floats or whole numbers


class Contents(NamedTuple):
    """What a file holds."""

    arrays: dict[str, Numbers]  # without the axes of length 1
    words: dict[str, object]  # texts, and single numbers


def contents(path: Path) -> Contents:
    """What a file holds; raises LoadError if it is too large, broken, or has other things than arrays and words."""
    if path.is_dir() or path.suffix not in READERS:
        what = "a folder" if path.is_dir() else f"the suffix {path.suffix!r}"
        raise LoadError(f"{path}: {what}; expected a file of vectors, one of {', '.join(READERS)}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise LoadError(f"{path}: {size} bytes; expected vectors, of at most {MAX_FILE_BYTES} bytes")
    check_fetched(path)
    arrays: dict[str, Numbers] = {}
    words: dict[str, object] = {}
    with readable(str(path), f"a complete {path.suffix} file"):
        for name, value in READERS[path.suffix](path):
            if isinstance(value, np.ndarray) and value.size != 1:
                arrays[name] = value.squeeze()
            else:
                words[name] = value.item() if isinstance(value, np.ndarray) else value
    return Contents(arrays, words)


def _arrays(path: Path) -> Iterator[tuple[str, object]]:
    opened = open_arrays(path)
    yield from opened.metadata.items()
    for key, stored in opened.index.items():
        shape = tuple(size for size in stored.shape if size != 1) or (1,)
        opened.index[key] = stored._replace(shape=shape)
        if len(shape) > 2:
            raise wrong(path, key, f"shape {list(stored.shape)}", MATRIX)
        if len(shape) == 2 and stored.dtype in DTYPES:
            rows, columns = opened.shape(key, 2)
            yield key, opened.matrix(key, (rows, columns), torch.float32).numpy()
        else:
            yield key, _whole(opened, key) if stored.dtype in _WHOLE else opened.vector(key).numpy()


def _whole(opened: Arrays, key: str) -> Numbers:
    stored = opened.index[key]
    dtype, count = np.dtype(_WHOLE[stored.dtype]), math.prod(stored.shape)
    if count > _MOST_WHOLE:
        raise wrong(opened.path, key, f"{stored.dtype} {list(stored.shape)}", "floats")
    with opened.opened(stored) as stream:
        return np.frombuffer(stream.read(count * dtype.itemsize), dtype).reshape(stored.shape)


def _pt(path: Path) -> Iterator[tuple[str, object]]:
    members(path)  # refuses what is compressed, or would be unpickled for long: a small file could fill the memory
    with torch.serialization.safe_globals(_SAFE):
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as exc:
            raise pickled(path) from exc
    left = 2 * MAX_FILE_BYTES
    for key, value in _leaves(path, held):
        parts = value if isinstance(value, list | tuple) else [value]
        left -= sum(4 * math.prod(one.shape) for one in parts if isinstance(one, torch.Tensor | np.ndarray))
        if left < 0:  # views may claim more than their file holds, and one thing may stand in many places
            raise wrong(path, key, "more in memory than a file may hold", f"at most {2 * MAX_FILE_BYTES} bytes in all")
        yield key, _from_torch(path, key, value)


def _leaves(path: Path, value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What stands in dicts, by the names of all of them."""
    if not isinstance(value, Mapping):
        yield name or ONLY, value
    elif depth == _DEEPEST:
        raise wrong(path, name, "deeper than the rest", f"at most {_DEEPEST} dicts inside each other")
    else:
        for key, one in value.items():
            yield from _leaves(path, one, f"{name}/{key}" if name else str(key), depth + 1)


def _from_torch(path: Path, key: str, value: Any) -> object:
    if isinstance(value, list | tuple) and value and all(isinstance(one, torch.Tensor | np.ndarray) for one in value):
        return np.stack([np.asarray(_from_torch(path, key, one)) for one in value])
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_complex() or value.is_quantized:
            raise wrong(path, key, f"{value.dtype} with layout {value.layout}", "a dense tensor of floats")
        return (value.detach().float() if value.is_floating_point() else value).contiguous().numpy()
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, str | int | float | np.ndarray | None):
        raise wrong(path, key, f"a {type(value).__name__}", "tensors by name, with numbers and texts beside them")
    return value


def _json(path: Path) -> Iterator[tuple[str, object]]:
    for key, value in _leaves(path, json.loads(path.read_bytes())):
        try:
            yield key, np.array(value, np.float64) if isinstance(value, list) else value
        except ValueError:
            raise wrong(path, key, "a list of other things, or uneven", "a list of numbers") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[str, object]]]] = {
    ".safetensors": _arrays,
    ".npy": _arrays,
    ".npz": _arrays,
    ".gguf": gguf.read,
    ".pt": _pt,
    ".pth": _pt,
    ".json": _json,
}
