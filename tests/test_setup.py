"""Set-up on a system that vLLM has no wheels for: one sentence, before anything is made."""

import platform
from pathlib import Path

import pytest

from tools import setup


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows")])
def test_other_systems_get_one_sentence(
    system: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(SystemExit, match=rf"^saesteer set-up: vLLM.* this is {name}\. Use Linux.*#macos-and-windows"):
        setup.main(str(tmp_path / "venv"))  # type: ignore[no-untyped-call]  # any Python 3 reads that file
    assert not any(tmp_path.iterdir())
