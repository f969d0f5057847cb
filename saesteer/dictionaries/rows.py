"""FeatureRow: what an edit of one feature needs of its dictionary, as numbers for a request. Knows no file."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.dictionaries.coder import SparseCoder
from saesteer.dictionaries.vectors import numbers_of


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRow:
    """One feature, f · rows[1], where f = p = in_norm(x) · rows[0] + bias if that is above the threshold, else 0.

    A feature of a cross-layer transcoder has one for each layer that it writes, all with the same encoder row.
    """

    data: bytes  # [2, d], little-endian: its encoder row and its decoder row
    dtype: str  # of the numbers: that of the server's weights
    bias: float
    threshold: float
    max_act: float | None  # None: not known
    digest: str = field(init=False)  # hex sha256 of all of this

    def __post_init__(self) -> None:
        of = hashlib.sha256(repr((self.dtype, self.bias, self.threshold, self.max_act)).encode())
        of.update(self.data)
        object.__setattr__(self, "digest", of.hexdigest())

    @property
    def rows(self) -> NDArray[np.float32]:
        """The two rows [2, d] as float32."""
        return numbers_of(self.dtype, self.data).reshape(2, -1)


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
