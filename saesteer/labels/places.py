"""Where the labels of a dictionary are, and whether they are its own. Knows no database and no model."""

from pathlib import Path
from typing import NamedTuple

from saesteer.dictionaries.coder import CoderInfo
from saesteer.dictionaries.coder import place_of as site_name
from saesteer.labels.store import Labels
from saesteer.loaders import choose
from saesteer.loaders.draft import facts
from saesteer.loaders.files import fetch


def beside(path: Path) -> Path:
    """The label file of the dictionary at this path, which need not exist: no weight file has this suffix."""
    return path / "saesteer.labels" if path.is_dir() else path.with_name(f"{path.name}.labels")


class Place(NamedTuple):
    """The label file of a dictionary, which need not exist, and what it must say about itself."""

    file: Path
    dictionary: str  # a digest of the dictionary's own files
    site: str | None  # where the dictionary reads, as far as somebody says it

    def open(self) -> Labels:
        """The labels; raises LoadError as ``Labels.open``."""
        return Labels.open(self.file, dictionary=self.dictionary, site=self.site)


def place_of(info: CoderInfo) -> Place:
    """Where the labels of a dictionary are.

    Maximum activations that ``saesteer calibrate`` saved next to them change no label.

    Args:
        info: as the loader or the server's configuration has it.

    Raises:
        LoadError: the dictionary's files cannot be read.
    """
    path = fetch(info.source)
    name, draft = choose(path, info.site_in)
    own = facts(draft, name)
    site = None if info.site_in is None else site_name(info.site_in)
    return Place(beside(path), f"{own.fingerprint}:{own.features}:{own.site_in or ''}", site)


def opened(info: CoderInfo) -> Labels | None:
    """The labels next to a dictionary; None if there are none.

    Raises:
        LoadError: the file is no label file, or is about other weights or another site.
    """
    place = place_of(info)
    return place.open() if place.file.is_file() else None
