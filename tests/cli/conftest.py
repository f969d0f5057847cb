"""What several commands are given."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of a hundred equal lines."""
    (tmp_path / "text").write_text("The old bridge is long.\n" * 100)
    return tmp_path / "text"
