"""What `make test-gpu` runs first, and what it notes: on files of its own, without a GPU."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_tests

ROOT = Path(__file__).parents[1]
MIXED = """
import pytest
def test_one(): pass
@pytest.mark.parametrize("word", ["a b", "c"])
def test_two(word): assert word == "c"
@pytest.mark.skip(reason="not here")
def test_three(): pass
@pytest.fixture
def broken(): raise OSError
def test_four(broken): pass
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files know the options of tests/conftest.py."""
    words = ["-p", "tests.conftest", "--rootdir", str(tmp_path)]
    monkeypatch.setattr(gpu_tests, "PYTEST", [*gpu_tests.PYTEST, *words])
    return tmp_path


def row(file: str, at: int, *, whole: bool = True) -> dict[str, Any]:
    return {"file": file, "at": at, "whole": whole}


def test_a_file_is_run_and_what_it_said_is_noted(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "test_mixed.py").write_text(MIXED)
    monkeypatch.setattr(gpu_tests, "ENDING", 0.0)
    found, told = gpu_tests.run(str(elsewhere / "test_mixed.py"), 120)
    wrong = [name.rpartition("::")[2] for name in found["wrong"]]
    assert (found["passed"], wrong, found["left"], found["whole"]) == (2, ["test_four", "test_two[a b]"], 0, True)
    assert any("assert 'a b' == 'c'" in line for line in told)


def test_rows_are_added_to_those_stored(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call begins with what this one did not reach."""
    files = [str(elsewhere / name) for name in ("test_one.py", "test_two.py")]
    for name in files:
        Path(name).write_text("def test_it(): pass\n")
    monkeypatch.setattr(gpu_tests, "candidates", lambda *_: files)
    monkeypatch.setattr(gpu_tests, "AT_LEAST", 0.0)
    (elsewhere / gpu_tests.STORED).write_text(json.dumps(row(files[0], 5)) + "\n")

    def asked(minutes: str) -> list[tuple[str, int, bool]]:
        monkeypatch.setattr(sys, "argv", ["", "--minutes", minutes, "--out", str(elsewhere), "--commit", "abc"])
        assert gpu_tests.main() == 0
        _, *new = map(json.loads, (elsewhere / gpu_tests.STORED).read_text().splitlines())
        assert {one["commit"] for one in new} <= {"abc"}
        return [(one["file"], one["passed"], one["whole"]) for one in new]

    assert asked("0") == []
    assert asked("10") == [(files[1], 1, True), (files[0], 1, True)]


def test_parts_are_run_side_by_side_each_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that needs both cards sees them, and none of the others does."""
    began: list[tuple[str, str, str | None]] = []
    told: list[dict[str, Any]] = []
    both = threading.Barrier(2, timeout=20)

    def run(
        name: str, _: float, *more: str, marks: str, environment: dict[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        assert marks == gpu_tests.WITH_LONG
        both.wait()
        began.append((name, more[-1] if more else "", environment.get("CUDA_VISIBLE_DEVICES")))
        wrong = ["it"] if more[-1:] == ("2/4",) else []
        return {"file": name, "at": 5, "passed": 2, "wrong": wrong, "left": 0, "whole": True, "seconds": 3.0}, wrong

    monkeypatch.setattr(gpu_tests, "run", run)
    names = ["tests/kernels/test_a.py", "tests/plugin/test_wide.py", "tests/plugin/test_b.py"]
    end = time.monotonic() + 1000
    gpu_tests.Machine(names, 2, gpu_tests.WITH_LONG, end, lambda row, _: told.append(row), ["6", "7"], names[1:2]).run()
    assert {card for name, _, card in began if name == names[1]} == {None}
    assert {card for name, _, card in began if name != names[1]} == {"6", "7"}
    assert sorted(part for name, part, _ in began if name == names[0]) == ["1/4", "2/4", "3/4", "4/4"]
    found = {row["file"]: (row["passed"], row["wrong"], row["whole"]) for row in told}
    assert found == {names[0]: (8, ["it"], True), names[1]: (2, [], True), names[2]: (2, [], True)}
