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


def test_without_rows_the_command_is_said(write: Any, tmp_path: Path) -> None:
    shown = measured.block(table, measured.rivals(), "make bench-rivals", "none.svg")
    assert shown == "No run is stored yet; `make bench-rivals` makes one.\n"
    write("modes.jsonl", USUAL | {"commit": "abc"})
    (tmp_path / "some.svg").touch()
    assert measured.block(table, measured.modes(), "", "some.svg").endswith("|\n\n![some](../bench/results/some.svg)\n")
