"""What the gate calls slower; no kernel runs here."""

from pathlib import Path
from typing import Any

import pytest

from bench import base


def runs(*times: float, case: str = "16 x 1") -> list[list[dict[str, Any]]]:
    """Runs of one line."""
    about = {"op": "edit", "case": case, "width": 2304, "form": "normed", "cache": "cold"}
    return [[{**about, "us": us}] for us in times]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ((4.0, 4.02, 4.01), (4.2, 4.21, 4.15), "slower"),
        ((4.2, 4.21, 4.15), (4.0, 4.02, 4.01), "faster"),
        ((4.0, 4.02, 4.01), (4.03, 4.04, 4.05), ""),  # always, but within noise
        ((4.0, 4.3, 4.01), (4.2, 4.21, 4.4), ""),  # the runs of one tree are as far apart
    ],
)
def test_slower_is_what_every_run_shows(before: tuple[float, ...], after: tuple[float, ...], word: str) -> None:
    [found] = base.changes(runs(*before), runs(*after))
    assert (found.slower, found.faster) == (word == "slower", word == "faster")
    said = base.report([found])
    assert ("SLOWER" in said) == (word == "slower")
    assert said.endswith(
        f"of 1 lines {int(word == 'slower')} are slower and {int(word == 'faster')} faster, the others as before"
    )


def test_a_line_that_one_tree_lacks_is_left_out() -> None:
    assert base.changes(runs(1.0), runs(2.0, case="new")) == []


def test_a_line_that_this_tree_does_not_time_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel whose answer is wrong is not timed, so it cannot be slower; here in one of two runs."""
    kept = runs(4.0, case="16 x 32")[0]
    answers = iter([[*runs(4.0)[0], *kept], [*runs(4.0)[0], *kept], [*runs(4.0)[0], *kept], kept])
    monkeypatch.setattr(base, "run", lambda *_: next(answers))
    monkeypatch.setattr(base, "tree_of", lambda *_: tmp_path)
    assert base.compare("main", [], rounds=2) == 1
    said = capsys.readouterr().out
    assert "LOST    wrong or gone in a run of this tree: edit 16 x 1 2304 normed cold\n" in said
    assert "16 x 32" not in said and "of 2 lines 0 are slower" in said
