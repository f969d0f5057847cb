"""A label by rule: what it says, and that it says nothing where nothing is known."""

import pytest

from saesteer.labels.rule import label


@pytest.mark.parametrize(
    ("peaks", "promotes", "expected"),
    [
        (["bay", "bridge", "bridge"], [" Bridge", "Bridge", " span", "s", "t"], "bridge, bay"),
        (["a", "b", "c", "d"], [], "a, b, c"),
        ([], [" x", "x", "y", "z", "t"], "→ x, y, z"),
        ([], [], None),
        (["", ""], ["\n", " "], None),
        (["", "a"], [" x"], "a"),
    ],
)
def test_label(peaks: list[str], promotes: list[str], expected: str | None) -> None:
    assert label(peaks, promotes) == expected
