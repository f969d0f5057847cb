"""Set-up where vLLM has no wheels, and in a checkout without links: one sentence, before anything is made."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup

LOST = "saesteer/loaders is a link, which this checkout lacks; "


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows")])
def test_other_systems_get_one_sentence(
    system: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(SystemExit, match=rf"^saesteer set-up: vLLM.* this is {name}\. Use Linux.*#macos-and-windows"):
        setup.main(str(tmp_path / "venv"))  # type: ignore[no-untyped-call]  # any Python 3 reads that file
    assert not any(tmp_path.iterdir())


def test_a_checkout_without_links_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A link is then a file with the name of what it leads to; pip runs setup.py, and make tools/setup.py."""
    (tmp_path / "saesteer").mkdir()
    (tmp_path / "saesteer/loaders").write_text("../loaders")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(SystemExit, match=f"^saesteer set-up: {LOST}.*git"):
        setup.main("venv")  # type: ignore[no-untyped-call]
    shutil.copy(Path(setup.__file__).parents[1] / "setup.py", tmp_path)
    done = subprocess.run([sys.executable, "setup.py", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"saesteer: {LOST}")
