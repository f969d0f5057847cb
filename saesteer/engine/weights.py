"""The weights that the ops read, site by site and row by row. Knows nothing of requests."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.engine.table import Placement
from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.language.sites import parse
from saesteer.loaders import load

_ROWS_AT_ONCE = 16384  # rows widened to fp32 at a time
_DENSE_TOKENS = 512  # tokens that are encoded whole at once
_DENSE_BYTES = 256 << 20  # bytes that their features may take


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Site(Bound):
    """What the op at one site uses, and what the engine knows about the site."""

    name: str
    pool: int  # first slot after the dictionaries' slots

    @property
    def layer(self) -> int:
        """The layer in the site's name."""
        return parse(self.name)[1]


@dataclass(slots=True)
class Room:
    """The rows of one site: dictionaries that read and write here, vectors, and then all other dictionaries."""

    pool: int = 0  # first slot of the vectors
    enc: int = 0  # rows of w_enc
    dec: int = 0  # rows of w_dec
    biases: int = 0  # rows of b_dec
    dense: int = 0  # features of the largest dictionary that an edit here may need whole
    norms: bool = False

    def reading(self, info: CoderInfo, *, writes: bool) -> int:
        """Room for the encoder of a dictionary, which may write here, too; its first row."""
        self.enc += info.features
        if writes or info.activation in RANKED:
            self.dense = max(self.dense, dense_size(info))
        self.norms |= has_norm(info)
        return self.enc - info.features

    def writing(self, info: CoderInfo) -> tuple[int, int]:
        """Room for the decoder of a dictionary; its first row, and the row of its bias."""
        self.dec += info.features
        self.biases += 1
        return self.dec - info.features, self.biases - 1


def rooms(
    infos: Mapping[str, CoderInfo], ends: Mapping[str, tuple[str, str]], pools: Mapping[str, int]
) -> tuple[dict[str, Room], dict[str, tuple[int, int, int]]]:
    """The rows of each site, and for each dictionary its first row of w_enc, of w_dec, and its row of b_dec.

    A dictionary that is served by rows has none: its features lie where vectors do.

    Args:
        infos: the infos of the dictionaries, by name.
        ends: the sites with the ops that read and write for each.
        pools: by site, in forward order, how many vectors it has slots for.
    """
    found = {site: Room() for site in pools}
    places = {}
    for alike in (True, False):
        for key, info in infos.items():
            first, last = ends[key]
            if info.by_rows:
                found[first].norms |= has_norm(info)
            elif (first == last) == alike:
                places[key] = found[first].reading(info, writes=alike), *found[last].writing(info)
        for site, pool in pools.items() if alike else ():
            room = found[site]
            room.pool = room.enc
            room.enc, room.dec = room.enc + pool, room.dec + pool
    return found, places


def site_of(
    name: str, room: Room, common: Mapping[str, Tensor], *, width: int, dtype: torch.dtype, device: torch.device
) -> Site:
    """A site with room for its weights, zeros.

    Args:
        name: the name of the site.
        room: its rows.
        common: the fields of Bound that are not weights.
        width: the width of the stream.
        dtype: the dtype in which the weights are held.
        device: the device that holds the weights.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return Site(
        **common,
        w_enc=zeros(room.enc, width, dtype=dtype),
        w_dec=zeros(room.dec, width, dtype=dtype),
        b_enc=zeros(room.enc),
        threshold=zeros(room.enc),
        b_dec=zeros(max(1, room.biases), width),
        dense_size=room.dense,
        has_norms=room.norms,
        name=name,
        pool=room.pool,
    )


def fill(info: CoderInfo, path: str, reads: Site, writes: Site, rows: tuple[int, int, int]) -> Placement:
    """Load a dictionary into its rows.

    Args:
        info: its info.
        path: the path to its weights.
        reads: the site that reads for it.
        writes: the site that writes for it.
        rows: its first row of w_enc and of w_dec, and its row of b_dec.

    Raises:
        LoadError: a weight file does not hold what it should.
    """
    base, out, number = rows
    centred = info.in_norm == "layer_norm"
    coder = load(path, dtype=torch.float32 if centred else reads.w_enc.dtype, site=info.site_in)
    end = base + coder.info.features
    _copy(reads.w_enc[base:end], coder.w_enc, centred=centred)
    _copy(writes.w_dec[out : out + coder.info.features], coder.w_dec)
    reads.b_enc[base:end].copy_(coder.b_enc)
    reads.threshold[base:end].copy_(_threshold(coder))
    writes.b_dec[number].copy_(coder.b_dec)

    def array(tensor: Tensor) -> NDArray[np.float32]:
        return np.ascontiguousarray(tensor.float().cpu().numpy())

    max_act = None if coder.max_act is None else array(coder.max_act)
    apart = reads is not writes
    return Placement(base, out, number, apart, info, array(coder.b_enc), array(_threshold(coder)), max_act)


def has_norm(info: CoderInfo) -> bool:
    """Whether the op where it reads has to normalise tokens."""
    return info.in_norm != "none" or info.reads_pregain


def dense_size(info: CoderInfo) -> int:
    """The number of features where an edit may need the dictionary whole; else 0."""
    return info.features if info.can_reconstruct or info.activation in RANKED else 0


def scratch_for(infos: Iterable[CoderInfo], width: int, device: torch.device) -> Tensor:
    """The kernels' scratch memory, zeros; empty on a CPU, where the reference needs none."""
    if device.type == "cpu":
        return torch.zeros(0, dtype=torch.float32)
    dense = max(map(dense_size, infos), default=0)
    fitting = _DENSE_BYTES // (4 * max(1, dense)) // layout.TILE * layout.TILE
    tokens = max(layout.TILE, min(_DENSE_TOKENS, fitting))
    return torch.zeros(layout.scratch_words(width, dense, tokens), dtype=torch.float32, device=device)


def _copy(into: Tensor, weights: Tensor, *, centred: bool = False) -> None:
    """Copy rows, minus their own mean for a layer norm: (x - mean(x)) . e = x . (e - mean(e))."""
    if not centred:
        into.copy_(weights)
        return
    for start in range(0, len(weights), _ROWS_AT_ONCE):
        rows = weights[start : start + _ROWS_AT_ONCE].float()
        into[start : start + len(rows)].copy_(rows - rows.mean(1, keepdim=True))


def _threshold(coder: SparseCoder) -> Tensor:
    """The thresholds [F]: a feature that is not above its threshold is 0. It is 0 for relu, and abstopk has none."""
    if coder.threshold is not None:
        return coder.threshold
    return torch.full((coder.info.features,), -math.inf if coder.info.activation == "abstopk" else 0.0)
