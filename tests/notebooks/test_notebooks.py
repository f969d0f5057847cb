"""The notebooks run from top to bottom, use public names only, and show what they say they show."""

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(path: Path) -> str:
    import nbformat

    return "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_public_names_only(path: Path) -> None:
    assert not re.findall(r"saesteer\S*\._\w+|\b(?:model|llm)\._\w+", code(path))


@pytest.mark.slow
def test_golden_gate_tells_its_story(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(FOLDER / "golden_gate.ipynb", 4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"^feature +3497", said, re.MULTILINE), "the bridge is found"
    assert said.lower().count("bridge") > 5
    assert re.search(r"^bridge +.*bridge", said, re.MULTILINE | re.IGNORECASE), "the steered request speaks of it"
    assert any("image/png" in output.get("data", {}) for output in outputs), "the plot is drawn"
