"""Vectors that stand in the request itself: their shape and bytes are checked here; nothing serves them yet.

Two forms: a short list of numbers, or raw little-endian bytes in base64 with dtype and shape, since 87,000 Python
floats a request cost 290 ms to parse.
"""

import binascii
from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal

from saesteer.checks import Record, by, fail, integer, list_of, number, one_of, optional, read, show, text
from saesteer.sites import MAX_LAYER

MAX_LIST = 4096  # numbers in the list form
MAX_BYTES = 4 * 2**20  # of one vector in the base64 form, decoded

# Array type of one item, and the bits that are all set in infinity and NaN.
_ITEMS = {"float32": ("I", 0x7F800000), "float16": ("H", 0x7C00), "bfloat16": ("H", 0x7F80)}


def _base64(value: Any, at: str) -> str:
    if not isinstance(value, str):
        fail(at, "wrong_type", f"got {show(value)}, expected base64 text")
    if len(value) > (MAX_BYTES + 2) // 3 * 4:
        fail(at, "too_many", f"got {len(value)} characters, expected at most {MAX_BYTES} bytes in base64")
    try:
        raw = b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        fail(at, "wrong_type", f"is not base64 ({error}), expected the bytes of the vector in base64")
    return b64encode(raw).decode()  # unused bits of the last character are zero: equal bytes, equal text


@dataclass(frozen=True, slots=True)
class InlineVector(Record):
    """One vector ``[d]``, or one row per layer ``[layers, d]``, as little-endian bytes."""

    label: ClassVar[str] = "vector"

    dtype: Literal["float32", "float16", "bfloat16"] = field(metadata=by(one_of(*_ITEMS)))
    shape: tuple[int, ...] = field(metadata=by(list_of(integer(1, 2**24), 2)))
    data: str = field(metadata=by(_base64))  # base64 of prod(shape) items
    layers: tuple[int, ...] | None = field(
        default=None, metadata=by(optional(list_of(integer(0, MAX_LAYER), MAX_LAYER + 1, key=int)))
    )  # of the rows; only with two dimensions

    def _whole(self, at: str) -> None:
        rows = len(self.layers) if self.layers is not None else None
        if len(self.shape) == 0 or (self.shape[0] if len(self.shape) == 2 else None) != rows:
            expected = "[d] without layers, or [layers, d] with as many layers"
            fail(
                f"{at}.shape", "conflict", f"got {list(self.shape)} and layers {show(self.layers)}, expected {expected}"
            )
        code, exponent = _ITEMS[self.dtype]
        raw, items = b64decode(self.data), array(code)
        if len(raw) != prod(self.shape) * items.itemsize:
            expected = f"{prod(self.shape) * items.itemsize} for {list(self.shape)} of {self.dtype}"
            fail(f"{at}.data", "conflict", f"got {len(raw)} bytes, expected {expected}")
        items.frombytes(raw)
        if array("H", [1]).tobytes() == b"\x00\x01":
            items.byteswap()
        if any(item & exponent == exponent for item in items):
            fail(f"{at}.data", "not_finite", "holds NaN or infinity, expected finite numbers")
        width, magnitude = self.shape[-1], (1 << (8 * items.itemsize - 1)) - 1
        for row in range(0, len(items), width):
            if not any(item & magnitude for item in items[row : row + width]):
                fail(f"{at}.data", "zero_vector", f"row {row // width} is zero, expected a direction")


Vector = str | tuple[float, ...] | InlineVector


def vector(value: Any, at: str) -> Vector:
    """A vector's name, or the vector itself."""
    if isinstance(value, str):
        return text(value, at)
    if not isinstance(value, list | tuple):
        return read(InlineVector, value, at)
    numbers: tuple[float, ...] = list_of(number, MAX_LIST)(value, at)
    if not any(numbers):
        fail(at, "zero_vector", f"got {len(numbers)} zeros, expected a direction")
    return numbers
