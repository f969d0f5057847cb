"""Where the labels of a dictionary are, and whether they are its own. Knows no database and no model."""

from __future__ import annotations

from pathlib import Path

from saesteer.dictionaries.coder import CoderInfo
from saesteer.labels.store import Labels
from saesteer.loaders import choose
from saesteer.loaders.draft import facts
from saesteer.loaders.files import fetch


def beside(path: Path) -> Path:
    """The label file of the dictionary at this path, which need not exist: no weight file has this suffix."""
    return path / "saesteer.labels" if path.is_dir() else path.with_name(f"{path.name}.labels")


def place_of(info: CoderInfo) -> tuple[Path, str]:
    """The label file of a dictionary, and what the file must say whose it is: a digest of the dictionary's own files.

    Maximum activations that ``saesteer calibrate`` saved next to them change no label.

    Args:
        info: as the loader or the server's configuration has it.

    Raises:
        LoadError: the dictionary's files cannot be read.
    """
    path = fetch(info.source)
    name, draft = choose(path, info.site_in)
    own = facts(draft, name)
    return beside(path), f"{own.fingerprint}:{own.features}:{own.site_in or ''}"


def opened(info: CoderInfo) -> Labels | None:
    """The labels next to a dictionary; None if there are none.

    Raises:
        LoadError: the file is no label file, or belongs to other weights.
    """
    place, whose = place_of(info)
    return Labels.open(place, dictionary=whose) if place.is_file() else None
