"""FeatureRow: what an edit of one feature needs of its dictionary, as numbers for a request. Knows no file."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import SparseCoder


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRow:
    """One feature, f · rows[1], where f = p = in_norm(x) · rows[0] + bias if that is above the threshold, else 0."""

    rows: NDArray[np.float32]  # [2, d], with the precision of the server's weights
    bias: float
    threshold: float
    max_act: float | None  # None: not known
    digest: str = field(init=False)  # hex sha256 of all of this

    def __post_init__(self) -> None:
        assert len(self.rows) == 2, self.rows.shape
        of = hashlib.sha256(repr((self.bias, self.threshold, self.max_act)).encode())
        of.update(self.rows.data)
        object.__setattr__(self, "digest", of.hexdigest())


def feature_row(coder: SparseCoder) -> FeatureRow:
    """The feature of a dictionary of one feature, which reads as many numbers as it writes.

    As in the weights of a server, the encoder's row is centred where the input norm is a layer norm.
    """
    encoder = coder.w_enc.float()
    if coder.info.in_norm == "layer_norm":
        encoder = encoder - encoder.mean(1, keepdim=True)
    return FeatureRow(
        np.concatenate([encoder.numpy(), coder.w_dec.float().numpy()]),
        coder.b_enc.item(),
        0.0 if coder.threshold is None else coder.threshold.item(),
        None if coder.max_act is None else coder.max_act.item(),
    )
