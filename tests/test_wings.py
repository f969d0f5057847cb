"""Without each wing, every module of the core can be imported, and tests of the core pass."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tools.house import ROOT, WINGS, files, wing_of

# They serve vLLM's app, with and without steering, and read the command's flags.
CHECKED = ("test_memory_guard.py", "test_options.py", "test_routes.py")
# Imports vLLM once, for the check of every wing.
PROGRAM = """
import importlib, os, sys
import pytest, vllm.entrypoints.openai.api_server
for place, *modules in map(str.split, sys.stdin):
    if not os.fork():
        sys.path.insert(0, place)
        for module in modules:
            assert (importlib.import_module(module).__file__ or place).startswith(place)
        os._exit(pytest.main(sys.argv[1:]))
    assert os.wait()[1] == 0, place
"""


def copied(target: Path, wings: Iterable[str]) -> list[str]:
    """Copy the house without wings, as links to its files; the modules that are left."""
    shutil.copytree(ROOT / "saesteer", target / "saesteer", copy_function=os.symlink)
    gone = [target / place for wing in wings for place in WINGS[wing]]
    for place in gone:
        assert place.exists(), place
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return [name for name in files() if wing_of(name) is None]


def test_the_core_stands_without_each_wing(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    lines = []
    for wing in WINGS:
        place = tmp_path / wing
        lines.append(" ".join([str(place), *copied(place, [wing])]))
    tests = [str(ROOT / "tests/plugin" / name) for name in CHECKED]
    command = [
        sys.executable,
        "-P",
        "-c",
        PROGRAM,
        "-q",
        "-x",
        "--assert=plain",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input="\n".join(lines), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
