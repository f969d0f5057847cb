"""Writes a .safetensors file completely or not at all. Knows no format's keys."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from saesteer.errors import LoadError
from saesteer.loaders.arrays import BLOCK_BYTES, NAMES


def write_arrays(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors and metadata; equal content gives equal bytes.

    Raises:
        LoadError: the file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            made = Path(scratch) / target.name
            with made.open("wb") as stream:
                _write(stream, tensors, metadata)
            made.chmod(0o644)
            made.replace(target)
    except OSError as exc:
        raise LoadError(
            f"{target}: cannot be written ({exc}); expected a folder that exists and can be written to"
        ) from exc


def _write(stream: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    # Larger items first, as safetensors does, so every tensor is aligned. That package shuffles the metadata.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    stream.write(len(head).to_bytes(8, "little") + head)
    for name in names:
        flat = tensors[name].detach().reshape(-1)
        step = BLOCK_BYTES // flat.element_size()
        for start in range(0, len(flat), step):
            stream.write(flat[start : start + step].cpu().view(torch.uint8).numpy().data)
