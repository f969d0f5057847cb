"""What admission costs, measured for real on a tiny shape: every part has a time, and first is not again."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from bench.asks import FEATURES, Shape
from bench.front import CASES, PARTS, SUMS, Front, table
from saesteer.language.spec import from_json
from saesteer.plugin.door import admission
from saesteer.plugin.worker.steering import Steering

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    found = Front("tiny", tmp_path_factory.mktemp("front"))
    for case in CASES:
        found.run(case, 3, 5)
    return found


def test_every_part_of_every_case_is_timed(front: Front) -> None:
    rows = front.rows()
    assert [(row["case"], row["asked"], row["requests"]) for row in rows] == [
        (case, asked, count) for case in CASES for asked, count in (("first", 3), ("again", 5))
    ]
    for row in rows:
        timed = [part for part in (*PARTS, *SUMS) if part != "plan" or row["asked"] == "first"]
        assert all(0 < row[part]["p20"] <= row[part]["us"] <= row[part]["p80"] for part in timed)
        assert ("plan" in row) == (row["asked"] == "first"), "a known spec is not planned"
    shown = table(rows)
    assert all(word in shown for word in (*CASES, "first", "again", "(plan)", *SUMS))
    assert [line[18:].split()[:2] for line in shown.splitlines()[1:]] == [["first", "3"], ["again", "5"]] * len(CASES)


def test_sums_are_of_each_request(front: Front) -> None:
    times = front.times
    times["made up", "again", "parse"] = [1.0, 10.0, 100.0]
    for part, each in (("copy", [0.5] * 3), ("admit", [200.0, 20.0, 2.0]), ("row", [3.0] * 3), ("fill", [4.0] * 3)):
        times["made up", "again", part] = each
    row = front.rows()[-1]
    for part in ("parse", "copy", "admit", "row", "fill"):
        del times["made up", "again", part]
    assert row["front end"]["us"] == 102.5, "medians of sums, not sums of medians"
    assert (row["worker"]["us"], row["both"]["us"]) == (7.0, 109.5)


def test_specs_of_other_numbers_are_other_specs_of_one_size(front: Front) -> None:
    shape = Shape.of("tiny")
    for case, spec in CASES.items():
        found = [from_json(spec(shape, number)) for number in range(200)]
        assert len(set(found)) == 200, case
        assert len({len(one.edits) for one in found}) == 1
    assert FEATURES >= 32 * 200, "or features would come again"


def test_what_is_asked_first_was_never_known(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Mock(wraps=front.engine.make_row)
    monkeypatch.setattr(front.engine, "make_row", rows)
    monkeypatch.setattr(front, "door", admission.Door("fingerprint", front.config))
    monkeypatch.setattr(front, "steering", Steering(front.engine))
    front.run("32 clamps", 4, 6)
    assert rows.call_count == 4


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
