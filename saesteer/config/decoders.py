"""Decoder rows of dictionaries, out of their files, and the names of sites in TransformerLens. Knows no request.

A front end has no weights, so what it needs of a decoder it reads from where the server's weights came from.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from saesteer.dictionaries.coder import CoderInfo, SparseCoder, blocks
from saesteer.errors import LoadError
from saesteer.loaders import aliases, load
from saesteer.loaders.rows import open_rows

RECENT = 1024  # rows that are kept: 16 MB where the stream is 4096 wide

site_of_hook = aliases.from_transformer_lens
hook_of_site = aliases.to_transformer_lens


@lru_cache(RECENT)
def decoder_row(info: CoderInfo, feature: int) -> NDArray[np.float32]:
    """The decoder row of a feature, [d_out], for one unit of the dictionary's values; not to be changed.

    Args:
        info: of a dictionary that is no cross-layer transcoder.
        feature: one that it has, by its original index.

    Raises:
        LoadError: the files cannot be read.
    """
    row = info.row_of(feature)
    assert row is not None, feature
    try:
        coder = open_rows(info.source, site=info.site_in).row(row, torch.float32)
        row = 0
    except LoadError:  # features that are ranked, or a compressed file: it is read whole
        coder = _whole(info)
    found: NDArray[np.float32] = coder.w_dec[row].float().numpy().copy()  # a view would keep the matrix
    return found


def nearest(info: CoderInfo, vector: NDArray[np.float32], most: int) -> list[tuple[int, float]]:
    """The features whose decoder rows are closest to a vector, with the cosine, best first; of equal ones, the first.

    A row of length 0 has the cosine 0. The whole file is read each time: a server keeps no second copy of its weights.

    Args:
        info: of the dictionary.
        vector: [d_out].
        most: how many.

    Raises:
        LoadError: the files cannot be read.
    """
    # In float64, which holds the square of every float32.
    coder, unit = _whole(info), torch.nn.functional.normalize(torch.from_numpy(vector).double(), dim=0).float()
    rows = (coder.w_dec[block].float() for block in blocks(len(coder.w_dec)))
    cosines = torch.cat([torch.nn.functional.normalize(one, dim=1) @ unit for one in rows])
    order = torch.argsort(cosines, descending=True, stable=True)[:most].tolist()
    ids = info.feature_ids
    return [(row if ids is None else ids[row], cosines[row].item()) for row in order]


def _whole(info: CoderInfo) -> SparseCoder:
    return load(info.source, site=info.site_in)
