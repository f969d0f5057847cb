"""From a place that holds a dictionary for each layer or site to its members. Knows no format, and reads headers alone.

A set is a file or folder whose format gives several drafts, a folder with dictionaries in its sub-folders, or what a
pattern finds (``FOLDER/layer_*_width_16k_l0_small``). What the members of one name must have in common is checked here.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import LoadError
from saesteer.loaders import hub
from saesteer.loaders.aliases import layer_in
from saesteer.loaders.draft import Draft, Sites
from saesteer.loaders.files import fetch, there, wrong
from saesteer.loaders.hub import WEIGHT_SUFFIXES
from saesteer.loaders.neuronpedia import Place, resolved

DEEPEST = 4  # folders below the place: layer_20/width_16k/average_l0_71, and one more
MOST_FOLDERS = 20_000  # looked into; a set has a few tens
# What members have in common, as users call it.
_ALIKE: dict[str, Callable[[CoderInfo], object]] = {
    "sites": lambda info: " -> ".join(str(site).partition(".")[0] for site in (info.site_in, info.site_out)),
    "width of the input": lambda info: info.d_in,
    "width of the output": lambda info: info.d_out,
    "activation": lambda info: info.activation,
    "input norm": lambda info: info.in_norm,
    "unit": lambda info: info.feature_unit,
    "last site that it writes": lambda info: info.targets and "".join(info.writes[-1:]),
}


Get = Callable[[str], Path]


class Member(NamedTuple):
    """One dictionary of a place."""

    place: str  # for ``load``, with the site that it reads
    sites: Sites  # as the files say
    layer: int | None  # by its sites, or else by its path


def members(place: Place, layers: Collection[int] | None = None, get: Get = fetch) -> list[Member]:
    """The dictionaries of a place, in the order of their layers; one, if it holds a single dictionary.

    Args:
        place: as in ``load``, or a path or hub id with ``*``.
        layers: of a repository on the hub, nothing else is downloaded; None: all.
        get: what makes a local copy of a dictionary on the hub.

    Raises:
        LoadError: there is none, or a file is wrong.
    """
    root, paths = _paths(resolved(place), layers, get)
    found = [_member(file, one, root) for path in paths for file, one in _inside(path, 0, [0])]
    if not found:
        from saesteer.loaders import describe  # which imports this file

        describe(paths[0])  # refuses it, and says what is there instead
    if len(paths) == len(found) == 1 and found[0].place == str(paths[0]) and "*" not in str(place) and get is fetch:
        return [found[0]._replace(place=str(place))]  # a hub id stays one
    return sorted(found, key=lambda one: (-1 if one.layer is None else one.layer, one.place))


def _paths(place: Place, layers: Collection[int] | None, get: Get) -> tuple[Path, Sequence[Path]]:
    """The folder that layers are named below, and the files and folders that a place means."""
    whole, text = Path(place).expanduser(), str(place)
    plain, pin = hub.unpinned(text)
    repo, mark, name = plain.rpartition("#")
    if mark and get is not fetch and hub.is_id(repo) and not whole.exists() and not Path(repo).exists():
        path = get(f"{repo}/{name}.safetensors{pin}")
        return path, [path]
    if there(whole) or ("*" not in text and ("#" in text or not hub.is_id(text))):
        path = fetch(place)
        return path, [path]
    first = next((n for n, part in enumerate(whole.parts) if "*" in part), len(whole.parts))
    base, pattern = Path(*whole.parts[:first]), "/".join(whole.parts[first:])
    if not base.is_dir() and hub.is_id(text):
        return _from_hub(text, first, layers, get)
    return base, _matching(place, base, pattern)


def _matching(place: Place, base: Path, pattern: str) -> Sequence[Path]:
    found = sorted(base.glob(pattern)) if base.is_dir() else []
    if not found:
        raise LoadError(f"{place}: nothing fits this pattern; expected files or folders with dictionaries")
    return found


def _from_hub(place: str, first: int, layers: Collection[int] | None, get: Get) -> tuple[Path, Sequence[Path]]:
    """The same of a hub id, of which only the layers asked for are downloaded, and nothing if a layer has two."""
    try:
        listed = hub.dictionaries(place)
    except hub.UnsafeName:
        raise
    except LoadError:  # without a network, the hub's cache may still have it
        if "*" in place:
            root = hub.cached(place)
            return root, _matching(place, root, "/".join(Path(hub.unpinned(place)[0]).parts[2:]))
        listed = []
    if not listed or listed == [place]:
        path = get(place) if listed else fetch(place)
        return path, [path]
    below = {one: Path(*Path(hub.unpinned(one)[0]).parts[first:]) for one in listed}
    wanted = [Member(one, (None, None), layer_in(path)) for one, path in below.items()]
    wanted = [one for one in wanted if layers is None or one.layer in layers]
    if not wanted:
        known = ", ".join(sorted({str(layer_in(path)) for path in below.values()}))
        raise LoadError(f"{place}: none of layer {', '.join(map(str, sorted(layers or ())))}; expected among {known}")
    chosen = only_one_each(place, wanted).values() if len(wanted) > 1 else wanted
    paths = [get(one.place) for one in chosen]
    steps = len(below[wanted[0].place].parts)
    return Path(*paths[0].parts[: len(paths[0].parts) - steps]), paths


def _inside(path: Path, depth: int, looked: list[int]) -> Iterator[tuple[Path, Draft]]:
    """The dictionaries that a file or folder holds itself, or else those below it, each with its own place."""
    from saesteer.loaders import drafts_at  # which imports this file

    if found := drafts_at(path):
        _, drafts = found
        yield from ((one.weights.path if len(drafts) > 1 else path, one) for one in drafts)
        return
    looked[0] += 1
    if not path.is_dir() or depth == DEEPEST or looked[0] > MOST_FOLDERS:
        return
    inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    for child in inside:
        if child.is_dir() or child.suffix in WEIGHT_SUFFIXES:
            yield from _inside(child, depth + 1, looked)


def _member(place: Path, draft: Draft, root: Path) -> Member:
    named = [int(site.partition(".")[2]) for site in draft.sites if site and "." in site]
    below = Path(place.name) if place == root else place.relative_to(root)
    return Member(str(place), draft.sites, named[0] if named else layer_in(below))


def check_alike(place: str, found: Mapping[int, CoderInfo], *, whole: bool) -> None:
    """Refuse dictionaries that differ in what one name must mean.

    Args:
        place: of the set.
        found: its members by layer.
        whole: whether nobody chose the layers, so a layer between others must not be missing.

    Raises:
        LoadError: naming the file, what differs and what was expected.
    """
    layers = sorted(found)
    first, last = layers[0], layers[-1]
    # Some sets have a few layers far apart. Where most of three or more are there, one that is not was lost.
    # A cross-layer transcoder has a dictionary for every layer that it writes.
    written = [layer + info.targets - 1 for layer, info in found.items() if info.targets]
    last = max([last, *written])
    missing = sorted(set(range(first, last + 1)) - set(layers))
    if whole and missing and (written or (len(layers) > 2 and 2 * len(layers) > last - first + 1)):
        named = ", ".join(map(str, missing[:8]))
        raise wrong(place, f"layer {named}", "missing", f"every layer from {first} to {last}, or the layers chosen")
    for layer in layers[1:]:
        for what, of in _ALIKE.items():
            here, there = of(found[layer]), of(found[first])
            if here != there:
                expected = f"{there}, as at layer {first} ({found[first].source})"
                raise wrong(found[layer].source, what, here, expected)


def only_one_each(place: str, found: Collection[Member]) -> dict[int, Member]:
    """The members by layer.

    Raises:
        LoadError: a member has no layer, or a layer has two.
    """
    by_layer: dict[int, Member] = {}
    for one in found:
        if one.layer is None:
            raise wrong(one.place, "layer", "named by neither the files nor the path", "a name such as layer_20")
        other = by_layer.setdefault(one.layer, one)
        if other is not one:
            pattern = re.sub(rf"((?:layers?|blocks|h)[._-]?){one.layer}(?!\d)", r"\1*", one.place)
            kinds = sorted({str(site).partition(".")[0] for site in (one.sites[0], other.sites[0])})
            hint = f"a kind, as in @{kinds[0]}" if len(kinds) > 1 else f"a pattern such as {pattern}"
            raise wrong(place, f"layer {one.layer}", f"two: {other.place} and {one.place}", f"one, chosen by {hint}")
    return by_layer
