"""GGUF control vectors, as llama.cpp writes them. Knows no other GGUF file and needs no package.

A broken file must not block a server, and the gguf package walks an array of 2^40 items that a file of 49 bytes merely
claims. This reader believes no count that the file has no bytes for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.loaders.files import readable, wrong

ARCHITECTURE = "controlvector"
_VERSIONS = (2, 3)
_FLOAT32 = 0  # ggml's number of the type
_STRING, _ARRAY = 8, 9
# The format's number of a plain type -> struct's format.
_PLAIN = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class _Cursor:
    """The bytes of a file, read from the front; raises EOFError beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise EOFError(f"{count} bytes wanted at byte {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def plain(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.plain("<Q")).decode()

    def value(self, kind: int) -> Any:
        """A value of the metadata; arrays are skipped, and are None."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.plain(_PLAIN[kind])
        inner, count = self.plain("<I"), self.plain("<Q")
        if inner == _STRING:
            for _ in range(count):
                self.text()
        else:
            self.take(count * struct.calcsize(_PLAIN[inner]))
        return None


def read(path: Path) -> Iterator[tuple[str, object]]:
    """The metadata, in which a list is None, and the arrays by name, such as ``direction.12``, float32 [d] each.

    Raises:
        LoadError: the file is not a control vector, or is broken or cut short.
    """
    data = path.read_bytes()
    if data[:4] != b"GGUF":
        raise wrong(path, "header", f"begins with {data[:4]!r}", "a GGUF file")
    with readable(f"{path}: header", "a complete GGUF file of version 2 or 3"):
        metadata, found = _read(path, _Cursor(data))
    yield from metadata.items()
    yield from found.items()


def _read(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    cursor.take(4)
    version, tensors, pairs = cursor.plain("<I"), cursor.plain("<Q"), cursor.plain("<Q")
    if version not in _VERSIONS:
        raise wrong(path, "version", version, "2 or 3, little-endian")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.plain("<I"))
    if (kind := metadata.get("general.architecture")) != ARCHITECTURE:
        raise wrong(path, "general.architecture", repr(kind), repr(ARCHITECTURE))
    places = [_place(path, cursor) for _ in range(tensors)]
    step = metadata.get("general.alignment", 32)
    if type(step) is not int or step < 1:
        raise wrong(path, "general.alignment", repr(step), "a whole number above 0")
    base = -(-cursor.at // step) * step
    found: dict[str, NDArray[np.float32]] = {}
    for name, width, offset in places:
        if name in found or base + offset + 4 * width > len(cursor.data):
            raise wrong(path, name, "there twice, or beyond the end of the file", "a complete file")
        found[name] = np.frombuffer(cursor.data, "<f4", width, base + offset)
    return metadata, found


def _place(path: Path, cursor: _Cursor) -> tuple[str, int, int]:
    """(name, width, offset) of the next tensor."""
    name, rank = cursor.text(), cursor.plain("<I")
    shape = [cursor.plain("<Q") for _ in range(rank)]
    kind, offset = cursor.plain("<I"), cursor.plain("<Q")
    if kind != _FLOAT32 or rank != 1:
        raise wrong(path, name, f"type {kind} of shape {shape}", "float32 (type 0) of one dimension")
    return name, shape[0], offset
