"""Where there is no GPU the kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Chosen for this import alone: engines that other tests start must not inherit it.
    early = "triton" in sys.modules
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401  (Triton imports it at the first launch, and it asks again)

    import saesteer.kernels.edit.launch
    import saesteer.kernels.step.border
    import saesteer.kernels.step.map
    import saesteer.kernels.step.publish  # noqa: F401

    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before
    if early and before != "1":
        pytest.exit("triton was imported before tests/kernels/conftest.py: set TRITON_INTERPRET=1", returncode=2)


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU for the interpreter and the reference."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[None, "TOKEN", "TILED"], ids=["reference", "span1", "tiled"])
def run(request: pytest.FixtureRequest) -> Any:
    """One call of the op by each way: see ``exact.edit``."""
    from tests.kernels import exact, harness  # they import Triton

    return partial(exact.edit, request.param and getattr(harness, request.param))
