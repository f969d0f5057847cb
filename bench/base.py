"""Two trees of this repository in turn: which lines of the kernels' benchmark got slower. Knows no kernel.

A line is slower if every run of this tree took longer than every run of the other, and the medians are further apart
than two processes of one tree are. A line that only the other tree has is an answer that is wrong here, or a case that
is gone.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
ROUNDS = 3
NOISE = 0.02  # of the time; runs of one commit were up to 1 % apart

Key = tuple[Any, ...]
Row = dict[str, Any]


class Change(NamedTuple):
    """A line of the benchmark in both trees."""

    key: Key
    before: float  # us, medians
    after: float
    slower: bool
    faster: bool


def key_of(row: Row) -> Key:
    """What a line measures."""
    return tuple(row[name] for name in ("op", "case", "width", "form", "cache"))


def changes(before: Sequence[Sequence[Row]], after: Sequence[Sequence[Row]]) -> list[Change]:
    """The lines that both trees have, in this tree's order.

    Args:
        before: the rows of each run of the other tree.
        after: those of this one.
    """
    old, new = _times(before), _times(after)
    return [
        Change(key, median(old[key]), median(times), _above(times, old[key]), _above(old[key], times))
        for key, times in new.items()
        if key in old
    ]


def lost(before: Sequence[Sequence[Row]], after: Sequence[Sequence[Row]]) -> list[Key]:
    """The lines that this tree has in fewer runs than the other: a wrong answer is not timed."""
    old, new = _times(before), _times(after)
    return [key for key, times in old.items() if len(new.get(key, ())) < len(times)]


def _times(runs: Sequence[Sequence[Row]]) -> dict[Key, list[float]]:
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for rows in runs:
        for row in rows:
            found[key_of(row)].append(row["us"])
    return found


def _above(some: list[float], others: list[float]) -> bool:
    return min(some) > max(others) and median(some) > (1 + NOISE) * median(others)


def tree_of(base: str, folder: Path) -> Path:
    """The files of a commit, unpacked into the folder; or a folder that is a checkout already.

    Raises:
        SystemExit: it is neither.
    """
    if (Path(base) / "bench" / "kernels.py").is_file():
        return Path(base).resolve()
    packed = subprocess.run(["git", "archive", base], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        said = packed.stderr.decode(errors="replace").strip()
        raise SystemExit(f"--base {base}: expected a commit or the folder of a checkout; git says: {said}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="tar")
    return folder


def run(tree: Path, words: Sequence[str], out: Path) -> list[Row]:
    """The rows of one run of a tree's benchmark.

    Raises:
        SystemExit: it wrote none.
    """
    command = [sys.executable, "-m", "bench.kernels", "--no-curves", "--out", str(out), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    rows = out / "kernels.jsonl"
    if not rows.is_file() or not rows.read_text():
        raise SystemExit(f"the benchmark of {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [json.loads(line) for line in rows.read_text().splitlines()]


def compare(base: str, words: Sequence[str], rounds: int = ROUNDS) -> int:
    """Run both trees in turn, print what has changed; the exit code is 1 if something got slower or is not timed.

    Args:
        base: a commit or a folder.
        words: what else the benchmark is told.
        rounds: runs of each tree.
    """
    runs: dict[str, list[list[Row]]] = {"base": [], "this": []}
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"base": tree_of(base, Path(scratch, "tree")), "this": ROOT}
        for number in range(rounds):
            for name, tree in trees.items():
                out = Path(scratch, f"{name}-{number}")
                runs[name].append(run(tree, words, out))
                print(f"round {number + 1}, {name}: {len(runs[name][-1])} lines", flush=True)
    found = changes(runs["base"], runs["this"])
    gone = lost(runs["base"], runs["this"])
    print(report(found, gone))
    return 1 if gone or any(one.slower for one in found) else 0


def report(found: Sequence[Change], gone: Sequence[Key] = ()) -> str:
    """For people: what is not timed any more, what got slower, and what faster."""
    lines = [f"LOST    wrong or gone in a run of this tree: {_name(key)}" for key in gone]
    for word, moved in (
        ("SLOWER", [one for one in found if one.slower]),
        ("faster", [one for one in found if one.faster]),
    ):
        for one in moved:
            percent = 100 * (one.after / one.before - 1)
            lines.append(f"{word}  {one.before:9.2f} -> {one.after:9.2f} us  {percent:+6.1f} %  {_name(one.key)}")
    slower, faster = (sum(getattr(one, name) for one in found) for name in ("slower", "faster"))
    return "\n".join([*lines, f"of {len(found)} lines {slower} are slower and {faster} faster, the others as before"])


def _name(key: Key) -> str:
    return " ".join(str(part) for part in key)
