"""The weights that the op reads at one site: dictionaries, then vectors, row by row. Knows nothing of requests."""

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


def load_site(
    name: str,
    infos: Mapping[str, CoderInfo],
    paths: Mapping[str, str],
    common: Mapping[str, Tensor],
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    pool: int,
) -> tuple[Site, dict[str, Placement]]:
    """A site with its weights, filled with its dictionaries, and where each of them lies.

    Args:
        name: the name of the site.
        infos: the infos of the dictionaries that read and write here, by name.
        paths: the paths to their weights.
        common: the fields of Bound that are not weights.
        width: the width of the stream.
        dtype: the dtype in which the weights are held.
        device: the device that holds the weights.
        pool: the number of slots for vectors, after the dictionaries' slots.

    Raises:
        LoadError: a weight file does not hold what it should.
    """
    slots = sum(info.features for info in infos.values()) + pool
    w_enc = torch.zeros(slots, width, dtype=dtype, device=device)
    w_dec = torch.zeros(slots, width, dtype=dtype, device=device)
    b_enc = torch.zeros(slots, dtype=torch.float32, device=device)
    threshold = torch.zeros(slots, dtype=torch.float32, device=device)
    b_dec = torch.zeros(max(1, len(infos)), width, dtype=torch.float32, device=device)
    placements: dict[str, Placement] = {}
    base = 0
    for at, (key, info) in enumerate(infos.items()):
        centred = info.in_norm == "layer_norm"
        coder = load(paths[key], dtype=torch.float32 if centred else dtype, site=info.site_in)
        end = base + coder.info.features
        _copy(w_enc[base:end], coder.w_enc, centred=centred)
        _copy(w_dec[base:end], coder.w_dec)
        b_enc[base:end].copy_(coder.b_enc)
        threshold[base:end].copy_(_threshold(coder))
        b_dec[at].copy_(coder.b_dec)
        placements[key] = _placement(base, at, info, coder)
        base = end
    site = Site(
        **common,
        w_enc=w_enc,
        w_dec=w_dec,
        b_enc=b_enc,
        threshold=threshold,
        b_dec=b_dec,
        dense_size=_dense_size(infos.values()),
        has_norms=any(info.in_norm != "none" for info in infos.values()),
        name=name,
        pool=base,
    )
    return site, placements


def _dense_size(infos: Iterable[CoderInfo]) -> int:
    """The number of features in the largest dictionary that an edit may need whole; 0 if there is none."""
    return max((info.features for info in infos if info.can_reconstruct or info.activation in RANKED), default=0)


def scratch_for(infos: Iterable[CoderInfo], width: int, device: torch.device) -> Tensor:
    """The kernels' scratch memory, zeros; empty on a CPU, where the reference needs none."""
    if device.type == "cpu":
        return torch.zeros(0, dtype=torch.float32)
    dense = _dense_size(infos)
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


def _placement(base: int, number: int, info: CoderInfo, coder: SparseCoder) -> Placement:
    def array(tensor: Tensor) -> NDArray[np.float32]:
        return np.ascontiguousarray(tensor.float().cpu().numpy())

    max_act = None if coder.max_act is None else array(coder.max_act)
    return Placement(base, number, info, array(coder.b_enc), array(_threshold(coder)), max_act)
