"""Dictionaries that stay in their files: what is known of each, and the rows of features that requests ask for.

Those of ``--dictionary NAME=rows:PLACE`` are opened at start, those below ``--dictionary-folder`` when a request names
them, alone or as a layer of a set. Safe to use in threads. Knows no request, no model and no device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch

from saesteer.config.origins import refuse_others
from saesteer.config.sources import DictionarySource
from saesteer.dictionaries.coder import CoderInfo
from saesteer.dictionaries.vectors import FeatureRow
from saesteer.errors import ConfigError, LoadError
from saesteer.language.sites import canonical
from saesteer.loaders.files import State, state_of, wrong
from saesteer.loaders.folder import listed, sets_in
from saesteer.loaders.rows import RowFile, changed, open_rows
from saesteer.loaders.sets import check_alike
from saesteer.planning.plan import layer_of, member

RECENT = 1024  # rows that are kept: 32 MB where the stream is 4096 wide
OPENED = 4096  # dictionaries below the folder that are kept open, as requests name them, each with any site

Place = Callable[[str, DictionarySource, CoderInfo], CoderInfo]  # fills in the operator's sites, or refuses


class RowStore(Mapping[str, CoderInfo]):
    """Facts by ``Catalog.key``. One that is asked for may raise ConfigError or LoadError, as its file is opened then.

    A name below the folder may end in ``@SITE``, as a place does on the command line, if its files name no other; that
    of a folder with a dictionary for each layer stands for all of them.

    Attributes:
        named: the operator's own.
        sets: the layers of the folders that are sets.

    Args:
        named: the operator's own, by name.
        folder: where all others are; None: there are no others.
        place: gives a dictionary its sites.

    Raises:
        ConfigError, LoadError: one of ``named`` cannot be read by rows, or the folder has no dictionaries.
    """

    def __init__(self, named: Mapping[str, DictionarySource], folder: str | None, place: Place) -> None:
        self._place = place
        self._listed: Mapping[str, Path] = {} if folder is None else listed(folder)
        found = {name: layers for name, layers in sets_in(self._listed).items() if name not in named}
        self.sets = {name: (*layers,) for name, layers in found.items()}
        self._members = {
            member(name, layer): (name, layer, path) for name, layers in found.items() for layer, path in layers.items()
        }
        self._opened: dict[str, tuple[RowFile, CoderInfo]] = {}
        self._own = frozenset(named)
        # By place. A file that is opened again must be the first one: rows of that are kept here and with requests.
        self._first: dict[str, tuple[State | None, ...]] = {}
        self._rows: dict[tuple[str, int, int, torch.dtype], FeatureRow] = {}  # the last used comes last
        self._lock = Lock()
        self._served: tuple[str, Sequence[str]] | None = None  # as ``of_model``
        self.named: Mapping[str, CoderInfo] = {name: self._open(name, source)[1] for name, source in named.items()}

    def of_model(self, model: str | None, declared: Sequence[str]) -> "RowStore":
        """Return the same files for one model: facts about a dictionary of another model raise ConfigError.

        Args:
            model: the served one, a hub id or a folder; None: unknown.
            declared: models whose dictionaries fit, as the operator declares.
        """
        found = copy(self)
        found._served = None if model is None else (model, declared)
        return found

    def __getitem__(self, name: str) -> CoderInfo:
        info = self._find(name)[1]
        if self._served is not None:
            refuse_others({name: info}, *self._served)
        return info

    def __contains__(self, name: object) -> bool:
        return name in self.named or (isinstance(name, str) and self._source(name) is not None)

    def __iter__(self) -> Iterator[str]:
        yield from self.named
        yield from self._listed.keys() - self.named.keys()

    def __len__(self) -> int:
        return len(self.named.keys() | self._listed.keys())

    def row(self, name: str, feature: int, dtype: torch.dtype, target: int = 0) -> FeatureRow:
        """What an edit of a feature needs, from the file as it was when it was opened.

        Args:
            name: the name of a dictionary here.
            feature: a feature that it has.
            dtype: of the server's weights.
            target: which of the sites that it writes; only of a cross-layer transcoder.

        Raises:
            LoadError: the file has changed or vanished, or a number is wrong.
        """
        key = name, feature, target, dtype
        file, info = self._find(name)
        with self._lock:
            found = self._rows.pop(key, None)
        if found is None:
            row = info.row_of(feature)
            assert row is not None, key
            rows = file.feature(row, dtype)
            found, new = rows[target], {(name, feature, at, dtype): one for at, one in enumerate(rows)}
        else:
            file.check()
            new = {key: found}
        with self._lock:
            self._rows |= new
            while len(self._rows) > RECENT:
                del self._rows[next(iter(self._rows))]
        return found

    def check(self, name: str) -> None:
        """Raises LoadError if the file of a dictionary has changed or vanished."""
        self._find(name)[0].check()

    def _find(self, name: str) -> tuple[RowFile, CoderInfo]:
        found = self._opened.get(name)
        if found is not None:
            return found
        source = self._source(name)
        if source is None:
            raise KeyError(name)
        return self._open(name, source)

    def _source(self, name: str) -> DictionarySource | None:
        """Where a dictionary below the folder is."""
        if name in self._members:
            name = self._members[name][2]
        if name in self._listed:
            return DictionarySource(str(self._listed[name]))
        path, _, site = name.rpartition("@")
        return DictionarySource(str(self._listed[path]), site) if site and path in self._listed else None

    def _open(self, name: str, source: DictionarySource) -> tuple[RowFile, CoderInfo]:
        file = _opened(source.path, source.reads, _states(Path(source.path)))
        if isinstance(file, str):
            raise LoadError(file)
        if self._first.setdefault(source.path, file.states) != file.states:
            raise changed(source.path)
        called = self._members[name][2] if name in self._members else name
        info, own = replace(self._place(called, source, file.info), by_rows=True), file.info
        for given, known in ((info.site_in, own.site_in), (info.site_out, own.site_out)):
            # Only the operator may move a dictionary.
            if name not in self._own and known is not None and canonical(str(given)) != canonical(known):
                raise ConfigError(f"dictionary {called!r} is of {known}, as its files have it; got {given}")
        if name in self._members:
            self._check_member(name, info)
        with self._lock:
            found = self._opened.setdefault(name, (file, info))
            if len(self._opened) > OPENED + len(self._own):
                del self._opened[next(one for one in self._opened if one not in self._own)]
        return found

    def _check_member(self, key: str, info: CoderInfo) -> None:
        """Raises LoadError unless a dictionary has the layer of its path, and what its set has at the first layer."""
        name, layer, _ = self._members[key]
        if layer_of(info) != layer:
            raise wrong(info.source, "site", info.site_in, f"layer {layer}, as its path says, or to be named alone")
        first = self.sets[name][0]
        if layer != first:
            check_alike(name, {first: self[member(name, first)], layer: info}, whole=False)


@lru_cache(OPENED)
def _opened(place: str, site: str | None, _: object) -> RowFile | str:
    """A dictionary's file, or why it is none: any client may name it again and again.

    Args:
        place: its path.
        site: what it reads, if its file does not say it.
        _: its state; a file that has changed is opened anew.
    """
    try:
        return open_rows(place, site=site)
    except LoadError as exc:
        return str(exc)


def _states(place: Path) -> object:
    """What stays the same unless somebody changes a dictionary's files, or puts one beside them."""
    with suppress(OSError):
        return (*(state_of(one.stat()) for one in (place, *(place.iterdir() if place.is_dir() else [place.parent]))),)
    return None
