"""The sizes of a dictionary that writes as many numbers as it reads, by the keys of its config. Knows no format."""

from pathlib import Path

from saesteer.loaders.draft import Axis
from saesteer.loaders.files import Document, positive, whole_number

Sizes = tuple[Axis, Axis, Axis]  # F, d_in and d_out


def named(config: Path, cfg: Document, features: str, width: str) -> Sizes:
    """The sizes by two keys of a config; raises LoadError."""
    axis = Axis(width, whole_number(config, cfg, width))
    return Axis(features, whole_number(config, cfg, features)), axis, axis


def expanded(config: Path, cfg: Document) -> Sizes:
    """The sizes of a config with the width d_model and an expansion_factor; raises LoadError."""
    axis = Axis("d_model", whole_number(config, cfg, "d_model"))
    features = int(axis.size * positive(config, cfg, "expansion_factor"))
    return Axis("d_model * expansion_factor", features), axis, axis
