"""One feature of a dictionary in a file, without loading the rest: its rows, bias and threshold, by pread.

A file must stay as it was when it was opened: otherwise a read raises. Knows no format: loaders/draft.py does the same
arithmetic for one row as for all of them, so the numbers are those that ``load`` gives.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import choose, max_act, told
from saesteer.loaders.draft import Draft, facts, row_of, thresholds
from saesteer.loaders.files import fetch, state_of


class RowFile:
    """A dictionary whose rows are read one at a time; ``open_rows`` makes it. Safe to use in threads.

    Attributes:
        info: what is known about the dictionary, as ``describe`` tells it. The fingerprint is empty for a large file.
    """

    def __init__(self, path: Path, draft: Draft, info: CoderInfo) -> None:
        self.info = info
        self._path, self._draft = path, draft
        self._own = replace(info, has_max_act="max_act" in draft.present)
        self._beside: Tensor | None = None  # the maximum activations next to the file, once somebody needs them
        self._lock = Lock()

    def check(self) -> None:
        """Raises LoadError if the file is not the one that was opened."""
        try:
            self._compare(self._draft.weights.path.stat())
        except OSError as exc:
            raise self._vanished(exc) from exc

    def row(self, row: int, dtype: torch.dtype | None) -> SparseCoder:
        """Row ``row`` of the dictionary that ``load`` gives in this dtype, as a dictionary of one feature.

        Its b_dec is zero, and it has no skip connection: neither belongs to a feature.

        Raises:
            LoadError: the file has changed or vanished since it was opened, or a value of the row is wrong.
        """
        assert 0 <= row < self.info.features, row
        try:
            with self._draft.weights.path.open("rb", buffering=0) as stream:
                self._compare(os.fstat(stream.fileno()))
                found = row_of(self._draft, self._own, row, dtype, stream.fileno())
                self._compare(os.fstat(stream.fileno()))
        except OSError as exc:
            raise self._vanished(exc) from exc
        if self.info.has_max_act == self._own.has_max_act:
            return found
        return replace(found, info=replace(found.info, has_max_act=True), max_act=self._max_act()[row : row + 1])

    def _max_act(self) -> Tensor:
        with self._lock:
            if self._beside is None:
                self._beside = max_act.values(self._path, self._own, *thresholds(self._draft, self._own))
                self.check()
            if self._beside is None:
                raise LoadError(f"{max_act.beside(self._path)}: has vanished; expected the file that was there before")
            return self._beside

    def _compare(self, stat: os.stat_result) -> None:
        if state_of(stat) != self._draft.weights.state:
            path = self._draft.weights.path
            raise LoadError(f"{path}: has changed since the server opened it; expected the same file: start it again")

    def _vanished(self, exc: OSError) -> LoadError:
        path = self._draft.weights.path
        return LoadError(f"{path}: cannot be read any more ({exc.strerror or exc}); expected the file that was opened")


def open_rows(place: str | Path, *, site: str | None = None) -> RowFile:
    """A dictionary by its headers; places and sites are those of ``load``.

    Raises:
        LoadError: as ``describe``; or the features are ranked, or the file is compressed, so no row can be read alone.
    """
    path = fetch(place)
    name, found = choose(path, site)
    info = facts(found, name, hashed=False)
    if info.activation in RANKED:
        what = f"{place}: uses {info.activation}, which ranks all features, so one row alone has no meaning"
        raise LoadError(f"{what}; expected it to be loaded whole, as NAME={place}")
    return RowFile(path, replace(found, weights=found.weights.seekable()), told(place, path, info))
