"""What is read of rows of a site's tensor without a dictionary: probes' scores and reductions. Knows no request."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "max", "last"]


def read_probes(x: Tensor, directions: Tensor, bias: Tensor) -> Tensor:
    """x · v + bias for each row and probe, in fp32.

    Args:
        x: [n, d], any float dtype.
        directions: [m, d] fp32.
        bias: [m] fp32.

    Returns:
        [n, m] fp32.
    """
    return torch.addmm(bias, x.float(), directions.T)


def reduce_rows(x: Tensor, how: Reduction) -> Tensor:
    """What one part of the rows adds to their reduction, [d] fp32.

    Of ``mean`` it is the sum: whoever has all parts adds their sums and divides. Of ``max`` it is the largest of each
    column, and of ``last`` the last row.

    Args:
        x: [n, d], any float dtype, at least one row.
        how: the reduction.
    """
    if how == "mean":
        return x.sum(0, dtype=torch.float32)
    return (x.amax(0) if how == "max" else x[-1]).float()
