"""The dictionaries below a folder, found by the names of files alone. Knows no format's keys, and opens nothing."""

import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from saesteer.errors import LoadError
from saesteer.loaders import FORMATS
from saesteer.loaders.aliases import layer_in

_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth")


def listed(folder: str | Path) -> dict[str, Path]:
    """The places below a folder by their paths in it, in order; some may turn out to be no dictionaries.

    A file with a name that a format gives to every dictionary, such as params.npz, stands for the folder that it
    belongs to; every other file of weights stands for itself. Hidden folders are left out.

    Raises:
        LoadError: there is no such folder, or no file of weights below it.
    """
    root = Path(folder).expanduser()
    usual = {name for form in FORMATS.values() for name in form.FILES if name.endswith(_SUFFIXES) and "*" not in name}
    found = {}
    for here, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here, name) for name in sorted(files) if name.endswith(_SUFFIXES)):
            alone = [name for name in usual if path.match(name)]
            place = path.parents[alone[0].count("/")] if alone else path
            found[(path if place == root else place).relative_to(root).as_posix()] = place
    if not found:
        what = "no file of weights below it" if root.is_dir() else "no such folder"
        raise LoadError(f"{folder}: {what}; expected a folder with dictionaries")
    return found


def sets_in(names: Collection[str]) -> dict[str, dict[int, str]]:
    """The folders with one dictionary for each of several layers: of each, the names by layer, in ascending order.

    What names no layer does not count. A folder that holds such a folder and nothing else is none itself.

    Args:
        names: as ``listed`` gives them.
    """
    below: defaultdict[str, list[tuple[int | None, str]]] = defaultdict(list)
    for name in names:
        for above in (*PurePosixPath(name).parents,)[:-1]:
            below[above.as_posix()].append((layer_in(Path(name).relative_to(above)), name))
    found = {}
    for folder, inside in below.items():
        layers = {layer: name for layer, name in inside if layer is not None}
        one_each = len(layers) == sum(layer is not None for layer, _ in inside) > 1
        if one_each and folder not in names and os.path.commonpath(layers.values()) == folder:
            found[folder] = dict(sorted(layers.items()))
    return found
