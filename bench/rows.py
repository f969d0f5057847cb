"""What features of dictionaries in files cost a request: 10 clamps from 10 dictionaries, without an engine or a model.

    python -m bench.rows [--folder FOLDER]     files of 16,384 features of 2304, in bf16; 2 GB, removed afterwards

Each figure is the time of one admission on the wall, in ms: open the files, read two rows of each, plan, encode. The
files hold rows as ``[F, d]`` (saesteer's own) or, in the encoder, as ``[d, F]`` (SAELens'). Knows no worker.

    again   the same features were asked for a moment ago; only the files' states are looked at
    first   other features, of files that the system has in memory
    cold    other features, of files that it has just forgotten (POSIX_FADV_DONTNEED)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.timing import machine, spread
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.language.spec import from_json
from saesteer.loaders.write import write_arrays
from saesteer.planning.plan import Catalog
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.rows import Fetching

FEATURES, WIDTH, DICTIONARIES = 16384, 2304, 10
LIMIT_MS = 1.0  # of "again"
ROUNDS = {"again": 200, "first": 200, "cold": 5}


def write(folder: Path, layout: str) -> Path:
    """A dictionary with random weights, whose encoder is stored in this layout."""
    folder.mkdir(parents=True)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32).to(torch.bfloat16)

    arrays = {"W_dec": weights(FEATURES, WIDTH), "b_enc": torch.randn(FEATURES), "b_dec": torch.randn(WIDTH)}
    arrays |= {"threshold": torch.rand(FEATURES), "W_enc": weights(FEATURES, WIDTH)}
    if layout == "[F, d]":
        write_arrays(folder / "saesteer.safetensors", arrays, {"format": "saesteer", "activation": "jumprelu"})
        return folder
    arrays["W_enc"] = arrays["W_enc"].reshape(WIDTH, FEATURES)
    write_arrays(folder / "sae_weights.safetensors", arrays, {})
    cfg = {"architecture": "jumprelu", "d_in": WIDTH, "d_sae": FEATURES, "apply_b_dec_to_input": False}
    (folder / "cfg.json").write_text(json.dumps({**cfg, "normalize_activations": "none", "metadata": {}}))
    return folder


def forget(folders: Sequence[Path]) -> None:
    """Ask the system to drop the files from its memory."""
    for path in (path for folder in folders for path in folder.iterdir()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def recall(folders: Sequence[Path]) -> None:
    """Read the files, so that the system has them in memory."""
    for path in (path for folder in folders for path in folder.iterdir()):
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def spec(features: Sequence[int]) -> Any:
    """Clamps of one feature of each dictionary."""
    one = {"op": "clamp", "value": 30.0}
    return from_json({"edits": [{**one, "dictionary": f"d{n}", "feature": i} for n, i in enumerate(features)]})


def measure(folders: Sequence[Path], what: str) -> list[float]:
    """The times of admissions, in ms."""
    sources = {f"d{n}": f"rows:{folder}@resid_post.{n}" for n, folder in enumerate(folders)}
    assets = Assets.open(SaesteerConfig.from_json({"dictionaries": sources}))
    catalog: Catalog = assets.catalog(width=WIDTH, layers=len(folders))
    fetching, times = Fetching(assets.rows, torch.bfloat16), []
    draw = random.Random(1)
    known = [draw.randrange(FEATURES) for _ in folders]
    Door("bench", assets.config, fetching).meaning(spec(known), catalog, 256)
    for _ in range(ROUNDS[what]):
        asked = spec(known if what == "again" else [draw.randrange(FEATURES) for _ in folders])
        if what == "cold":
            forget(folders)
        door = Door("bench", assets.config, fetching)  # which has never seen the spec
        begun = time.perf_counter()
        door.meaning(asked, catalog, 256)
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def run(folder: Path, layout: str) -> list[dict[str, Any]]:
    """The results for files of one layout."""
    folders = [write(folder / f"{layout[1]}-{number}", layout) for number in range(DICTIONARIES)]
    recall(folders)
    rows = []
    for what in ROUNDS:
        middle, low, high = spread(measure(folders, what))
        limit = LIMIT_MS if what == "again" else None
        reached = None if limit is None else middle < limit
        row = {"layout": layout, "case": what, "ms": round(middle, 3), "p20": round(low, 3), "p80": round(high, 3)}
        rows.append({**row, "limit_ms": limit, "reached": reached})
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Print the results; 1 if a limit is not reached."""
    parser = argparse.ArgumentParser(prog="bench.rows", description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write the files; default: the temporary folder")
    told = parser.parse_args(words)
    torch.set_num_threads(1)
    results = []
    for layout in ("[F, d]", "[d, F]"):
        with tempfile.TemporaryDirectory(dir=told.folder, prefix="bench-rows-") as scratch:
            results += run(Path(scratch), layout)
    print("layout    case    ms       p20      p80      limit")
    for one in results:
        limit = "" if one["limit_ms"] is None else f"{one['limit_ms']:g}, {'reached' if one['reached'] else 'missed'}"
        print(f"{one['layout']:8}  {one['case']:6}  {one['ms']:<7}  {one['p20']:<7}  {one['p80']:<7}  {limit}")
    print(json.dumps({"bench": "rows", **machine(), "results": results}))
    return int(any(one["reached"] is False for one in results))


if __name__ == "__main__":
    sys.exit(main())
