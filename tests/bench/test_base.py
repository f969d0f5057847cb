"""What the gate calls slower; no kernel runs here."""

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
