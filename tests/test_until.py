"""Tests that a run does not reach are named, and fail it if they are nine in ten."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("left", "before", "after"),
    [
        (0, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (179, pytest.ExitCode.OK, pytest.ExitCode.OK),
        (180, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        (200, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        (180, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERRUPTED),
    ],
)
def test_fewer_than_nine_in_ten_may_be_left(
    monkeypatch: pytest.MonkeyPatch, left: int, before: pytest.ExitCode, after: pytest.ExitCode
) -> None:
    monkeypatch.setattr(conftest, "_left", ["one"] * left)
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
    assert "2 of 2 tests were not reached in time; that is a failure" in run.stdout
    assert "test_it.py::test_two not reached before" in run.stdout
