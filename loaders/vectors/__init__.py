"""Vector files -> VectorSet: .safetensors, .npy, .gguf and .pt. Knows no models, no requests and no dictionaries.

    one array [d]                     one vector, for any site
    one array [layers, d]             row i belongs to layer i; at least two rows
    arrays [d] named by their layer   12, layer.12, layers.12, layer_12 or direction.12; all of one width
    bias, a scalar next to them       makes a probe: x . v + bias
    function, in the metadata         of a probe in a .safetensors file: linear, sigmoid or tanh

Layers count from 0, as in ``resid_post.12``. llama.cpp adds GGUF's direction.N after its layer N, counted from 0, and
never uses N = 0. A .pt file holds a tensor or a dict of tensors; nothing else is unpickled. All values become float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from saesteer.dictionaries.vectors import Function, Vector, VectorSet, vector_set
from saesteer.errors import LoadError
from saesteer.loaders.arrays import Arrays, members, npy_header, open_arrays
from saesteer.loaders.files import fetch, readable, wrong
from saesteer.loaders.vectors import gguf

MAX_FILE_BYTES = 64 << 20  # 126 layers of 16,384 in float32 are 8 MB
MAX_WIDTH = 1 << 17
BIAS = "bias"
FUNCTION = "function"

Array = NDArray[np.float32]
Rows = dict[int | None, Vector]  # by layer; None: for any site

_LAYER = re.compile(r"(?:(?:layers?|direction)[._])?(0|[1-9]\d{0,3})")
_ONLY = "the array's own name"  # for the one array of a file without names


def read_vectors(place: str | Path, *, bias: float | None = None, function: Function | None = None) -> VectorSet:
    """The vectors of a file.

    Args:
        place: a .safetensors, .npy, .gguf (control vector) or .pt file, or one on the hub as ``org/repo/file``.
        bias: a probe's bias, in place of the file's, which is 0 if it has none.
        function: a probe's function, in place of the file's, which is linear if it has none.

    Raises:
        LoadError: naming the file, the array, what is there and what was expected.
    """
    path = fetch(place)
    if not path.is_file():
        raise LoadError(f"{path}: a folder; expected a file of vectors, one of {', '.join(READERS)}")
    if path.suffix not in READERS:
        raise LoadError(f"{path}: the suffix {path.suffix!r}; expected a file of vectors, one of {', '.join(READERS)}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise LoadError(f"{path}: {size} bytes; expected vectors, of at most {MAX_FILE_BYTES} bytes")
    with readable(str(path), f"a complete {path.suffix} file"):
        arrays = dict(READERS[path.suffix](path))
        given: Function = _function(path) if path.suffix == ".safetensors" else "linear"
    own = _scalar(path, arrays.pop(BIAS)) if BIAS in arrays else 0.0
    rows = _rows(path, arrays)
    for layer, row in rows.items():
        at = "the vector" if layer is None else f"layer {layer}"
        if not np.isfinite(row).all():
            raise wrong(path, at, "holds NaN, infinity or a number beyond float32", "finite values")
        if not row.any():
            raise wrong(path, at, "all zeros", "a direction; leave out a layer without one")
    if bias is not None and not math.isfinite(bias):
        raise LoadError(f"{place}: bias {bias}; expected a finite number")
    return vector_set(rows, own if bias is None else bias, function or given)


def _function(path: Path) -> Any:
    with safe_open(path, "np") as file:
        found = (file.metadata() or {}).get(FUNCTION, "linear")
    if found not in get_args(Function):
        raise wrong(path, "the metadata", f"{FUNCTION} {found[:40]!r}", f"one of {', '.join(get_args(Function))}")
    return found


def _scalar(path: Path, array: Array) -> float:
    if array.size != 1 or not np.isfinite(array).all():
        raise wrong(path, BIAS, f"shape {list(array.shape)}, or not finite", "one finite number")
    return float(array.reshape(()))


def _rows(path: Path, arrays: Mapping[str, Array]) -> Rows:
    layers = {name: match[1] for name in arrays if (match := _LAYER.fullmatch(name))}
    if len(arrays) == 1 and not layers:
        [array] = arrays.values()
        return _one(path, array)
    if not arrays or len(layers) < len(arrays):
        others = ", ".join(sorted(arrays.keys() - layers.keys())[:8]) or "no array"
        raise wrong(path, others, "not named by a layer", "one array, or arrays named as layer.12 or direction.12")
    found: Rows = {}
    for name, layer in sorted(layers.items(), key=lambda pair: int(pair[1])):
        array = arrays[name]
        if int(layer) in found:
            raise wrong(path, name, f"the second array of layer {layer}", "one for each layer")
        if array.ndim != 1 or not 0 < array.size <= MAX_WIDTH:
            raise wrong(path, name, f"shape {list(array.shape)}", f"[d] with d up to {MAX_WIDTH}")
        found[int(layer)] = array
    if len(widths := {row.size for row in found.values()}) > 1:
        raise wrong(path, "the arrays", f"{' and '.join(map(str, sorted(widths)[:2]))} wide", "one width")
    return found


def _one(path: Path, array: Array) -> Rows:
    shape = list(array.shape)
    if array.ndim not in (1, 2) or not 0 < array.shape[-1] <= MAX_WIDTH:
        raise wrong(path, "the array", f"shape {shape}", f"[d] or [layers, d] with d up to {MAX_WIDTH}")
    if array.ndim == 1:
        return {None: array}
    if not 1 < len(array) <= 10_000:
        raise wrong(path, "the array", f"shape {shape}", "[d], or [layers, d] with at least two layers")
    return dict(enumerate(array))


def _safetensors(path: Path) -> dict[str, Array]:
    arrays = open_arrays(path)
    return {key: _values(arrays, key) for key in arrays.index}


def _values(arrays: Arrays, key: str) -> Array:
    if len(arrays.index[key].shape) == 2:
        rows, columns = arrays.shape(key, 2)
        return arrays.matrix(key, (rows, columns), torch.float32).numpy()
    return arrays.vector(key).numpy()


def _npy(path: Path) -> dict[str, Array]:
    """From the file's bytes, read once: a header whose shape exceeds them is refused before memory is allocated."""
    stream = BytesIO(path.read_bytes())
    shape, by_columns, dtype = npy_header(path, "the header", stream)
    count = math.prod(shape)
    if dtype.kind != "f" or dtype.itemsize > 8 or count == 0:
        raise wrong(path, _ONLY, f"{dtype} {list(shape)}", "floats of 16, 32 or 64 bits")
    held = np.frombuffer(stream.getbuffer(), dtype, count, stream.tell())
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, which is refused
        array = held.reshape(shape, order="F" if by_columns else "C").astype(np.float32, order="C")
    return {_ONLY: array}


