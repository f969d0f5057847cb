"""VectorSet: one direction for any site, or one for each of several layers, from a file or a request.

And FeatureRow: what an edit of one feature needs of its dictionary, as numbers for a request.
Knows no model, no site and no table. ``saesteer.loaders.vectors`` reads the files.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.errors import ConfigError
from saesteer.language.inline import Function as Function
from saesteer.language.inline import InlineVector

Vector = NDArray[np.float32]  # [d], read-only
HIDDEN_STATES = "hidden_states:"  # in front of a file whose rows are those of Transformers' hidden_states


@dataclass(frozen=True, slots=True, eq=False)
class VectorSet:
    """Directions with the length and sign that they were given in; ``vector_set`` makes them."""

    rows: Mapping[int | None, Vector]  # by layer, ascending; or one row with the key None, for any site
    width: int  # d
    fingerprint: str  # hex sha256 of the float32 rows, their layers, bias and function, whatever dtype was stored
    digests: Mapping[int | None, str]  # hex sha256 of each float32 row, by layer
    bias: float = 0.0  # a probe reads x · v + bias
    function: Function = "linear"  # what a probe makes of that
    kind: str | None = None  # of the sites that its file holds it to; None: any kind
    stack: int | None = None  # how many layers the model must have, if nothing else says that the rows are layers
    notes: tuple[tuple[str, str], ...] = ()  # for people, each behind "note", "says" or "warning"

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers that have a row, ascending; None if one vector fits any site."""
        return None if None in self.rows else tuple(layer for layer in self.rows if layer is not None)

    def at(self, layer: int) -> Vector | None:
        """The row for a layer ``[d]``, or None if the set has none."""
        return self.rows.get(layer, self.rows.get(None))

    def unit(self, layer: int) -> Vector | None:
        """``at(layer)`` at length 1, computed in float64, since squares of float32 numbers underflow or overflow."""
        row = self.at(layer)
        if row is None:
            return None
        long = row.astype(np.float64)
        return (long / np.linalg.norm(long)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRow:
    """One feature, f · rows[1], where f = p = in_norm(x) · rows[0] + bias if that is above the threshold, else 0.

    A feature of a cross-layer transcoder has one for each layer that it writes, all with the same encoder row.
    """

    data: bytes  # [2, d], little-endian: its encoder row and its decoder row
    dtype: str  # of the numbers: that of the server's weights
    bias: float
    threshold: float
    max_act: float | None  # None: not known
    digest: str = field(init=False)  # hex sha256 of all of this

    def __post_init__(self) -> None:
        of = hashlib.sha256(repr((self.dtype, self.bias, self.threshold, self.max_act)).encode())
        of.update(self.data)
        object.__setattr__(self, "digest", of.hexdigest())

    @property
    def rows(self) -> NDArray[np.float32]:
        """The two rows [2, d] as float32."""
        return numbers_of(self.dtype, self.data).reshape(2, -1)


def vector_set(
    rows: Mapping[int | None, Vector], bias: float = 0.0, function: Function = "linear", **more: Any
) -> VectorSet:
    """A set of checked rows, which become read-only.

    Args:
        rows: ``[d]`` each, by layer; finite and not zero.
        bias: a probe's bias.
        function: of a probe.
        more: the last fields of ``VectorSet``.
    """
    layers = sorted(rows, key=lambda one: -1 if one is None else one)
    width = rows[layers[0]].size
    digests = {layer: hashlib.sha256(rows[layer].data).hexdigest() for layer in layers}
    for layer in layers:
        rows[layer].flags.writeable = False
    facts: tuple[object, ...] = (width, bias, digests, *([function] * (function != "linear")))
    facts += (more["kind"],) if more.get("kind") else ()
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    kept = {layer: rows[layer] for layer in layers}
    return VectorSet(MappingProxyType(kept), width, fingerprint, MappingProxyType(digests), bias, function, **more)


def from_inline(
    value: tuple[float, ...] | InlineVector, *, bias: float = 0.0, function: Function = "linear"
) -> VectorSet:
    """A vector from a request; float32 bytes are viewed, not copied. A bias makes it a probe.

    The request language has checked it: its values are finite, and no row is zero.
    """
    return vector_set(rows_of(value), bias, function)


def rows_of(value: tuple[float, ...] | InlineVector) -> dict[int | None, Vector]:
    """The rows of a vector from a request, by layer, in its own order."""
    if not isinstance(value, InlineVector):
        return {None: np.array(value, np.float32)}
    array = numbers_of(value.dtype, value.data).reshape(value.shape)
    return {None: array} if value.layers is None else dict(zip(value.layers, array, strict=True))


def numbers_of(dtype: str, data: bytes) -> NDArray[np.float32]:
    """Little-endian numbers, one behind the other; float32 bytes are viewed, not copied, others are widened exactly."""
    return _VIEWS[dtype](data)


@lru_cache(16)
def fingerprint_of(value: tuple[float, ...] | InlineVector) -> str:
    """Hex digest of the bytes of a vector from a request.

    The last ones are remembered, since an answer reports the digest at each site.
    """
    if not isinstance(value, InlineVector):
        return from_inline(value).fingerprint
    shape = value.dtype, value.shape, value.layers
    return hashlib.sha256(repr((shape, list(row_digests(value).values()))).encode()).hexdigest()


@lru_cache(16)
def row_digests(value: tuple[float, ...] | InlineVector) -> Mapping[int | None, str]:
    """Hex digests of the rows of a vector from a request, by layer.

    A float32 row has the same digest as a row of a named vector; in another dtype the same numbers have another.
    """
    if not isinstance(value, InlineVector):
        return {None: hashlib.sha256(np.array(value, np.float32).data).hexdigest()}
    layers: tuple[int | None, ...] = (None,) if value.layers is None else value.layers
    size = len(value.data) // len(layers)
    kind = b"" if value.dtype == "float32" else value.dtype.encode()
    rows = (value.data[size * n : size * (n + 1)] for n in range(len(layers)))
    return {layer: hashlib.sha256(kind + row).hexdigest() for layer, row in zip(layers, rows, strict=True)}


def check_vectors(
    vectors: Mapping[str, VectorSet], *, width: int, layers: int, other_widths: Mapping[str, int]
) -> None:
    """Refuses vectors that do not fit the model: ``width`` is the stream's, ``other_widths`` those of other places.

    Raises:
        ConfigError: the message names the vector and what the model has.
    """
    for name, found in vectors.items():
        if found.width not in (width, *other_widths.values()):
            others = "".join(f", and its {place} {wide}" for place, wide in other_widths.items())
            raise ConfigError(f"vector {name!r} is {found.width} wide, but this model is {width} wide{others}")
        has = f"this model has layers 0 to {layers - 1}"
        if found.stack not in (None, layers):
            told = f"vector {name!r} has {found.stack} rows, but {has}; expected a row for each, or one row at a site"
            told += f", such as --vector {name}=FILE#3@resid_post.20"
            hint = "; if they are hidden_states of Transformers, row 0 is the embedding and row i + 1 is resid_post.i"
            hint += f", and --vector {name}={HIDDEN_STATES}FILE reads them so"
            raise ConfigError(told + hint * (found.stack == layers + 1))
        if found.layers and found.layers[-1] >= layers:
            raise ConfigError(f"vector {name!r} has a row for layer {found.layers[-1]}, but {has}")


def _from_bfloat16(data: bytes) -> Vector:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


_VIEWS = {
    "float32": lambda data: np.frombuffer(data, "<f4"),
    "float16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "bfloat16": _from_bfloat16,
}
