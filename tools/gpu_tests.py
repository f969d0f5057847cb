"""Runs the tests that a GPU changes, file by file, as far as the time goes, and notes what ran (`make test-gpu`).

A GPU is often there for minutes, and all of these tests take an hour. So the files whose last whole run is oldest come
first, each in a process of its own, and a row for each says what passed, failed, and was not reached at which commit.
The rows are in gpu_tests.jsonl; `make tables` makes a table of the last ones. Knows pytest's words, and no test.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.front import about

ROOT = Path(__file__).parents[1]
STORED = "gpu_tests.jsonl"
MARKED = re.compile(r"mark\.(gpu|slow)\b")
TOLD = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")  # a line of pytest -v
NOT_REACHED = "not reached before"  # why tests/conftest.py skips one whose time is up
ENDING = 20.0  # seconds of the time that are left for a file to end in, once nothing begins any more
AT_LEAST = 40.0  # seconds that a file needs to be begun: an engine takes most of them to start

PYTEST = [sys.executable, "-m", "pytest", "-v", "-rs", "--no-header", "-p", "no:cacheprovider"]

Row = dict[str, Any]


def candidates(root: Path, only: Sequence[str] = ()) -> list[str]:
    """The files whose tests say something else on a GPU: all of the kernels', and those that start engines there."""
    found = [*root.glob("tests/kernels/test_*.py")]
    found += [
        path for room in ("plugin", "bench") for path in root.glob(f"tests/{room}/test_*.py")
        if MARKED.search(path.read_text())
    ]  # fmt: skip
    names = sorted(path.relative_to(root).as_posix() for path in found)
    return [name for name in names if not only or any(one in name for one in only)]


def in_order(names: Iterable[str], stored: Iterable[Row]) -> list[str]:
    """Those that never ran to their end come first, then those whose last whole run is oldest."""
    whole = {row["file"]: row["at"] for row in stored if row["whole"]}  # rows are in the order of their time
    return sorted(names, key=lambda name: whole.get(name, 0.0))


def read(lines: Iterable[str]) -> Row:
    """What a run of pytest has said, line by line."""
    words: dict[str, str] = {}
    left, ended = 0, False
    for line in lines:
        if told := TOLD.match(line):
            words[told[1]] = told[2]
        left += NOT_REACHED in line and line.startswith("SKIPPED")
        ended = ended or bool(re.match(r"=+ .* in [\d.]+s", line))
    wrong = sorted(name for name, word in words.items() if word in ("FAILED", "ERROR"))
    passed = sum(word == "PASSED" for word in words.values())
    return {"passed": passed, "wrong": wrong, "left": left, "whole": ended and not left}


def run(name: str, seconds: float) -> tuple[Row, list[str]]:
    """Run the tests of a file for so long; also its last lines, if something went wrong."""
    begin = time.time()
    command = [*PYTEST, name, "-m", "not long and not network", "--until", str(begin + seconds - ENDING)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False).stdout
    except subprocess.TimeoutExpired as late:
        done = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    lines = done.splitlines()
    row = read(lines)
    told = lines[-60:] if row["wrong"] else []
    return {"file": name, "at": round(begin), **row, "seconds": round(time.time() - begin, 1)}, told


def main() -> int:
    """Run as many files as the time allows; exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="files whose path has one of these words")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the rows")
    parser.add_argument("--commit", default="", help="that is tested, where git cannot tell")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    path = options.out / STORED
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    machine = about(options.commit) | {"v2_runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "vLLM's choice")}
    wrong = False
    for name in in_order(candidates(ROOT, options.only), stored):
        if end - time.monotonic() < AT_LEAST:
            break
        row, told = run(name, end - time.monotonic())
        print(*told, sep="\n")
        print(
            f"{name}: {row['passed']} passed, {len(row['wrong'])} wrong, {row['left']} not reached"
            f"{'' if row['whole'] else ', not whole'}, {row['seconds']} s",
            flush=True,
        )
        wrong = wrong or bool(row["wrong"])
        options.out.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({**row, **machine}) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