def _gguf(path: Path) -> dict[str, Array]:
    found = gguf.read(path)
    for name in found:
        if not re.fullmatch(r"direction\.[1-9]\d{0,3}", name):
            raise wrong(path, name, "no name of a direction", "direction.1, direction.2, ...: llama.cpp has no other")
    return found


def _pt(path: Path) -> dict[str, Array]:
    members(path)  # refuses what is compressed, or would be unpickled for long: a small file could fill the memory
    held = torch.load(path, map_location="cpu", weights_only=True)
    named = held if isinstance(held, Mapping) else {_ONLY: held}
    claimed = sum(value.numel() * 4 for value in named.values() if isinstance(value, torch.Tensor))
    if claimed > 2 * MAX_FILE_BYTES:  # views may claim more than their file holds
        raise wrong(path, "the tensors", f"{claimed} bytes as float32", f"at most {2 * MAX_FILE_BYTES}")
    return {str(key): _from_torch(path, str(key), value) for key, value in named.items()}


def _from_torch(path: Path, key: str, value: Any) -> Array:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.array(value, np.float64).astype(np.float32)
    if not isinstance(value, torch.Tensor):
        raise wrong(path, key, f"a {type(value).__name__}", "a tensor, or a dict of layer: tensor")
    if value.layout != torch.strided or value.device.type != "cpu" or not value.is_floating_point():
        raise wrong(path, key, f"{value.dtype} with layout {value.layout}", "a dense tensor of floats")
    array: Array = value.detach().float().contiguous().numpy()
    return array


READERS: dict[str, Callable[[Path], dict[str, Array]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".gguf": _gguf,
    ".pt": _pt,
}
