"""The notebooks run from top to bottom, use public names only, and show what they say they show."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.notebooks import NOTEBOOKS, executed

[GOLDEN_GATE] = (path for path in NOTEBOOKS if path.stem == "golden_gate")


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tells_its_story(notebook: Any) -> None:
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    said = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"^feature +3497", said, re.MULTILINE), "the bridge is found"
    assert said.lower().count("bridge") > 5
    assert re.search(r"^bridge +.*bridge", said, re.MULTILINE | re.IGNORECASE), "the steered request speaks of it"
    assert any("image/png" in output.get("data", {}) for output in outputs), "the plot is drawn"


def shape(notebook: Any) -> list[list[str]]:
    """What does not depend on the machine: the kinds of outputs of each cell, and how their lines begin."""
    heads = re.compile(r"^(?:feature +\d+|\d\.\d × max|plain|bridge|ocean)\b", re.MULTILINE)
    return [
        [found for output in cell.outputs for found in (output.output_type, *heads.findall(output.get("text", "")))]
        for cell in cells(notebook)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_public_names_only(path: Path) -> None:
    code = "\n".join(cell.source for cell in cells(nbformat.read(path, 4)))
    assert not re.findall(r"saesteer\S*\._\w+|\b(?:model|llm)\._\w+", code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_the_outputs_of_one_run(path: Path) -> None:
    found = cells(nbformat.read(path, 4))
    assert [cell.execution_count for cell in found] == list(range(1, len(found) + 1))
    assert not [output for cell in found for output in cell.outputs if output.get("name") == "stderr"]


def test_the_stored_golden_gate_tells_its_story() -> None:
    tells_its_story(nbformat.read(GOLDEN_GATE, 4))


@pytest.mark.slow
def test_golden_gate_tells_its_story(tmp_path: Path) -> None:
    notebook = executed(GOLDEN_GATE, tmp_path)
    tells_its_story(notebook)
    assert shape(notebook) == shape(nbformat.read(GOLDEN_GATE, 4))
