"""Results on disk with small limits, and as much of a choice as ends with them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from saesteer.plugin.results import report
from saesteer.plugin.results.kept import LEAST, Results
from saesteer.plugin.results.spools import Layout, Spool
from tests.plugin.blobs import blob

ABOUT = {"site": "resid_post.3", "at": "before", "layers": [3]}
CONTENT = {"positions": [[4, 6]], "dtype": "float32", "shape": [1, 6]}
DATA = np.arange(6, dtype="<f4").tobytes()


def results(folder: Path, number: int = 4, size: int = 0, seconds: int = 60) -> Results:
    """Results in a folder that is made here: of these bytes, or so many small ones."""
    folder.mkdir(exist_ok=True)
    return Results(size or number * LEAST, seconds, folder)


def files(found: Results) -> list[str]:
    """The names of the files in their folder."""
    return sorted(path.name for path in found.folder.iterdir() if path.name != "lock")


def layout(sites: int = 1, rows: int = 12, width: int = 12) -> Layout:
    """Of rows of so many sites, a row of each site with so many bytes."""
    return Layout(
        [{"name": "activation"}, *({"name": f"activation {at}"} for at in range(1, sites))], rows, sites * width
    )


def kept(found: Results) -> str:
    """The handle of one that holds DATA."""
    return write(room(found, len(DATA)), DATA)


def room(found: Results, size: int, number: int = 1) -> Spool:
    """Room for so many results of so many bytes."""
    [made] = found.promise([Layout([ABOUT] * number, 1, number * size)])
    return made


def write(made: Spool, data: bytes) -> str:
    """Write a result; its handle."""
    made.write([(0, 1)], data)
    [handle] = made.keep(CONTENT, [0])
    return handle


def fill_the_disk(room: Spool) -> None:
    """Let the next write of a file find no space."""
    room._path.unlink()
    room._path.symlink_to("/dev/full")


class State(SimpleNamespace):
    """As much of vLLM's state of one choice as ends it."""

    def ends(self, reason: Any) -> Any:
        made = report._telling(lambda *_: SimpleNamespace())(self, [], reason)
        return getattr(made, "saesteer", None)


def state(answer: report.Report) -> State:
    """A choice that has read two positions."""
    text = SimpleNamespace(num_output_tokens=lambda: 1)
    made = State(saesteer=answer, prompt_len=2, num_cached_tokens=0, detokenizer=text)
    assert answer.read is not None
    answer.read.add([blob(0, answer.readouts[0].readout, [(0, 2)])])
    return made
