"""The named arrays of a .safetensors, .npz or .pt file: headers at once, values in blocks. Knows no format's keys.

The first two containers are parsed here, as bytes, and nothing in them is unpickled. The names and shapes in a .pt
file come from torch.load with weights_only on the meta device, for which torch reads no values since 2.11. Nothing
beyond a block is held twice, and whatever a broken file makes zipfile, numpy or torch raise leaves as a LoadError. The
safetensors package maps files into memory: one that is cut short meanwhile ends the process by a bus error (0.8.0).
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from saesteer.errors import LoadError
from saesteer.loaders.files import State, readable, state_of, wrong
from saesteer.loaders.hub import LARGEST_HEADER
from saesteer.loaders.progress import shown

BLOCK_BYTES = 64 << 20
LARGEST_NPY_HEADER = 64 << 10  # a name, a shape and a dtype
MOST_PACKED = 100  # times that a large array may be larger than in its file; deflated weights are 1.1 times as large
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPLETE = "a complete file"
LARGEST_PICKLE = 16 << 20  # the names and shapes of a .pt file are some kilobytes
_PLAIN = str | int | float | None  # nothing that could hold itself, or another thing many times
_NPY = {"<f2": "F16", "<f4": "F32", "<f8": "F64"}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where one array lies in its file."""

    shape: tuple[int, ...]
    dtype: str  # F16, BF16, F32, F64, or the file's word for a dtype that is not served
    start: int  # first byte, in the file or in the zip member
    member: str | None = None  # .npz: the zip member
    fortran: bool = False  # the bytes are those of the transposed array
    stride: int | None = None  # bytes from one item to the next, in a column of a larger array; None: dense
    pitch: int | None = None  # bytes from one row to the next, in a part of a larger array; None: dense

    def only(self, axis: int, at: int) -> StoredArray:
        """The part of the array at one index of an axis, which then has the size 1."""
        shape = tuple(1 if number == axis else size for number, size in enumerate(self.shape))
        size, stride = DTYPES[self.dtype].itemsize, None
        step = self.pitch or size * math.prod(shape)
        if len(shape) == 2 and (axis == 1) != self.fortran:  # the bytes hold one item of it in each line
            step, stride = size, self.pitch or self.shape[axis] * size
        return StoredArray(shape, self.dtype, self.start + at * step, None, self.fortran, stride)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one file by name."""

    path: Path
    index: dict[str, StoredArray]
    metadata: dict[str, str]
    state: State | None = None  # of the file, before its headers were read
    descriptor: int | None = None  # the file, already open; only with arrays that ``seekable`` found

    def only(self, parts: Mapping[str, int], at: int, descriptor: int) -> Arrays:
        """With some arrays (key -> axis) at one index of an axis; read from an open file, whose position stays."""
        index = {key: self.index[key].only(axis, at) for key, axis in parts.items()}
        return Arrays(self.path, self.index | index, self.metadata, self.state, descriptor)

    def seekable(self) -> Arrays:
        """The same arrays by their places in the file itself; raises LoadError for compressed ones."""
        if not any(array.member for array in self.index.values()):
            return self
        index = {}
        whole = readable(f"{self.path}: header", _COMPLETE)
        with whole, zipfile.ZipFile(self.path) as archive, self.path.open("rb") as stream:
            for key, array in self.index.items():
                info = archive.getinfo(str(array.member))
                if info.compress_type != zipfile.ZIP_STORED:
                    raise wrong(self.path, key, "compressed", "numbers as they are: `saesteer convert` writes them")
                index[key] = replace(array, start=_begin(stream, info) + array.start, member=None)
        return replace(self, index=index)

    def expect(self, required: Set[str], optional: Set[str] = frozenset()) -> None:
        """Raises LoadError for other keys than these: an unknown key may change what the others mean."""
        for key in sorted(required):
            self.find(key)
        for key in sorted(self.index.keys() - required - optional):
            raise wrong(self.path, key, "an unknown key", f"only {', '.join(sorted(required | optional))}")

    def find(self, key: str) -> StoredArray:
        """Where an array lies; raises LoadError if the file has none of this name."""
        if key not in self.index:
            have = ", ".join(sorted(self.index)) or "none"
            raise wrong(self.path, key, f"missing among the keys {have}", f"an array of the name {key}")
        return self.index[key]

    def shape(self, key: str, rank: int) -> tuple[int, ...]:
        """The shape of an array; raises LoadError unless it holds floats, has this rank and is not empty."""
        array = self.find(key)
        if array.dtype not in DTYPES:
            raise wrong(self.path, key, f"dtype {array.dtype}", f"one of {', '.join(DTYPES)}")
        if len(array.shape) != rank or 0 in array.shape:
            raise wrong(self.path, key, f"shape {list(array.shape)}", f"{rank} sizes above 0")
        return array.shape

    def check(self, key: str, shape: tuple[int, ...], meaning: str) -> None:
        """Raises LoadError unless the array holds floats in this shape; ``meaning`` names its axes, as "[d_in, F]"."""
        if self.shape(key, len(shape)) != shape:
            raise wrong(self.path, key, f"shape {list(self.index[key].shape)}", f"{meaning} = {list(shape)}")

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that can hold all values of an array: fp16, bf16 or fp32."""
        dtype = DTYPES[self.index[key].dtype]
        return dtype if dtype in WEIGHT_DTYPES else torch.float32

    def vector(self, key: str, *, negative: bool = True) -> Tensor:
        """A 1-d array as float32, every value finite and, unless ``negative``, 0 or more."""
        (length,) = self.shape(key, 1)
        found = self.matrix(key, (1, length), torch.float32).view(length)
        if not negative and (found < 0).any():
            raise wrong(self.path, key, f"holds {found.min().item()}", "values of 0 or more")
        return found

    def matrix(
        self,
        key: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        transpose: bool = False,
        scale: Tensor | None = None,
    ) -> Tensor:
        """A 2-d array as [rows, columns] in dtype, every value finite; the file is read once, in blocks.

        Args:
            shape: the shape of the result.
            transpose: the file holds [columns, rows].
            scale: [rows] float32; the rows are multiplied by it in fp32, before they are rounded to dtype.
        """
        out = torch.empty(shape if self.descriptor is None else 0, dtype=dtype)
        across = self._across(key, transpose)
        for start, stored in self._blocks(key):
            rows = slice(start, start + len(stored))
            block = stored
            if scale is not None:
                block = block.float() * (scale if across else scale[rows, None])
            block = block.to(dtype)
            if not is_finite(block):
                raise self._not_finite(key, stored, dtype)
            if self.descriptor is not None:
                return (block.T if across else block).contiguous()  # it is one block, with memory of its own
            (out[:, rows].T if across else out[rows]).copy_(block)
        return out

    def row_norms(self, key: str, *, transpose: bool = False) -> Tensor:
        """The lengths of the rows of a 2-d array, float32 [rows], every value finite; transpose as in ``matrix``."""
        across = self._across(key, transpose)
        sums = []
        for _, block in self._blocks(key):
            if not is_finite(block):
                raise self._not_finite(key, block, block.dtype)
            sums.append(block.double().square().sum(0 if across else 1))
        return (torch.stack(sums).sum(0) if across else torch.cat(sums)).sqrt().float()

    def _across(self, key: str, transpose: bool) -> bool:
        """True if the bytes hold the array column by column."""
        array = self.index[key]
        return len(array.shape) == 2 and transpose != array.fortran

    def _not_finite(self, key: str, stored: Tensor, dtype: torch.dtype) -> LoadError:
        bad = stored[~stored.isfinite()]
        if len(bad):
            return wrong(self.path, key, f"holds {bad[0].item()}", "finite values")
        return wrong(self.path, key, f"a value outside the range of {dtype}", "finite values after conversion")

    def _blocks(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, [rows, columns] as stored) of the bytes in their own order; a vector is one row."""
        array = self.index[key]
        shape = array.shape[::-1] if array.fortran else array.shape
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        dtype = DTYPES[array.dtype]
        if self.descriptor is not None:
            with readable(f"{self.path}: {key}", _COMPLETE):
                found = _pread(self.descriptor, array, rows * columns, dtype.itemsize)
            yield 0, torch.frombuffer(found, dtype=dtype).view(rows, columns)
            return
        width = columns * dtype.itemsize
        pitch = array.pitch or width
        step = max(1, BLOCK_BYTES // pitch)
        progress = shown(f"{self.path.name}: {key}", rows * columns * dtype.itemsize)
        with readable(f"{self.path}: {key}", _COMPLETE), self.opened(array) as stream, progress as read:
            for start in range(0, rows, step):
                stream.read(pitch - width if start else 0)
                buffer = bytearray((min(step, rows - start) - 1) * pitch + width)
                if stream.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]  # every stream here has it
                    raise EOFError("the file is cut short")
                read(len(buffer))
                yield start, torch.frombuffer(buffer, dtype=dtype).unfold(0, columns, pitch // dtype.itemsize)
            if array.member is not None:
                stream.read(1)  # the end of a zip member is where its checksum is compared

    @contextmanager
    def opened(self, array: StoredArray) -> Iterator[IO[bytes]]:
        """The file or zip member that holds an array, at the array's first byte."""
        if array.member is None:
            with self.path.open("rb") as stream:
                stream.seek(array.start)
                yield stream
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(array.member) as stream:
                stream.read(array.start)
                yield stream


