"""What admission costs, measured for real on a tiny shape: every part has a time, and first is not again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from bench.front import CASES, Front

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    found = Front("tiny", tmp_path_factory.mktemp("front"))
    for case in CASES:
        found.run(case, 3, 5)
    return found


@pytest.mark.slow
def test_it_prints_a_table_and_writes_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.front", "--model", "tiny", "--first", "2", "--again", "3"]
    command += ["--out", str(tmp_path), "--commit", "abc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "front.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == rows
    assert len(rows) == 2 * len(CASES) and all(row["commit"] == "abc" and row["cpu"] for row in rows)
    assert all(case in done.stdout for case in CASES)
