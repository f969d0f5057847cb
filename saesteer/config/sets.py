"""Which dictionaries an operator means by ``PLACE@SITE``: one, or a set with one for each layer. Reads headers alone.

PLACE                      all that the place holds
PLACE@@REVISION            the same as it was in a commit, a tag or a branch of the hub; @ and the rest follow
PLACE@9,17-20              the dictionaries of these layers
PLACE@resid_post           those that read this kind of site; where the files do not say it, all of them do
PLACE@mlp_in.9:mlp_out.9   of a transcoder, where it reads and where it writes; layers as above
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from saesteer.config.sources import DictionarySource
from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError
from saesteer.language.fields import listing
from saesteer.language.sites import KINDS, MAX_LAYER, parse
from saesteer.loaders.files import fetch
from saesteer.loaders.neuronpedia import source_of
from saesteer.loaders.sets import Get, Member, check_alike, members, only_one_each
from saesteer.planning.plan import member

Layers = tuple[int, ...]
_SIDE = re.compile(r"(?:([a-z_]+)(?:\.([0-9].*|all))?|([0-9].*))")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,3})(?:-(0|[1-9][0-9]{0,3}))?")


class _Choice(NamedTuple):
    """What stands behind the @."""

    kinds: tuple[str, ...] = ()  # where it reads, and where a transcoder writes
    layers: frozenset[int] | None = None  # None: all

    @classmethod
    def read(cls, text: str) -> "_Choice":
        sides = [_side(side, text) for side in text.split(":")]
        if len(sides) > 2 or len({layers for _, layers in sides}) > 1 or (len(sides) == 2 and None in dict(sides)):
            raise ConfigError(f"@{text}: expected a site, or two with the same layers, such as @mlp_in.20:mlp_out.20")
        return cls(tuple(kind for kind, _ in sides if kind), sides[0][1])

    def site(self, layer: int) -> str:
        """The sites at a layer, as they stand behind the @ of one dictionary."""
        return ":".join(f"{kind}.{layer}" for kind in self.kinds)


def opened(
    dictionaries: Mapping[str, DictionarySource], get: Get = fetch
) -> tuple[dict[str, DictionarySource], dict[str, Layers]]:
    """The source of each dictionary by its key (``Catalog.key``), and the layers of each set.

    Args:
        dictionaries: as the operator wrote them, by name.
        get: what makes a local copy of a dictionary on the hub.

    Raises:
        ConfigError: a place does not have what is chosen, or a set's dictionary has the name of another dictionary.
        LoadError: a file is wrong, there is no dictionary, or a layer has two.
    """
    sources: dict[str, DictionarySource] = {}
    sets: dict[str, Layers] = {}
    for name, source in dictionaries.items():
        found = _members(name, source, get)
        if len(found) == 1:
            [sources[name]] = found.values()
            continue
        sets[name] = tuple(found)
        keys = {member(name, layer): one for layer, one in found.items()}
        if taken := sorted(keys.keys() & dictionaries.keys()):
            raise ConfigError(f"dictionary {taken[0]!r} is also a layer of the set {name!r}; expected another name")
        sources |= keys
    return sources, sets


def check_set(name: str, source: DictionarySource, infos: Mapping[str, CoderInfo], layers: Layers) -> None:
    """Refuse a set whose dictionaries differ in what one name must mean, or that lacks a layer.

    Raises:
        LoadError: naming the file, what differs and what was expected.
    """
    every = source.site is None or _Choice.read(source.site).layers is None
    check_alike(source.path, {layer: infos[member(name, layer)] for layer in layers}, whole=every)


def _members(name: str, source: DictionarySource, get: Get) -> dict[int, DictionarySource]:
    """The dictionaries that a name stands for, by layer; the layer of a single one has no meaning."""
    sides = source.site.split(":") if source.site else []
    plain = all(map(_is_site, sides))
    layers = _Choice.read(source.site).layers if source.site and not plain else None
    found = members(source.path, frozenset(parse(side)[1] for side in sides[:1]) if sides and plain else layers, get)
    if len(found) == 1 and plain:
        named = source_of(source.path)
        site = named.site if named and source.site is None and found[0].sites[0] is None else source.site
        return {found[0].layer or 0: replace(source, path=found[0].place, site=site)}
    choice, shared = _Choice.read(source.site) if source.site else _Choice(), Counter(one.place for one in found)
    kinds = {str(one.sites[0]).partition(".")[0] for one in found if one.sites[0]}
    if choice.kinds and kinds:
        if choice.kinds[0] not in kinds:
            reads = f"{source.path} reads {', '.join(sorted(kinds))}"
            raise ConfigError(f"dictionary {name!r}: {reads}; expected one of these behind @, got {source.site!r}")
        found = [one for one in found if str(one.sites[0]).partition(".")[0] == choice.kinds[0]]
    if choice.layers is not None:
        have = {one.layer for one in found}
        if missing := choice.layers - have:
            message = f"{source.path} has no dictionary of layer {listing(missing)}"
            raise ConfigError(f"dictionary {name!r}: {message}; expected layers among {listing(have - {None})}")
        found = [one for one in found if one.layer in choice.layers]
    by_layer = only_one_each(source.path, found)
    return {layer: _source(one, source, layer, choice, shared[one.place] > 1) for layer, one in by_layer.items()}


def _source(one: Member, source: DictionarySource, layer: int, choice: _Choice, shared: bool) -> DictionarySource:
    """One member's place, and its site where the operator says it or one file holds several dictionaries."""
    if choice.kinds and (len(choice.kinds) > 1 or one.sites[0] is None):
        return replace(source, path=one.place, site=choice.site(layer))
    return replace(source, path=one.place, site=":".join(dict.fromkeys(map(str, one.sites))) if shared else None)


def _side(side: str, whole: str) -> tuple[str | None, frozenset[int] | None]:
    """A kind and layers, each None where it is not said."""
    match = _SIDE.fullmatch(side)
    if match is None or (match[1] and match[1] not in KINDS):
        parse(side)  # says what a site is
        raise AssertionError(side)
    kind, layers = match[1], match[2] or match[3]
    return kind, None if layers in (None, "all") else _layers(layers, whole)


def _layers(text: str, whole: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"@{whole}: got {part!r}, expected layers such as 9,17-20, 0 to {MAX_LAYER}")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _is_site(side: str) -> bool:
    kind, _, layer = side.partition(".")
    return kind in KINDS and layer.isdecimal()
