"""The weights that the ops read, site by site and row by row. Knows nothing of requests."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.engine.readouts import Source
from saesteer.engine.table import Arrow, Floats, Placement
from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.kernels.read.features import Encoder
from saesteer.kernels.read.rows import Probes
from saesteer.language.sites import canonical
from saesteer.loaders import load

_ROWS_AT_ONCE = 16384  # rows widened to fp32 at a time
_DENSE_TOKENS = 2048  # tokens that are encoded whole at once
_DENSE_BYTES = 512 << 20  # bytes that their features may take


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Site(Bound):
    """What the op at one site uses, and what the engine knows about the site."""

    name: str
    pool: int  # first slot after the dictionaries' slots


@dataclass(slots=True)
class Room:
    """The rows of one site: dictionaries that read and write here, vectors, and then all other dictionaries."""

    pool: int = 0  # first slot of the vectors
    enc: int = 0  # rows of w_enc
    dec: int = 0  # rows of w_dec
    biases: int = 0  # rows of b_dec
    dense: int = 0  # features of the largest dictionary that an edit here may need whole
    norms: bool = False

    def reading(self, info: CoderInfo, *, whole: bool) -> int:
        """Room for the encoder of a dictionary, which may be encoded whole; its first row."""
        rows = rows_of(info, whole=whole)
        if whole or info.activation in RANKED:
            self.dense = max(self.dense, dense_size(info))
        self.norms |= has_norm(info)
        self.enc += rows
        return self.enc - rows


def rooms(
    infos: Mapping[str, CoderInfo], ends: Mapping[str, tuple[str, str]], pools: Mapping[str, int]
) -> tuple[dict[str, Room], dict[str, tuple[int, int, int]]]:
    """The rows of each site, and for each dictionary its first row of w_enc, of w_dec, and its row of b_dec.

    A dictionary that may be reconstructed is decoded where it reads, so its encoder and decoder lie side by side there.
    If it writes at another site, its decoder stands there as well, for clamps. A dictionary that is served by rows has
    none: its features lie where vectors do.

    Args:
        infos: the infos of the dictionaries, by name.
        ends: the sites with the ops that read and write for each.
        pools: by site, in forward order, how many vectors it has slots for.
    """
    found = {site: Room() for site in pools}
    places = {}
    for key, info in infos.items():
        room = found[ends[key][0]]
        if info.by_rows:
            room.norms |= has_norm(info)
        elif decodes(info, ends[key]):
            base = room.reading(info, whole=True)
            room.dec, room.biases = room.enc, room.biases + 1  # beside its encoder, it is decoded whole
            places[key] = base, base, room.biases - 1
    for site, pool in pools.items():
        room = found[site]
        room.pool = room.enc
        room.enc, room.dec = room.enc + pool, room.dec + pool
    for key, info in infos.items():
        first, last = ends[key]
        if not info.by_rows and key not in places:
            places[key] = found[first].reading(info, whole=False), 0, 0
        if not info.by_rows and first != last:
            there = found[last]
            places[key] = places[key][0], there.dec, places[key][2]
            there.dec += info.features
    return found, places


def decodes(info: CoderInfo, ends: tuple[str, str]) -> bool:
    """Whether a site decodes the dictionary whole: its own, or for a transcoder the one where it reads.

    What a transcoder makes replaces a tensor, so it needs an op at that very site.
    """
    served = info.can_reconstruct and info.activation != "groupmax"
    return ends[0] == ends[1] or (served and ends[1] == canonical(str(info.site_out)))


def rows_of(info: CoderInfo, *, whole: bool) -> int:
    """Rows of a dictionary's encoder, with the inputs of its skip connection if it may be encoded whole."""
    return info.features + info.d_in * (whole and info.skip)


