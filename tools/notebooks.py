"""Runs the notebooks and stores them with what they print and draw, so that they show on GitHub. Knows no notebook.

What a run writes to stderr is left out: progress bars, and warnings with paths of one machine.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run in this folder; the text that a cell prints is one output."""
    notebook: Any = nbformat.read(path, 4)
    about = notebook.metadata.copy()
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, resources=resources).execute()
    notebook.metadata = about
    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
            drawn = [one for one in cell.outputs if one.output_type != "stream"]
            cell.outputs = [nbformat.v4.new_output("stream", text=printed)] * bool(printed) + drawn
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as scratch:
            nbformat.write(executed(path, Path(scratch)), path)
        print(path.name)
