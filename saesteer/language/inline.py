"""Vectors in the request itself, and the checks of their shape and bytes. Knows no server.

A vector is a short list of numbers, or little-endian bytes in base64 with dtype and shape, since 87,000 Python floats
take 290 ms to parse. The bytes are decoded once and checked as a whole, with numpy, which is imported for that alone:
clients without vectors start without it. ``saesteer.dictionaries.vectors.from_inline`` views them as arrays.
"""

import binascii
import struct
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal, Protocol

from pybase64 import b64decode, b64encode

from saesteer.errors import ARRAYS, needs
from saesteer.language.fields import (
    FLOAT32_MAX,
    Record,
    by,
    fail,
    integer,
    list_of,
    number,
    one_of,
    optional,
    plain,
    read,
    show,
    text,
)
from saesteer.language.sites import MAX_LAYER

Function = Literal["linear", "sigmoid", "tanh"]  # of a probe
MAX_LIST = 4096  # numbers in the list form
MAX_BYTES = 4 * 2**20  # of one vector in the base64 form, decoded

# An item as an unsigned integer, and the bits of its exponent, which are all set in infinity and NaN.
_BITS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}


def _bytes(value: Any, at: str) -> bytes:
    if isinstance(value, bytes):
        if len(value) > MAX_BYTES:
            fail(at, "too_many", f"got {len(value)} bytes, expected at most {MAX_BYTES}")
        return value
    if not isinstance(value, str):
        fail(at, "wrong_type", f"got {show(value)}, expected base64 text")
    if len(value) > (MAX_BYTES + 2) // 3 * 4:
        fail(at, "too_many", f"got {len(value)} characters, expected at most {MAX_BYTES} bytes in base64")
    try:
        return b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        fail(at, "wrong_type", f"is not base64 ({error}), expected the bytes of the vector in base64")


@dataclass(frozen=True)
class InlineVector(Record):
    """One vector ``[d]``, or one row per layer ``[layers, d]``, as little-endian bytes.

    In Python, ``data`` may be the bytes themselves: ``InlineVector("float32", v.shape, v.tobytes())``.
    """

    label: ClassVar[str] = "vector"

    dtype: Literal["float32", "float16", "bfloat16"] = field(metadata=by(one_of(*_BITS)))
    shape: tuple[int, ...] = field(metadata=by(list_of(integer(1, 2**24), 2)))
    data: bytes = field(metadata=by(_bytes))  # prod(shape) items; base64 text in JSON
    layers: tuple[int, ...] | None = field(
        default=None, metadata=by(optional(list_of(integer(0, MAX_LAYER), MAX_LAYER + 1, key=int)))
    )  # one for each row; only with two dimensions

    def __hash__(self) -> int:
        # Dicts ask for it at every site. The first bytes of a megabyte are enough, as equal hashes are compared.
        return hash((self.dtype, self.shape, self.layers, self.data[:64]))

    def to_json(self) -> dict[str, Any]:
        """The canonical JSON object; equal bytes have equal base64."""
        return {**Record.to_json(self), "data": b64encode(self.data).decode()}

    def _whole(self, at: str) -> None:
        rows = len(self.layers) if self.layers is not None else None
        if len(self.shape) == 0 or (self.shape[0] if len(self.shape) == 2 else None) != rows:
            expected = "[d] without layers, or [layers, d] with as many layers"
            fail(
                f"{at}.shape", "conflict", f"got {list(self.shape)} and layers {show(self.layers)}, expected {expected}"
            )
        with needs(ARRAYS):
            import numpy as np
        kind, exponent = _BITS[self.dtype]
        if len(self.data) != (size := prod(self.shape) * np.dtype(kind).itemsize):
            expected = f"{size} for {list(self.shape)} of {self.dtype}"
            fail(f"{at}.data", "conflict", f"got {len(self.data)} bytes, expected {expected}")
        bits = np.frombuffer(self.data, kind).reshape(-1, self.shape[-1])
        if (bits & exponent == exponent).any():
            fail(f"{at}.data", "not_finite", "holds NaN or infinity, expected finite numbers")
        zero = ~(bits << 1).any(1)  # without the sign
        if zero.any():
            fail(f"{at}.data", "zero_vector", f"row {zero.argmax()} is zero, expected a direction")


Vector = str | tuple[float, ...] | InlineVector


class Array(Protocol):
    """An array of numpy or a tensor of torch, in any dtype and on any device."""

    def tolist(self) -> Any: ...


def flat(value: Any, at: str) -> list[float]:
    """Return the numbers of a list or an ``Array``.

    Raises:
        SpecError: it has another number of dimensions than one, or something in it is no finite number.
    """
    if len(shape := getattr(value, "shape", (0,))) != 1:
        fail(at, "wrong_type", f"got the shape {list(shape)}, expected one dimension, or an InlineVector")
    return [number(one, f"{at}[{i}]") for i, one in enumerate(plain(value))]


def vector(value: Any, at: str) -> Vector:
    """The name of a vector, or the vector itself."""
    if isinstance(value, str):
        return text(value, at)
    if hasattr(value, "tolist"):
        found = flat(value, at)
        value = {"dtype": "float32", "shape": [len(found)], "data": struct.pack(f"<{len(found)}f", *found)}
    if not isinstance(value, list | tuple):
        return read(InlineVector, value, at)
    numbers = _plain_numbers(value) or list_of(number, MAX_LIST)(value, at)
    form = f"<{len(numbers)}f"
    if not any(struct.unpack(form, struct.pack(form, *numbers))):  # as float32, in which 1e-50 is 0
        fail(at, "zero_vector", f"got {len(numbers)} zeros, expected a direction")
    return numbers


def _plain_numbers(value: list[Any] | tuple[Any, ...]) -> tuple[float, ...] | None:
    """The numbers of a list in which nothing is wrong; None if the slower check has to find what is wrong."""
    if len(value) > MAX_LIST or not set(map(type, value)) <= {float, int}:
        return None
    try:
        found = tuple([one + 0.0 for one in value])
    except OverflowError:
        return None
    return found if all(-FLOAT32_MAX <= one <= FLOAT32_MAX for one in found) else None  # false for NaN as well