def site_of(
    name: str, room: Room, common: Mapping[str, Tensor], *, width: int, dtype: torch.dtype, device: torch.device
) -> Site:
    """A site with room for its weights, zeros.

    Args:
        name: the name of the site.
        room: its rows.
        common: the fields of Bound that are not weights.
        width: the width of the tensor at the site.
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


def fill(info: CoderInfo, reads: Site, writes: Site, rows: tuple[int, int, int], *, whole: bool) -> Placement:
    """Load a dictionary into its rows.

    Args:
        info: its info.
        reads: the site that reads for it.
        writes: the site that writes for it.
        rows: its first row of w_enc and of w_dec, and its row of b_dec.
        whole: whether it is decoded where it reads.

    Raises:
        LoadError: a weight file does not hold what it should.
    """
    base, out, number = rows
    centred = info.in_norm == "layer_norm"
    coder = load(info.source, dtype=torch.float32 if centred else reads.w_enc.dtype, site=info.site_in)
    end = base + coder.info.features
    _copy(reads.w_enc[base:end], coder.w_enc, centred=centred)
    apart = reads is not writes
    if apart or not whole:
        _copy(writes.w_dec[out : out + coder.info.features], coder.w_dec)
    reads.b_enc[base:end].copy_(coder.b_enc)
    reads.threshold[base:end].copy_(_threshold(coder))
    if whole:
        _copy(reads.w_dec[base:end], coder.w_dec)
        reads.b_dec[number].copy_(coder.b_dec)
    if whole and coder.w_skip is not None:  # x_i is one more feature, always active, with W_skip's column i behind it
        inputs = slice(end, end + info.d_in)
        reads.w_enc[inputs].copy_(torch.eye(info.d_in))
        reads.w_dec[inputs].copy_(coder.w_skip.T)
        reads.threshold[inputs] = -math.inf

    def array(tensor: Tensor) -> Floats:
        return np.ascontiguousarray(tensor.float().cpu().numpy())

    max_act = None if coder.max_act is None else array(coder.max_act)
    total = rows_of(info, whole=whole)
    numbers = array(torch.stack([coder.b_enc.float(), _threshold(coder).float()], dim=1))
    return Placement(base, out, number, total, apart, info, numbers, max_act)


def source_of(place: Placement, site: Site) -> Source:
    """A dictionary that lies in a site's weights."""
    info, rows = place.info, slice(place.base, place.base + place.info.features)
    ranked = info.k or 0
    encoder = Encoder(
        site.w_enc[rows],
        site.b_enc[rows],
        site.threshold[rows],
        norm=place.norm,
        groups=ranked if info.activation == "groupmax" else int(ranked > 0),
        k=1 if info.activation == "groupmax" else ranked,
        magnitude=info.activation == "abstopk",
    )
    return Source(encoder, None if info.feature_ids is None else np.array(info.feature_ids, dtype=np.int32))


def rows_read(
    arrows: Sequence[Arrow], laws: Sequence[tuple[float, float, int]], device: torch.device, dtype: torch.dtype
) -> Source:
    """Features whose rows a request brought, each with its bias, its threshold and its dictionary's input norm."""
    bias, threshold, norms = zip(*laws, strict=True)
    numbers = torch.tensor([bias, threshold], device=device)
    w_enc = torch.from_numpy(np.stack([one.unit[0] for one in arrows])).to(device, dtype)
    return Source(Encoder(w_enc, numbers[0], numbers[1], norm=norms[0]))


def probes_of(
    arrows: Sequence[Arrow], bias: Sequence[float], at: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Source:
    """Probes that are read together; ``at`` has the number of each one's site."""
    directions = np.stack([one.unit * np.float32(one.length) for one in arrows])
    return Source(probes=Probes.of(torch.from_numpy(directions), bias, at, device, dtype))


def has_norm(info: CoderInfo) -> bool:
    """Whether the op where it reads has to normalise tokens."""
    return info.in_norm != "none" or info.reads_pregain


def dense_size(info: CoderInfo) -> int:
    """The number of rows where an edit may need the dictionary whole; else 0."""
    return rows_of(info, whole=True) if info.can_reconstruct or info.activation in RANKED else 0


def scratch_for(infos: Iterable[CoderInfo], width: int, device: torch.device) -> Tensor:
    """The kernels' scratch memory, zeros; empty on a CPU, where the reference needs none."""
    if device.type == "cpu":
        return torch.zeros(0, dtype=torch.float32)
    dense = max(map(dense_size, infos), default=0)
    fitting = _DENSE_BYTES // (4 * layout.dense_room(max(1, dense))) // layout.TILE * layout.TILE
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
