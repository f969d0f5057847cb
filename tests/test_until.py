"""Tests that a run does not reach are named, and fail it if they are nine in ten of those that have to run."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("left", "spared", "before", "after"),
    [
        (0, 0, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (179, 0, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (180, 0, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        (190, 100, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        (189, 100, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (200, 200, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (200, 0, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        (180, 0, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERRUPTED),
    ],
)
def test_fewer_than_nine_in_ten_may_be_left(
    monkeypatch: pytest.MonkeyPatch, left: int, spared: int, before: pytest.ExitCode, after: pytest.ExitCode
) -> None:
    monkeypatch.setattr(conftest, "_left", [str(n) for n in range(left)])
    monkeypatch.setattr(conftest, "_spared", {str(n) for n in range(spared)})
    session = SimpleNamespace(testscollected=200, exitstatus=before)
    conftest.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == after


def test_a_run_whose_time_is_up_fails_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_one(): pass\ndef test_two(): pass\n")
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "--rootdir", str(tmp_path), str(file)]
    command = [sys.executable, "-m", "pytest", *words, "--until", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run
    assert (
        "2 of the 2 tests that have to run were not reached in time, and 0 of 0 others; that is a failure" in run.stdout
    )
    assert "test_it.py::test_two not reached before" in run.stdout
