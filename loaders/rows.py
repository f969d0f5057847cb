"""One feature of a dictionary in a file, without loading the rest: its rows, bias and threshold, by pread.

A file must stay as it was when it was opened: otherwise a read raises. Knows no format: loaders/draft.py does the same
arithmetic for one row as for all of them, so the numbers are those that ``load`` gives.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.dictionaries.vectors import FeatureRow
from saesteer.errors import LoadError
from saesteer.loaders import choose, max_act, told
from saesteer.loaders.arrays import Arrays
from saesteer.loaders.draft import Draft, facts, later_of, row_of
from saesteer.loaders.files import State, fetch, state_of


class RowFile:
    """A dictionary whose rows are read one at a time; ``open_rows`` makes it. Safe to use in threads.

    Attributes:
        info: what is known about the dictionary, as ``describe`` tells it. The fingerprint is empty for a large file.
    """

    def __init__(self, path: Path, draft: Draft, info: CoderInfo) -> None:
        self.info = info
        self._path, self._draft = path, draft
        self._own = replace(info, has_max_act="max_act" in draft.present, max_act_by=None, max_act_gaps=())
        self._beside: Tensor | None = None  # the maximum activations next to the file, once somebody needs them
        self._lock = Lock()

    @property
    def states(self) -> tuple[State | None, ...]:
        """The states of its files when they were opened."""
        return tuple(file.state for file in self._draft.files)

    def check(self) -> None:
        """Raises LoadError if a file is not the one that was opened."""
        for file in self._draft.files:
            try:
                found = os.stat(file.path)
            except OSError as exc:
                raise _unreadable(file, exc) from exc
            _compare(file, found)

    def feature(self, row: int, dtype: torch.dtype) -> tuple[FeatureRow, ...]:
        """The feature in a row, once for each site that it writes, with the precision of weights in this dtype.

        Raises:
            LoadError: a file has changed or vanished since it was opened, or a value of the row is wrong.
        """
        wanted = torch.float32 if self.info.in_norm == "layer_norm" else dtype  # it is centred before it is rounded
        coder = self.row(row, wanted)
        return feature_rows(coder, coder.w_dec[:0] if self.info.targets is None else self.later(row, wanted), dtype)

    def row(self, row: int, dtype: torch.dtype | None) -> SparseCoder:
        """Row ``row`` of the dictionary that ``load`` gives in this dtype, as a dictionary of one feature.

        Its b_dec is zero, and it has no skip connection: neither belongs to a feature. Of a cross-layer transcoder, its
        decoder is that of its own layer.

        Raises:
            LoadError: a file has changed or vanished since it was opened, or a value of the row is wrong.
        """
        assert 0 <= row < self.info.features, row
        with self._opened() as descriptors:
            found = row_of(self._draft, self._own, row, dtype, descriptors)
        if self.info.max_act_by is None:
            return found
        return replace(found, info=replace(found.info, has_max_act=True), max_act=self._max_act()[row : row + 1])

    def later(self, row: int, dtype: torch.dtype | None) -> Tensor:
        """What a feature of a cross-layer transcoder writes to each layer after its own, [targets - 1, d_out] in dtype.

        Raises:
            LoadError: as ``row``.
        """
        with self._opened() as descriptors:
            return later_of(self._draft, self._own, row, dtype, descriptors)

    @contextmanager
    def _opened(self) -> Iterator[Mapping[Path, int]]:
        """The files, open; they must not change meanwhile."""
        descriptors: dict[Path, int] = {}
        file = self._draft.weights
        try:
            for file in self._draft.files:
                descriptors[file.path] = os.open(file.path, os.O_RDONLY)
                _compare(file, os.fstat(descriptors[file.path]))
            yield descriptors
            for file in self._draft.files:
                _compare(file, os.fstat(descriptors[file.path]))
        except OSError as exc:
            raise _unreadable(file, exc) from exc
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _max_act(self) -> Tensor:
        with self._lock:
            if self._beside is None:
                self._beside = max_act.values(self._path, self._own, self._draft)
                self.check()
            if self._beside is None:
                raise LoadError(f"{max_act.beside(self._path)}: has vanished; expected the file that was there before")
            return self._beside


def _compare(file: Arrays, stat: os.stat_result) -> None:
    if state_of(stat) != file.state:
        raise changed(file.path)


def changed(place: str | Path) -> LoadError:
    """The error about a file that is not the one that was opened."""
    return LoadError(f"{place}: has changed since the server opened it; expected the same file: start it again")


def _unreadable(file: Arrays, exc: OSError) -> LoadError:
    what = f"{file.path}: cannot be read any more ({exc.strerror or exc})"
    return LoadError(f"{what}; expected the file that was opened")


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
        if info.targets is not None:
            raise LoadError(f"{what}; expected another activation: a cross-layer transcoder is served by rows alone")
        raise LoadError(f"{what}; expected it to be loaded whole, as NAME={place}")
    decoders = None if found.decoders is None else found.decoders.seekable()
    draft = replace(found, weights=found.weights.seekable(), decoders=decoders)
    return RowFile(path, draft, told(place, path, info, site))


def feature_rows(coder: SparseCoder, later: Tensor, dtype: torch.dtype) -> tuple[FeatureRow, ...]:
    """The feature of a dictionary of one feature, once for each site that it writes.

    As in the weights of a server, the encoder's row is centred where the input norm is a layer norm.

    Args:
        coder: the dictionary, which reads as many numbers as it writes.
        later: its decoder rows for the layers after its own, [targets - 1, d]; none unless it is cross-layer.
        dtype: of the server's weights.
    """
    encoder = coder.w_enc.float()
    if coder.info.in_norm == "layer_norm":
        encoder = encoder - encoder.mean(1, keepdim=True)
    bias = coder.b_enc.item()
    threshold = 0.0 if coder.threshold is None else coder.threshold.item()
    max_act = None if coder.max_act is None else coder.max_act.item()
    decoders, name = torch.cat([coder.w_dec, later]).float(), str(dtype).removeprefix("torch.")
    both = [torch.stack([encoder[0], one]).to(dtype).view(torch.uint8).numpy() for one in decoders]
    return tuple(FeatureRow(data.tobytes(), name, bias, threshold, max_act) for data in both)
