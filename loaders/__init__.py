"""Weight files -> SparseCoder: one module a format, chosen by looking at the files; it knows no models, no requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from saesteer.coder import CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import gemma_scope, manifest, max_act, own, saelens
from saesteer.loaders.arrays import WEIGHT_DTYPES
from saesteer.loaders.files import fetch

__all__ = ["FORMATS", "describe", "load"]

# name -> module with matches(place), describe(place), read(place, dtype); the first match wins: the loosest is last.
FORMATS: dict[str, ModuleType] = {
    gemma_scope.NAME: gemma_scope,
    manifest.NAME: manifest,
    saelens.NAME: saelens,
    own.NAME: own,
}


def load(place: str | Path, *, dtype: torch.dtype | None = None) -> SparseCoder:
    """The dictionary at a path or hub id.

    Args:
        place: a folder, a file, ``org/repo[/sub/folder]``, each with ``#name`` where a folder holds several.
        dtype: of the two weight matrices, fp16, bf16 or fp32; None as stored. Everything else is float32.

    Raises:
        LoadError: naming the file, the key, what is there and what was expected.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise LoadError(f"{place}: dtype {dtype}; expected one of {', '.join(map(str, WEIGHT_DTYPES))}")
    path = fetch(place)
    coder = max_act.added(path, _format(path).read(path, dtype))
    return replace(coder, info=replace(coder.info, source=str(place)))


def describe(place: str | Path) -> CoderInfo:
    """What ``load(place).info`` would be, from headers and small JSON alone.

    Its fingerprint takes one reading of the whole files, which a machine and a process do once: see ``saesteer.cache``.

    Raises:
        LoadError: naming the file, the key, what is there and what was expected.
    """
    path = fetch(place)
    info = max_act.known(path, _format(path).describe(path))
    return replace(info, source=str(place))


def _format(path: Path) -> ModuleType:
    for module in FORMATS.values():
        if module.matches(path):
            return module
    inside = sorted(child.name for child in path.iterdir())[:8] if path.is_dir() else []
    found = f"a folder with {', '.join(inside) or 'nothing'}" if path.is_dir() else "a file of no known format"
    raise LoadError(f"{path}: {found}; expected one of the formats {', '.join(FORMATS)}")
