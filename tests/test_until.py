"""Tests that a run does not reach are named, and fail it if they are nine in ten of those that have to run."""

import re
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


def test_files_whose_tests_share_engines_run_apart(tmp_path: Path) -> None:
    shared = (
        "import pytest\n@pytest.fixture\ndef make_engine(): pass\n@pytest.mark.slow\ndef test_it(make_engine): pass\n"
    )
    (tmp_path / "test_shared.py").write_text(f"{shared}def test_quick(): pass\n")
    (tmp_path / "test_own.py").write_text("def test_it(): pass\n")
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--co", "-q", str(tmp_path)]
    for which, expected in (("yes", "test_shared.py: 2"), ("no", "test_own.py: 1")):
        command = [sys.executable, "-m", "pytest", *words, "-q", "--shared", which]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert re.findall(r"test_\w+\.py: \d", run.stdout) == [expected], run
