"""The tables of what was measured, from made-up rows: the last row of a case counts, with its spread and commit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import measured
from tools.tables import table

DELTAS: dict[str, Any] = {
    metric: {"stock_ms": 4.0, "delta_percent": value, "min_percent": value - 1, "max_percent": value + 1}
    for metric, value in (("ttft", 1.0), ("per_token", 2.0), ("end_to_end", 3.0))
}
USUAL = {**measured.USUAL, "model": "gemma-3-4b", "way": "http", "mode": "idle", "runs": 5, "requests": 64, **DELTAS}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)

    def write(name: str, *rows: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def test_modes_are_the_last_ones_of_the_usual_run(write: Any) -> None:
    long = USUAL | {"tokens": 2048, "commit": "long"}
    eager = USUAL | {"eager": True, "commit": "eager"}
    write("modes.jsonl", USUAL | {"commit": "old"}, USUAL | {"commit": "new"}, long, eager)
    _, [line] = measured.modes()
    assert line == (
        "nothing",
        "4B",
        "5 × 64",
        "+1.0 (+0.0 to +2.0)",
        "+2.0 (+1.0 to +3.0)",
        "+3.0 (+2.0 to +4.0)",
        "new",
    )


def test_lengths_are_those_with_and_without_graphs(write: Any) -> None:
    rows = [USUAL | {"way": "llm", "tokens": tokens, "eager": eager} for eager in (True, False) for tokens in (256, 64)]
    write("modes.jsonl", USUAL | {"commit": "http"}, *(row | {"commit": "abc"} for row in rows))
    _, lines = measured.lengths()
    assert [line[1:4] for line in lines] == [(16, 64, "yes"), (16, 64, "no"), (16, 256, "yes"), (16, 256, "no")]
    assert lines[0][5:] == ("4.00", "+2.0 (+1.0 to +3.0)", "abc")


def test_steps_show_what_is_served_and_what_all_ops_would_take(write: Any) -> None:
    """Sets with as many sites are two, and each mode's newest commit has its line."""
    rows = [
        {"model": model, "mode": mode, "requests": requests, "set": number, "sites": sites, "served": number == 1}
        | {"percent": number / 10, "low": 0.0, "high": 5.0, "commit": commit, "gpu": "none"}
        for model, commit in (("gemma-3-4b", "old"), ("gemma-3-27b", "old"), ("gemma-3-4b", "new"))
        for mode in ("clamp", *(("named",) if commit == "old" else ()))
        for requests in (1, 16)
        for number, sites in enumerate((0, 1, 1, 34, 34))
    ]
    write("steps.jsonl", *rows)
    _, lines = measured.steps()
    shown = ("0.10 (0.00 to 5.00)", "0.40 (0.00 to 5.00)")
    assert lines == [
        ("one clamp, at one layer", "4B", *shown, "new"),
        ("a module of vectors for all layers, by name", "4B", *shown, "old"),
        ("one clamp, at one layer", "27B", *shown, "old"),
        ("a module of vectors for all layers, by name", "27B", *shown, "old"),
    ]


def test_all_engines_that_measured_the_newest_commit_count(write: Any) -> None:
    row = {"model": "gemma-3-4b", "mode": "idle", "requests": 16, "set": 0, "sites": 0, "served": True, "gpu": "none"}
    each = (("a", 1.0), ("b", 2.0), ("a", 3.0))
    write("steps.jsonl", *(row | {"commit": commit, "percent": one, "low": one, "high": one} for commit, one in each))
    _, lines = measured.steps()
    assert lines == [("nothing", "4B", *("2.00 (1.00 to 3.00)",) * 2, "a")]


def test_rivals_say_what_they_pin_and_why_they_were_not_run(write: Any) -> None:
    about = {"model": "gemma-3-4b", "commit": "abc", "asked_for": "one vector", "ask": "vector", "requests": 16}
    ours = about | {"contender": "saesteer", "version": "1.0", "pins_vllm": None, **DELTAS}
    theirs = {"contender": "vllm-lens", "version": "1.3.0", "pins_vllm": "==0.30.0", "not_run": "why", "commit": "abc"}
    kernel = {"contender": "fork", "case": "16 x 1", "width": 2304, "median": 3.14, "saesteer_median": 2.71}
    write("rivals.jsonl", ours, theirs, kernel | {"version": "b6264312d5d2", "commit": "abc"})
    _, lines = measured.rivals()
    assert lines[0][:4] == ("saesteer", "one vector", 16, "+1.0 (+0.0 to +2.0)")
    assert lines[1][:4] == ("vllm-lens 1.3.0, pins vLLM ==0.30.0", "", "", "not run: why")
    assert measured.fork()[1] == [("16 x 1", 2304, "3.1", "2.7", "b6264312d", "abc")]


def test_without_rows_the_command_is_said(write: Any, tmp_path: Path) -> None:
    shown = measured.block(table, measured.rivals(), "make bench-rivals", "none.svg")
    assert shown == "No run is stored yet; `make bench-rivals` makes one.\n"
    write("modes.jsonl", USUAL | {"commit": "abc"})
    (tmp_path / "some.svg").touch()
    assert measured.block(table, measured.modes(), "", "some.svg").endswith("|\n\n![some](../bench/results/some.svg)\n")
