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


def pages(notebook: Any) -> list[str]:
    outputs = (output for cell in cells(notebook) for output in cell.outputs)
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


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


def find_and_prove(text: str) -> None:
    row = r"^feature +(\d+) .+% more than other features, +95 % interval +(-?\d+\.\d+)% to +(-?\d+\.\d+)%$"
    least = {int(feature): (float(low), float(high)) for feature, low, high in re.findall(row, text, re.MULTILINE)}
    assert [*least] == [6511, 7921, 4321, 7014]
    low, high = least.pop(7014)
    assert low <= 0.01 and high < 0.1, "the label alone is no proof"
    assert all(low > 0.1 for low, _ in least.values()), "the others do what they say"
    assert re.search(r"^6511 +.*ocean", text, re.MULTILINE), "the clamped answer speaks of it"
    assert not re.search(r"^plain +.*ocean", text, re.MULTILINE)


def reading(text: str) -> None:
    counts = re.findall(r"^ *(\d+) tokens .* (\d+) read$", text, re.MULTILINE)
    assert len(counts) > 4 and all(0 <= int(tokens) - int(read) <= 1 for tokens, read in counts), "read as it streams"
    cooking, planets = map(float, re.findall(r"^cooking +(-?\d+\.\d+) on average", text, re.MULTILINE))
    assert cooking > 0.3 > -0.3 > planets
    chances = re.findall(r"server (\d\.\d+) +here (\d\.\d+)$", text, re.MULTILINE)
    assert len(chances) == 3 and all(abs(float(a) - float(b)) < 1e-3 for a, b in chances)


def team(text: str) -> None:
    codes = re.findall(r"^refused +.+: (\d{3}) ?(\w*)$", text, re.MULTILINE)
    assert codes == [
        ("401", ""),
        ("401", "wrong_key"),
        ("400", "unknown_name"),
        ("400", "too_many"),
        ("413", "too_large"),
    ]
    assert "did you mean 'seaside'" in text and "--max-edits" in text and "--max-read-mib" in text, "what to do is said"
    assert re.search(r"^seaside +.*(?:ocean|sea)", text, re.MULTILINE)
    assert re.search(r"bridge\?   flags: \[\d+\]", text) and re.search(r"blue\?   flags: \[\]", text)
    rounds = re.findall(r"^round \d +\w+ +(\S+) +(.+)$", text, re.MULTILINE)
    assert [reason.startswith("saesteer.defaults") for reason, _ in rounds] == [False] * 3 + [True] * 3, "replaced"
    assert len(rounds[0][1]) > len(rounds[5][1])


STORIES: dict[str, Callable[[str], None]] = {
    "find_and_prove": find_and_prove,
    "golden_gate": golden_gate,
    "reading": reading,
    "team": team,
    "transcoder": transcoder,
}


def tells_its_story(path: Path, notebook: Any) -> None:
    STORIES[path.stem](said(notebook))
    drawn = [output for cell in cells(notebook) for output in cell.outputs if "image/png" in output.get("data", {})]
    assert drawn, "the plot is drawn"


def shape(notebook: Any) -> list[list[str]]:
    """What does not depend on the machine: the kinds of outputs of each cell, and how their lines begin."""
    heads = re.compile(
        r"^(?:feature +\d+|\d\.\d × max|plain|bridge|ocean|clamped|unexplained|writes|moved|score|cooking|dose|applied"
        r"|refused|watched|round \d|replaced|module|seaside|stopped)\b",
        re.MULTILINE,
    )
    return [
        [found for output in cell.outputs for found in (output.output_type, *heads.findall(output.get("text", "")))]
        for cell in cells(notebook)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_public_names_only(path: Path) -> None:
    code = "\n".join(cell.source for cell in cells(nbformat.read(path, 4)))
    assert not re.findall(r"saesteer\S*\._\w+|\b(?:model|llm|client|ada|admin)\._\w+", code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_with_the_outputs_of_one_run(path: Path) -> None:
    found = cells(nbformat.read(path, 4))
    assert [cell.execution_count for cell in found] == list(range(1, len(found) + 1))
    assert not [output for cell in found for output in cell.outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_small(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    plots = [output.get("data", {}).get("image/png", "") for cell in cells(notebook) for output in cell.outputs]
    assert path.stat().st_size < 400_000 and max(map(len, plots)) * 3 / 4 < 100_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_model_writes_is_no_markup(path: Path) -> None:
    found = pages(nbformat.read(path, 4))
    assert bool(found) == (path.stem == "reading")
    assert {tag for page in found for tag in re.findall(r"<(/?\w*)", page)} <= {"p", "/p", "span", "/span"}
    assert not found or any("&lt;" in page for page in found), "the model has written some"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_one_tells_its_story(path: Path) -> None:
    tells_its_story(path, nbformat.read(path, 4))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_tells_its_story(path: Path, tmp_path: Path) -> None:
    notebook = executed(path, tmp_path)
    tells_its_story(path, notebook)
    assert shape(notebook) == shape(nbformat.read(path, 4))
