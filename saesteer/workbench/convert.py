"""``saesteer convert``: a dictionary of any format, written again in saesteer's own, row by row. Knows no model."""

from dataclasses import replace
from pathlib import Path

import torch

from saesteer.config.assets import sited
from saesteer.config.sets import opened
from saesteer.config.sources import DictionarySource
from saesteer.errors import ConfigError
from saesteer.loaders import load
from saesteer.loaders.formats import own

_HERE = "PLACE"  # what a refusal calls the dictionary, which has no name yet
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(place: str, target: Path, *, dtype: str | None) -> str:
    """Write a dictionary so that the numbers of a feature lie next to each other; say what was written.

    Args:
        place: of the dictionary, as ``PLACE[@SITE]``; the file names this site.
        target: a new file, ``*.safetensors``.
        dtype: of its two matrices; None: as stored.

    Raises:
        ConfigError: the target is not such a file, or exists; the dtype is another; or the place holds several
            dictionaries, or none that belongs at the site.
        LoadError: the dictionary cannot be read, or the target cannot be written.
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if target.suffix != ".safetensors":
        raise ConfigError(f"{target}: expected the name of a new file that ends in .safetensors")
    if target.exists():
        raise ConfigError(f"{target}: exists; expected the name of a new file")
    sources, _ = opened({_HERE: DictionarySource.from_argument(place)})
    if len(sources) > 1:
        known = ", ".join(f"{one.path}@{one.site}" if one.site else one.path for one in sources.values())
        raise ConfigError(f"{place}: holds {len(sources)} dictionaries; expected one of {known}")
    [source] = sources.values()
    coder = load(source.path, dtype=None if dtype is None else DTYPES[dtype], site=source.reads)
    info = sited(_HERE, source, coder.info)
    own.write(target, replace(coder, info=info))
    return f"{target}: {info.features:,} features of {info.format}, {target.stat().st_size / 1e6:,.1f} MB"
