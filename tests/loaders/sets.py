"""A place with a dictionary for each layer, and any place as a server opens it."""

from pathlib import Path
from typing import Any

from saesteer.config.assets import Assets
from saesteer.config.settings import read_settings
from tests.loaders import writers


def scope(root: Path, *layers: int, width: str = "16k", **more: Any) -> Path:
    """A repository of Gemma Scope 1, each layer in a folder of its own, with other values."""
    repo = root / "gemma-scope-2b-pt-res"
    for layer in layers:
        made = writers.raw(seed=layer, **more)
        writers.gemma_scope(repo / f"layer_{layer}" / f"width_{width}" / f"average_l0_{60 + layer}", made)
    return repo


def opened(place: str | Path) -> Assets:
    """What a server has of a place, which it knows as `gs`."""
    return Assets.open(read_settings([f"gs={place}"]))
