"""compute-sanitizer over the kernels' own tests: no access out of bounds, no race in shared memory. On a GPU alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
HERE = Path(__file__).parent
# Of each file the tests that launch our kernels and little else.
FILES = {
    "test_edit.py": "width or gate or ranked",
    "test_dose.py": "dose",
    "test_publish.py": "rows",
    "test_map.py": "batch",
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(("file", "chosen"), FILES.items(), ids=FILES)
def test_nothing_is_found(tool: str, file: str, chosen: str) -> None:
    if not torch.cuda.is_available() or not Path(TOOL).exists():
        pytest.skip("needs a CUDA device and compute-sanitizer")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, str(HERE / file)]
    done = subprocess.run([TOOL, "--tool", tool, "--error-exitcode", "9", *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "SUMMARY: 0 " in done.stdout, "it looked at them, and found nothing"
