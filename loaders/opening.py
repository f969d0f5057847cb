"""Opens files of arrays: .safetensors, .npz, .npy and .pt, by their headers. Knows no format's keys.

The first three containers are parsed here, as bytes, and nothing in them is unpickled. The names and shapes in a .pt
file come from torch.load with weights_only on the meta device, for which torch reads no values since 2.11. Whatever a
broken file makes zipfile, numpy or torch raise leaves as a LoadError. The safetensors package maps files into memory:
one that is cut short meanwhile ends the process by a bus error (0.8.0).
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from saesteer.errors import LoadError
from saesteer.loaders.arrays import BLOCK_BYTES, COMPLETE, DTYPES, NAMES, Arrays, StoredArray, begin
from saesteer.loaders.files import check_fetched, readable, state_of, wrong
from saesteer.loaders.hub import LARGEST_HEADER

LARGEST_NPY_HEADER = 64 << 10  # a name, a shape and a dtype
MOST_PACKED = 100  # times that a large array may be larger than in its file; deflated weights are 1.1 times as large
ONLY = "the array"  # the name of the one array of a file without names
_COMPILED = "_orig_mod."  # in the keys of what torch.compile has wrapped
LARGEST_PICKLE = 16 << 20  # the names and shapes of a .pt file are some kilobytes
_PLAIN = str | int | float | None  # nothing that could hold itself, or another thing many times
_NPY = {"<f2": "F16", "<f4": "F32", "<f8": "F64"}


def open_arrays(path: Path) -> Arrays:
    """Reads the headers of a .safetensors, .npz, .npy, .pt or .pth file, never its values. A scalar is an array of one.

    What a .pt file holds besides tensors becomes metadata: a text, JSON of a number or flat dict, or a type's name.

    Raises:
        LoadError: the file is broken, cut short, or holds Python objects.
    """
    check_fetched(path)
    with readable(f"{path}: header", COMPLETE):
        state = state_of(path.stat())
        found = _OPEN.get(path.suffix, _open_safetensors)(path)
        index = {key.replace(_COMPILED, ""): array for key, array in found.index.items()}
        if len(index) < len(found.index):
            raise wrong(path, _COMPILED, "there as well as the same keys without it", "each array once")
        return replace(found, index=index, state=state)


def open_torch(place: Path) -> Arrays | None:
    """As ``open_arrays``, of a .pt or .pth file; None where the place is no file that torch.save wrote."""
    if place.suffix not in (".pt", ".pth") or not place.is_file():
        return None
    with place.open("rb") as stream:
        return open_arrays(place) if stream.read(2) == b"PK" else None


def _open_safetensors(path: Path) -> Arrays:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise wrong(path, "header", f"{size} bytes with a header of {length}", "a complete safetensors file")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise wrong(path, "header", f"a JSON {type(header).__name__}", "a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong(path, "__metadata__", "not strings by name", "a JSON object of strings")
    index = {key: _safetensors_array(path, key, item, 8 + length, size) for key, item in header.items()}
    spans = sorted((item["data_offsets"], key) for key, item in header.items())
    for ((_, end), _), ((start, _), key) in pairwise(spans):
        if start < end:  # or a small file could claim the same bytes a million times and fill the memory
            raise wrong(path, key, f"begins at byte {start}, inside another array", "bytes of its own")
    return Arrays(path, index, metadata)


def _safetensors_array(path: Path, key: str, item: dict[str, object], data: int, size: int) -> StoredArray:
    shape, offsets, dtype = item["shape"], item["data_offsets"], str(item["dtype"])
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise wrong(path, key, repr(numbers), "a list of whole numbers")
    assert isinstance(shape, list) and isinstance(offsets, list)
    start, end = offsets
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise wrong(path, key, f"{end - start} bytes for {dtype} {shape}", "as many bytes as the shape needs")
    if data + end > size:
        raise wrong(path, key, f"ends at byte {data + end} of a file of {size}", "a complete file: it is cut short")
    return StoredArray(tuple(shape) or (1,), dtype, data + start)


def _open_npz(path: Path) -> Arrays:
    index: dict[str, StoredArray] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            key = info.filename.removesuffix(".npy")
            packed = info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if packed or key in index or key == info.filename:
                raise wrong(path, key, "a member twice, or not a plain .npy", "what numpy.savez writes")
            if info.file_size > max(BLOCK_BYTES, MOST_PACKED * info.compress_size):
                raise wrong(path, key, f"{info.file_size} bytes, packed into {info.compress_size}", "weights")
            with archive.open(info) as stream:
                index[key] = _npy_array(path, key, stream, info.file_size, info.filename)
    return Arrays(path, index, {})


def _open_npy(path: Path) -> Arrays:
    with path.open("rb") as stream:
        return Arrays(path, {ONLY: _npy_array(path, ONLY, stream, path.stat().st_size)}, {})


def _npy_header(path: Path, key: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of a .npy array, whether it lies by columns, and its dtype, read from its first byte; or LoadError."""
    layout: Any = np.lib.format  # its functions have no types
    version = layout.read_magic(stream)
    if version not in ((1, 0), (2, 0)):  # 3 is for names of fields, which arrays of numbers do not have
        raise wrong(path, key, f"version {version[0]}.{version[1]} of .npy", "version 1.0 or 2.0")
    said = stream.read(2 * version[0])
    if (length := int.from_bytes(said, "little")) > LARGEST_NPY_HEADER:  # numpy would read all of it first
        raise wrong(path, key, f"a header of {length} bytes", f"at most {LARGEST_NPY_HEADER}")
    read = layout.read_array_header_1_0 if version == (1, 0) else layout.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(io.BytesIO(said + stream.read(length)))
    return found


