"""The named arrays of a file that opening.py has opened: where they lie, and their values in blocks.

Nothing beyond a block is held twice. Knows no container and no format's keys.
"""

import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from saesteer.errors import LoadError
from saesteer.loaders.files import State, readable, wrong
from saesteer.loaders.progress import shown

BLOCK_BYTES = 64 << 20
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COMPLETE = "a complete file"


class StoredArray(NamedTuple):
    """Where one array lies in its file."""

    shape: tuple[int, ...]
    dtype: str  # F16, BF16, F32, F64, or the file's word for a dtype that is not served
    start: int  # first byte, in the file or in the zip member
    member: str | None = None  # .npz: the zip member
    fortran: bool = False  # the bytes are those of the transposed array
    stride: int | None = None  # bytes from one item to the next, in a column of a larger array; None: dense
    pitch: int | None = None  # bytes from one row to the next, in a part of a larger array; None: dense

    def only(self, axis: int, at: int) -> "StoredArray":
        """The part of the array at one index of an axis, which then has the size 1."""
        shape = tuple(1 if number == axis else size for number, size in enumerate(self.shape))
        size, stride = DTYPES[self.dtype].itemsize, None
        step = self.pitch or size * math.prod(shape)
        if len(shape) == 2 and (axis == 1) != self.fortran:  # the bytes hold one item of it in each line
            step, stride = size, self.pitch or self.shape[axis] * size
        return StoredArray(shape, self.dtype, self.start + at * step, None, self.fortran, stride)

    def part(self, axis: int, at: int) -> "StoredArray":
        """The part of a dense array at one index of its first or second axis, which the part lacks."""
        assert 0 <= at < self.shape[axis] and not self.fortran, (at, self)
        rest = self.shape[axis + 1 :]
        size = DTYPES[self.dtype].itemsize * math.prod(rest)
        pitch = self.shape[axis] * size if axis else None
        return self._replace(shape=self.shape[:axis] + rest, start=self.start + at * size, pitch=pitch)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one file by name."""

    path: Path
    index: dict[str, StoredArray]
    metadata: dict[str, str]
    state: State | None = None  # of the file, before its headers were read
    descriptor: int | None = None  # the file, already open; only with arrays that ``seekable`` found

    def only(self, parts: Mapping[str, int], at: int, descriptor: int) -> "Arrays":
        """With some arrays (key -> axis) at one index of an axis; read from an open file, whose position stays."""
        index = {key: self.index[key].only(axis, at) for key, axis in parts.items()}
        return Arrays(self.path, self.index | index, self.metadata, self.state, descriptor)

    def split(self, key: str, rank: int, names: Mapping[int, str], *, axis: int = 0) -> "Arrays":
        """The arrays of a safetensors file with parts of one array in its place.

        Args:
            key: the array, which holds a matrix for each of several layers.
            rank: how many axes it must have.
            names: the name of each part, by its index in an axis; other parts are left out.
            axis: the axis, 0 or 1, which the parts lack.

        Raises:
            LoadError: the array is missing, or has another rank.
        """
        self.shape(key, rank)
        index = dict(self.index)
        whole = index.pop(key)
        return replace(self, index=index | {name: whole.part(axis, at) for at, name in names.items()})

    def seekable(self) -> "Arrays":
        """The same arrays by their places in the file itself; raises LoadError for compressed ones."""
        if not any(array.member for array in self.index.values()):
            return self
        index = {}
        whole = readable(f"{self.path}: header", COMPLETE)
        with whole, zipfile.ZipFile(self.path) as archive, self.path.open("rb") as stream:
            for key, array in self.index.items():
                info = archive.getinfo(str(array.member))
                if info.compress_type != zipfile.ZIP_STORED:
                    raise wrong(self.path, key, "compressed", "numbers as they are: `saesteer convert` writes them")
                index[key] = array._replace(start=begin(stream, info) + array.start, member=None)
        return replace(self, index=index)

    def expect(self, required: Set[str], optional: Set[str] = frozenset()) -> None:
        """Raises LoadError for other keys than these: an unknown key may change what the others mean."""
        for key in sorted(required):
            self.find(key)
        for key in sorted(self.index.keys() - required - optional):
            raise wrong(self.path, key, "an unknown key", f"only {', '.join(sorted(required | optional))}")

    def find(self, key: str) -> "StoredArray":
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
            with readable(f"{self.path}: {key}", COMPLETE):
                found = _pread(self.descriptor, array, rows * columns, dtype.itemsize)
            yield 0, torch.frombuffer(found, dtype=dtype).view(rows, columns)
            return
        width = columns * dtype.itemsize
        pitch = array.pitch or width
        step = max(1, BLOCK_BYTES // pitch)
        progress = shown(f"{self.path.name}: {key}", rows * columns * dtype.itemsize)
        with readable(f"{self.path}: {key}", COMPLETE), self.opened(array) as stream, progress as read:
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


def begin(stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The first byte of a member's content in the file."""
    stream.seek(info.header_offset + 26)  # the lengths of name and padding, which end the member's header
    return int(info.header_offset + 30 + sum(struct.unpack("<HH", stream.read(4))))


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
