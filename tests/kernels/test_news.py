"""What a batch brings, packed: refusals at the door; what is done with it is tested with the map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from saesteer.kernels.step.updates import pack

WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], int, str]] = {
    "another dtype": (lambda w: w.double(), 0, "weights"),
    "strided": (lambda w: w.t().contiguous().t(), 0, "weights"),
    "a row": (lambda w: w[0], 0, "weights"),
    "narrow": (lambda w: w[:, :-1].contiguous(), 0, "slot 0"),
    "behind the last": (lambda w: w, 3, "slot 3"),
    "in front of the first": (lambda w: w, -1, "slot -1"),
}


@pytest.mark.parametrize(("change", "slot", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(change: Any, slot: int, said: str, device: torch.device) -> None:
    weights, table = torch.zeros(3, 4, device=device), torch.zeros(2, 16, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"^{said}"):
        pack(table, torch.float32, {}, [(weights, change(weights), slot)], [np.zeros(4, dtype=np.float32)])