def _npy_array(path: Path, key: str, stream: IO[bytes], size: int, member: str | None = None) -> StoredArray:
    shape, fortran, dtype = _npy_header(path, key, stream)
    if dtype.hasobject:
        raise wrong(path, key, "Python objects", "numbers: pickled objects are never loaded")
    start = stream.tell()
    if size - start != math.prod(shape) * dtype.itemsize:
        raise wrong(path, key, f"{size - start} bytes for {dtype} {list(shape)}", "as many bytes as the shape needs")
    name = _NPY.get(dtype.str, dtype.str)
    return StoredArray(tuple(shape), name, start, member, fortran and len(shape) > 1)


def _open_torch(path: Path) -> Arrays:
    ends = members(path)
    try:
        held = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise pickled(path) from exc
    if not isinstance(held, dict):
        raise wrong(path, "data.pkl", f"a {type(held).__name__}", "a dict of tensors by name")
    tensors = {str(key): value for key, value in held.items() if isinstance(value, Tensor)}
    metadata = {str(key): _said(value) for key, value in held.items() if not isinstance(value, Tensor)}
    return Arrays(path, {key: _torch_entry(path, key, one, ends) for key, one in tensors.items()}, metadata)


def _said(value: object) -> str:
    """What is no tensor, as a text. Of what may hold itself it is the type, so that formats see that it is there."""
    held = value.values() if isinstance(value, dict) else [value]
    if not all(isinstance(one, _PLAIN) for one in held):
        return f"{type(value).__name__} (not read)"
    return value if isinstance(value, str) else json.dumps(value)


def pickled(path: Path) -> LoadError:
    """The error about a .pt file whose pickle holds more than arrays, or is broken."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001  # whatever the libraries raise for broken bytes
        names = []
    found = f"objects of {', '.join(sorted(names)[:3])}" if names else "Python objects, or broken"
    return wrong(path, "data.pkl", found, "tensors: pickled objects are never loaded")


def members(path: Path) -> dict[int, int]:
    """First byte -> end of what torch.save stored in a file; LoadError for what it never writes."""
    if not zipfile.is_zipfile(path):
        raise wrong(path, "the file", "no zip archive, or cut short", "what torch.save writes since PyTorch 1.6")
    ends = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise wrong(path, info.filename, "compressed", "what torch.save writes")
            name = info.filename.rpartition("/")[2]
            if name == "data.pkl" and info.file_size > LARGEST_PICKLE:
                raise wrong(path, name, f"{info.file_size} bytes", f"at most {LARGEST_PICKLE}: names and shapes")
            if name == "byteorder" and archive.read(info) != b"little":
                raise wrong(path, name, "not little", "little-endian numbers")
            start = begin(stream, info)
            ends[start] = start + info.file_size
    return ends


def _torch_entry(path: Path, key: str, value: Tensor, ends: dict[int, int]) -> StoredArray:
    """Where a tensor on the meta device lies: torch says where its storage began in the file."""
    shape = tuple(value.shape) or (1,)
    fortran = value.ndim == 2 and not value.is_contiguous() and value.T.is_contiguous()
    if not (fortran or value.is_contiguous()) or value.is_neg():  # the sign of such a view is not in its numbers
        raise wrong(path, key, f"shape {list(shape)} with strides {list(value.stride())}", "a dense tensor, no view")
    begin = value.untyped_storage()._checkpoint_offset or 0
    start = int(begin + value.storage_offset() * value.itemsize)
    if start + value.numel() * value.itemsize > ends.get(begin, 0):
        raise wrong(path, key, f"shape {list(shape)}, not stored where torch looks", "what torch.save writes, complete")
    return StoredArray(shape, NAMES.get(value.dtype, str(value.dtype)), start, fortran=fortran)


_OPEN = {".npy": _open_npy, ".npz": _open_npz, ".pt": _open_torch, ".pth": _open_torch}
