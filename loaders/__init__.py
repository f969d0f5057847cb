"""Weight files -> SparseCoder: one module for each format, chosen by the files. Knows no models and no requests."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import hub, max_act
from saesteer.loaders.arrays import WEIGHT_DTYPES
from saesteer.loaders.draft import Draft, Format, build, decoders, facts, vector_of
from saesteer.loaders.files import check_fetched, fetch
from saesteer.loaders.formats import (
    apollo,
    circuit_tracer,
    connor_rob,
    dictionary_learning,
    gemma_scope,
    gemma_scope_2,
    goodfire,
    llama_scope,
    llama_scope_r1,
    llamascopium,
    manifest,
    openai_gpt2,
    own,
    qwen_scope,
    saelens,
    sparsify,
)
from saesteer.loaders.neuronpedia import Place, sources_at

__all__ = ["FORMATS", "describe", "is_as_loaded", "largest", "load"]

# By name. The first format that accepts the files wins, so the least strict is last.
FORMATS: dict[str, Format] = {
    "gemma_scope": gemma_scope,
    "gemma_scope_2": gemma_scope_2,
    "dictionary_learning": dictionary_learning,
    "llama_scope": llama_scope,
    "llama_scope_r1": llama_scope_r1,
    "llamascopium": llamascopium,
    "manifest": manifest,
    "saelens": saelens,
    "sparsify": sparsify,
    "saesteer": own,
    "circuit_tracer": circuit_tracer,
    "qwen_scope": qwen_scope,
    "connor_rob": connor_rob,
    "openai_gpt2": openai_gpt2,
    "goodfire": goodfire,
    "apollo": apollo,
}


class UnknownFormat(LoadError):
    """No format accepts a file or folder."""


hub.NAMES += [name for form in FORMATS.values() for name in form.FILES]


def load(place: Place, *, dtype: torch.dtype | None = None, site: str | None = None) -> SparseCoder:
    """The dictionary at a path or hub id; of a cross-layer transcoder one layer's, with the decoder for that layer.

    Args:
        place: a folder, a file or ``org/repo[/sub/folder]``, with ``#name`` if a folder holds several dictionaries.
        dtype: dtype of the two weight matrices: fp16, bf16 or fp32; None as stored. Everything else is float32.
        site: the site that the dictionary reads, where one file holds several dictionaries, or names none.

    Raises:
        LoadError: naming the file, the key, what is there and what was expected.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise LoadError(f"{place}: dtype {dtype}; expected one of {', '.join(map(str, WEIGHT_DTYPES))}")
    path = fetch(place)
    name, found = choose(path, site)
    coder = max_act.added(path, build(found, name, dtype), site, found)
    return replace(coder, info=_placed(place, coder.info))


def describe(place: Place, *, site: str | None = None, hashed: bool = True) -> CoderInfo:
    """What ``load(place).info`` would be, read from headers and small JSON alone.

    The fingerprint covers the whole files, which are read for it once.

    Args:
        place: as in ``load``.
        site: as in ``load``.
        hashed: False leaves the fingerprint empty where a large file would have to be read for it.

    Raises:
        LoadError: naming the file, the key, what is there and what was expected.
    """
    path = fetch(place)
    name, found = choose(path, site)
    return told(place, path, facts(found, name, hashed=hashed), site)


def later(info: CoderInfo) -> list[Tensor]:
    """The decoders [F, d_out] of a cross-layer transcoder's layer for each layer after its own; none of others.

    Raises:
        LoadError: the files cannot be read.
    """
    if info.targets is None:
        return []
    _, found = choose(fetch(info.source, again=True), info.site_in)
    return [*decoders(found, info, None)]


def largest(info: CoderInfo, feature: int) -> float | None:
    """The largest activation of a feature, which ``unit: max_act`` multiplies by; None: it is not known.

    Args:
        info: of its dictionary, as the loader or the server's configuration has it.
        feature: by its original index.

    Raises:
        LoadError: the values were measured on other weights, or cannot be read.
    """
    values, row = _largest(info) if info.has_max_act else None, info.row_of(feature)
    if values is None or row is None or not info.knows_max_act(feature):
        return None
    return values[row].item()


@lru_cache(1024)
def _largest(info: CoderInfo) -> Tensor | None:
    """The values [F] that ``load`` gives, read once, without the weights."""
    path = fetch(info.source, again=True)
    _, found = choose(path, info.site_in)
    return vector_of(found, "max_act") if info.max_act_by is None else max_act.values(path, info, found)


def is_as_loaded(info: CoderInfo) -> bool:
    """Whether a dictionary's place has the files that were loaded. Values of max_act may have come since.

    Args:
        info: of a dictionary that was loaded whole.

    Raises:
        LoadError: as ``describe``.
    """
    path = fetch(info.source, again=True)
    name, found = choose(path, info.site_in)
    now = facts(found, name)
    same = info.fingerprint == now.fingerprint
    return same or info.fingerprint == max_act.known(path, now, info.site_in).fingerprint


def told(place: Place, path: Path, info: CoderInfo, site: str | None) -> CoderInfo:
    """The facts of the files at a path, with the place that was given and what is known from files next to them."""
    found = max_act.known(path, info, site)
    return replace(_placed(place, found), fingerprint=found.fingerprint if info.fingerprint else "")


def _placed(place: Place, info: CoderInfo) -> CoderInfo:
    """The facts with the place, and with what the place says about its model and its names at Neuronpedia."""
    known = sources_at(place)
    addresses = dict.fromkeys((*info.addresses, *(one.address for one in known)))
    model = info.model or (known[0].model if known else None)
    return replace(info, source=str(place), model=model, addresses=tuple(addresses))


def choose(path: Path, site: str | None) -> tuple[str, Draft]:
    """The name of the format that accepts a file or folder, and its draft; of several, the one that reads the site."""
    name, drafts = _drafts(path)
    for one in drafts:
        if len(drafts) == 1 or one.sites[0] == site is not None:
            return name, one
    what = f"{len(drafts)} dictionaries and none chosen" if site is None else f"no dictionary of {site}"
    known = [f"{path}@{one.sites[0]}" if one.weights.path == path else str(one.weights.path) for one in drafts]
    raise LoadError(f"{path}: {what}; expected one of {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}")


def drafts_at(path: Path) -> tuple[str, Sequence[Draft]] | None:
    """The name of the format that accepts a file or folder, and the drafts of its dictionaries; None if none does."""
    for name, form in FORMATS.items():
        if (found := form.draft(path)) is not None:
            return name, [found] if isinstance(found, Draft) else found
    return None


def _drafts(path: Path) -> tuple[str, Sequence[Draft]]:
    if path.is_file():
        check_fetched(path)
    if found := drafts_at(path):
        return found
    inside = sorted(child.name for child in path.iterdir())[:8] if path.is_dir() else []
    what = f"a folder with {', '.join(inside) or 'nothing'}" if path.is_dir() else "a file of no known format"
    raise UnknownFormat(f"{path}: {what}; expected one of the formats {', '.join(FORMATS)}")


def alone(path: Path) -> Draft:
    """The draft of the only dictionary at a path, next to which there is one place for what is found of one.

    Raises:
        LoadError: the path holds several, or is wrong.
    """
    _, found = _drafts(path)
    if len(found) > 1:
        hint = f"`saesteer convert {path}@{found[0].sites[0]} FILE` makes such a file"
        raise LoadError(f"{path}: holds {len(found)} dictionaries; expected a file of its own for each: {hint}")
    return found[0]