def open_arrays(path: Path) -> Arrays:
    """Reads the headers of a .safetensors, .npz, .pt or .pth file, never its values. A scalar is an array of one.

    What a .pt file holds besides tensors becomes metadata: a text, JSON of a number or flat dict, or a type's name.

    Raises:
        LoadError: the file is broken, cut short, or holds Python objects.
    """
    with readable(f"{path}: header", _COMPLETE):
        state = state_of(path.stat())
        return replace(_OPEN.get(path.suffix, _open_safetensors)(path), state=state)


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
                index[key] = _npy_array(path, key, stream, info)
    return Arrays(path, index, {})


def npy_header(path: Path, key: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
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


def _npy_array(path: Path, key: str, stream: IO[bytes], info: zipfile.ZipInfo) -> StoredArray:
    shape, fortran, dtype = npy_header(path, key, stream)
    if dtype.hasobject:
        raise wrong(path, key, "Python objects", "numbers: pickled objects are never loaded")
    start = stream.tell()
    size = info.file_size - start
    if size != math.prod(shape) * dtype.itemsize:
        raise wrong(path, key, f"{size} bytes for {dtype} {list(shape)}", "as many bytes as the shape needs")
    return StoredArray(tuple(shape), _NPY.get(dtype.str, dtype.str), start, info.filename, fortran and len(shape) > 1)


def _open_torch(path: Path) -> Arrays:
    ends = members(path)
    try:
        held = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise wrong(path, "data.pkl", "Python objects", "tensors: pickled objects are never loaded") from exc
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


def members(path: Path) -> dict[int, int]:
    """First byte -> end of what torch.save stored in a file; LoadError for what it never writes."""
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
            start = _begin(stream, info)
            ends[start] = start + info.file_size
    return ends


def _begin(stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The first byte of a member's content in the file."""
    stream.seek(info.header_offset + 26)  # the lengths of name and padding, which end the member's header
    return int(info.header_offset + 30 + sum(struct.unpack("<HH", stream.read(4))))


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


_OPEN = {".npz": _open_npz, ".pt": _open_torch, ".pth": _open_torch}


def _pread(descriptor: int, array: StoredArray, items: int, size: int) -> bytearray:
    """The bytes of an array's items, each of this size."""
    if array.stride is None:
        found = bytearray(os.pread(descriptor, items * size, array.start))
    else:
        places = range(array.start, array.start + items * array.stride, array.stride)
        for at in places:  # so that the disk works on all of them at once: 0.15 s for 2304, not 0.4 s
            os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)
        found = bytearray().join(os.pread(descriptor, size, at) for at in places)
    if len(found) != items * size:
        raise EOFError("the file is cut short")
    return found


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite: x - x is 0, or NaN, which counts as true. 3 us for a row; isfinite takes 25."""
    return not (values - values).any()
