"""Decoder rows of dictionaries, out of their files, and the names of sites in TransformerLens. Knows no request.

A front end has no weights, so what it needs of a decoder it reads from where the server's weights came from. Files that
have changed since are refused: their rows would be of other features.
"""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder, blocks
from saesteer.errors import LoadError
from saesteer.loaders import aliases, is_as_loaded, load
from saesteer.loaders.files import fetch
from saesteer.loaders.rows import changed, open_rows

RECENT = 1024  # rows that are kept: 16 MB where the stream is 4096 wide

site_of_hook = aliases.from_transformer_lens  # what serves requests knows no loaders
hook_of_site = aliases.to_transformer_lens

Key = tuple[str, str | None, str, int]  # of a feature: source, site_in, fingerprint, and its id
Row = NDArray[np.float32]  # [d_out], for one unit of the dictionary's values; not to be changed


class Decoders:
    """Rows of dictionaries that a server holds whole. Safe to use in threads."""

    def __init__(self) -> None:
        self._kept: dict[Key, Row] = {}  # the last used comes last
        self._lock = Lock()

    def alone(self, info: CoderInfo, features: Sequence[int]) -> list[Row] | None:
        """The decoder rows of features, if they are kept or can be read one by one.

        Args:
            info: of a dictionary that is no cross-layer transcoder.
            features: that it has, by their original indices.

        Raises:
            LoadError: the files have changed, or cannot be read.
        """
        found = self._recent(info, features)
        if found is None and info.activation not in RANKED:
            _refuse_others(info)
            try:
                file = open_rows(fetch(info.source, again=True), site=info.site_in)
            except LoadError:  # a compressed file
                return None
            rows = [file.row(_row_of(info, one), torch.float32).w_dec[0] for one in features]
            found = self._keep(info, features, rows)
        return found

    def whole(self, info: CoderInfo, features: Sequence[int]) -> list[Row]:
        """The same, from the whole file, which is read once for all of them."""
        found = self._recent(info, features)  # another request may have read it meanwhile
        if found is None:
            coder = _whole(info)
            found = self._keep(info, features, [coder.w_dec[_row_of(info, one)] for one in features])
        return found

    def _recent(self, info: CoderInfo, features: Sequence[int]) -> list[Row] | None:
        keys = [_key(info, one) for one in features]
        with self._lock:
            if not self._kept.keys() >= set(keys):
                return None
            found = {key: self._kept.pop(key) for key in set(keys)}
            self._kept |= found
        return [found[key] for key in keys]

    def _keep(self, info: CoderInfo, features: Sequence[int], rows: Sequence[torch.Tensor]) -> list[Row]:
        found: list[Row] = [row.float().numpy().copy() for row in rows]  # a view would keep the matrix
        _refuse_others(info)
        with self._lock:
            self._kept |= {_key(info, one): row for one, row in zip(features, found, strict=True)}
            while len(self._kept) > RECENT:
                del self._kept[next(iter(self._kept))]
        return found


def nearest(info: CoderInfo, vector: Row, most: int) -> list[tuple[int, float]]:
    """The features whose decoder rows are closest to a vector, with the cosine, best first; of equal ones, the first.

    A row of length 0 has the cosine 0. The whole file is read each time: a server keeps no second copy of its weights.

    Args:
        info: of the dictionary.
        vector: [d_out].
        most: how many.

    Raises:
        LoadError: the files have changed, or cannot be read.
    """
    # In float64, which holds the square of every float32.
    coder, unit = _whole(info), torch.nn.functional.normalize(torch.from_numpy(vector).double(), dim=0).float()
    rows = (coder.w_dec[block].float() for block in blocks(len(coder.w_dec)))
    cosines = torch.cat([torch.nn.functional.normalize(one, dim=1) @ unit for one in rows])
    order = torch.argsort(cosines, descending=True, stable=True)[:most].tolist()
    _refuse_others(info)
    ids = info.feature_ids
    return [(row if ids is None else ids[row], cosines[row].item()) for row in order]


def _key(info: CoderInfo, feature: int) -> Key:
    return info.source, info.site_in, info.fingerprint, feature


def _row_of(info: CoderInfo, feature: int) -> int:
    row = info.row_of(feature)
    assert row is not None, feature
    return row


def _refuse_others(info: CoderInfo) -> None:
    """Before something is read, which might have other shapes, and behind it, as files may be replaced meanwhile."""
    if not info.by_rows and not is_as_loaded(info):
        raise changed(info.source)


def _whole(info: CoderInfo) -> SparseCoder:
    _refuse_others(info)
    return load(fetch(info.source, again=True), site=info.site_in)
