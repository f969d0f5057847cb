"""The notebooks run from top to bottom, use public names only, and show what they say they show."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.notebooks import NOTEBOOKS, executed


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in cells(notebook) for output in cell.outputs)


def golden_gate(text: str) -> None:
    assert re.search(r"^feature +3497", text, re.MULTILINE), "the bridge is found"
    assert text.lower().count("bridge") > 5
    assert re.search(r"^bridge +.*bridge", text, re.MULTILINE | re.IGNORECASE), "the steered request speaks of it"


def transcoder(text: str) -> None:
    rest = {name: float(value) for name, value in re.findall(r"^unexplained +by (.+?) +(\d\.\d+)$", text, re.MULTILINE)}
    assert rest["neither"] == 1 and rest["both"] < 0.35, "the transcoder explains the MLP"
    assert rest["both"] < min(rest["the skip path"], rest["the features"]), "neither part alone does"
    [other] = re.findall(r"anything else: (\S+)$", text, re.MULTILINE)
    assert float(other) < 1e-3, "the clamp writes one vector, and nothing else moves"
    answers = dict(re.findall(r"^(plain|clamped) +(.+)$", text, re.MULTILINE))
    assert answers["plain"] != answers["clamped"]


STORIES: dict[str, Callable[[str], None]] = {"golden_gate": golden_gate, "transcoder": transcoder}


def tells_its_story(path: Path, notebook: Any) -> None:
    STORIES[path.stem](said(notebook))
    drawn = [output for cell in cells(notebook) for output in cell.outputs if "image/png" in output.get("data", {})]
    assert drawn, "the plot is drawn"


def shape(notebook: Any) -> list[list[str]]:
    """What does not depend on the machine: the kinds of outputs of each cell, and how their lines begin."""
    heads = re.compile(
        r"^(?:feature +\d+|\d\.\d × max|plain|bridge|ocean|clamped|unexplained|writes|moved)\b", re.MULTILINE
    )
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_one_tells_its_story(path: Path) -> None:
    tells_its_story(path, nbformat.read(path, 4))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_tells_its_story(path: Path, tmp_path: Path) -> None:
    notebook = executed(path, tmp_path)
    tells_its_story(path, notebook)
    assert shape(notebook) == shape(nbformat.read(path, 4))
