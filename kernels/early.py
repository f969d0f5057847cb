"""Programmatic dependent launch: a kernel is set up while the one in front of it ends. It knows no kernel."""

from functools import cache
from typing import Any

import torch


@cache
def early(device: int | None) -> dict[str, Any]:
    """For a launch on a CUDA device, or on None for the interpreter: how, and PDL, which says whether to wait."""
    if device is None or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
