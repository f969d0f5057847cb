"""Three small dictionaries of one site, and an engine that has them."""

from pathlib import Path
from typing import Any

import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.config.sources import DictionarySource
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.engine.engine import Engine
from saesteer.loaders.formats import own

WIDTH, FEATURES, TOKENS = 24, 10, 20
PLACES = {"jump": ("jumprelu", "resid_post.1"), "rect": ("relu", "resid_post.1"), "top": ("topk", "resid_post.1")}


def coder(activation: Any, seed: int) -> SparseCoder:
    """Random weights."""
    draw = torch.Generator().manual_seed(seed)
    info = CoderInfo(
        "saesteer",
        WIDTH,
        WIDTH,
        FEATURES,
        activation,
        3 if activation == "topk" else None,
        "none",
        None,
        None,
        "raw",
        True,
        1,
        "t",
        "",
    )
    return SparseCoder(
        w_enc=torch.randn(FEATURES, WIDTH, generator=draw) / 4,
        b_enc=torch.randn(FEATURES, generator=draw) * 0.1,
        w_dec=torch.randn(FEATURES, WIDTH, generator=draw),
        b_dec=torch.zeros(WIDTH),
        info=info,
        threshold=torch.rand(FEATURES, generator=draw) if activation == "jumprelu" else None,
        max_act=torch.rand(FEATURES, generator=draw) + 1,
    )


CODERS = {name: coder(activation, seed) for seed, (name, (activation, _)) in enumerate(PLACES.items())}


def make_engine(folder: Path, sites: dict[str, str] | None = None, **options: Any) -> Engine:
    """One on the CPU, with its files in a folder; a dictionary may be given another site."""
    for name, one in CODERS.items():
        own.write(folder / f"{name}.safetensors", one)
    sources = {
        name: DictionarySource(f"{folder}/{name}.safetensors", (sites or {}).get(name, site))
        for name, (_, site) in PLACES.items()
    }
    size: dict[str, Any] = {
        "width": WIDTH,
        "layers": 4,
        "dtype": torch.float32,
        "max_rows": 4,
        "max_tokens": 64,
    } | options
    return Engine(Assets.open(SaesteerConfig(sources, max_edits=64)), device=torch.device("cpu"), **size)
