"""Runs the tests that a GPU changes, file by file, as far as the time goes, and notes what ran (`make test-gpu`).

All of these tests take an hour, and a run may be shorter. So the files whose last whole run is oldest come
first, each in a process of its own, and a row for each says what passed, failed, and was not reached at which commit.
The rows are in gpu_tests.jsonl; `make tables` makes a table of the last ones. Knows pytest's words, and no test.

Nearly all of the time is the host's: compiling kernels, starting engines. So with `--processes` several files run side
by side, each on one card, and the kernels' files in parts. Files that need two cards see all of them, one at a time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.front import about

ROOT = Path(__file__).parents[1]
STORED = "gpu_tests.jsonl"
MARKED = re.compile(r"mark\.(gpu|slow)\b")
TOLD = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")  # a line of pytest -v
BEGUN = re.compile(r"^(\S+::\w+(\[[^]]*\])?) ")  # a test that prints something has its word on a later line
LATE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED)\s+\[ *\d+%\]")
UNREADABLE = re.compile(r"^ERROR (\S+\.py)( - |$)")  # a file that pytest cannot import has no test that could say it
SEVERAL = re.compile(r"device_count\(\) *(== *1|< *2)\b")  # a file that says what it does without a second card
NOT_REACHED = "not reached before"  # why tests/conftest.py skips one whose time is up
ENDING = 20.0  # seconds of the time that are left for a file to end in, once nothing begins any more
AT_LEAST = 40.0  # seconds that a file needs to be begun: an engine takes most of them to start
SHORT, WITH_LONG = "not long and not network", "not network and not vision"
PARTS = 4  # of a file of kernels, if files run side by side: the longest takes over nine minutes by itself

PYTEST = [sys.executable, "-m", "pytest", "-v", "-rsE", "--no-header", "-p", "no:cacheprovider"]

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
    begun = ""
    left, ended = 0, False
    for line in lines:
        if told := TOLD.match(line):
            words[told[1]] = told[2]
        elif told := BEGUN.match(line):
            begun = told[1]
        elif told := LATE.match(line):
            words[begun] = told[1]
        elif told := UNREADABLE.match(line):
            words[told[1]] = "ERROR"
        left += NOT_REACHED in line and line.startswith("SKIPPED")
        ended = ended or bool(re.match(r"=+ .* in [\d.]+s", line))
    wrong = sorted(name for name, word in words.items() if word in ("FAILED", "ERROR"))
    passed = sum(word == "PASSED" for word in words.values())
    return {"passed": passed, "wrong": wrong, "left": left, "whole": ended and not left}


def needs_several(root: Path, name: str) -> bool:
    """Whether the tests of a file want two cards."""
    return SEVERAL.search((root / name).read_text()) is not None


def cards() -> list[str]:
    """The names of this machine's cards, as CUDA_VISIBLE_DEVICES takes them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def run(
    name: str, seconds: float, *more: str, marks: str = SHORT, environment: Mapping[str, str] | None = None
) -> tuple[Row, list[str]]:
    """Run the tests of a file for so long; also its last lines, if something went wrong."""
    begin = time.time()
    command = [*PYTEST, name, "-m", marks, "--until", str(begin + seconds - ENDING), *more]
    whole = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=seconds, check=False
        ).stdout
    except subprocess.TimeoutExpired as late:
        done = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    lines = done.splitlines()
    row = read(lines)
    told = lines[-60:] if row["wrong"] else []
    return {"file": name, "at": round(begin), **row, "seconds": round(time.time() - begin, 1)}, told


def together(rows: Sequence[Row], parts: int) -> Row:
    """One row of a file, of those of its parts; a part that nobody began leaves the file not whole."""
    begin, end = min(row["at"] for row in rows), max(row["at"] + row["seconds"] for row in rows)
    return {
        "file": rows[0]["file"],
        "at": begin,
        "passed": sum(row["passed"] for row in rows),
        "wrong": sorted(name for row in rows for name in row["wrong"]),
        "left": sum(row["left"] for row in rows),
        "whole": len(rows) == parts and all(row["whole"] for row in rows),
        "seconds": round(end - begin, 1),
    }


@dataclass
class Machine:
    """What is left to run, and who runs it: so many processes, each with one card; the first begins with all."""

    names: Sequence[str]
    processes: int
    marks: str  # of the tests, as pytest takes them
    end: float  # of time.monotonic
    done: Callable[[Row, list[str]], None]  # is told of each file
    cards: Sequence[str] = ()
    wide: Sequence[str] = ()  # of the names, those that need all cards
    _rows: dict[str, list[Row]] = field(default_factory=dict)
    _told: dict[str, list[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        narrow = [name for name in self.names if name not in self.wide]
        self._wide = deque((name, 0) for name in self.names if name in self.wide)
        self._narrow = deque((name, part) for name in narrow for part in range(self.parts(name)))

    def parts(self, name: str) -> int:
        """In how many the file is run."""
        return PARTS if self.processes > 1 and name.startswith("tests/kernels/") else 1

    def environment(self, number: int, *, wide: bool) -> dict[str, str]:
        """Of the tests that a process runs: its card, and no more of the host and of the card than its share."""
        if self.processes == 1:
            return {}
        threads = str(max(1, (os.cpu_count() or 1) // self.processes))
        found = {
            "OMP_NUM_THREADS": threads,
            "TORCHINDUCTOR_COMPILE_THREADS": threads,
            "SAESTEER_TEST_RUNNING": "2",  # a test may compare two engines
        }
        if self.cards and not wide:
            found["CUDA_VISIBLE_DEVICES"] = self.cards[number % len(self.cards)]
        return found

    def work(self, number: int) -> None:
        """Take one after another, as long as there is time. The first process has the wide ones, before all others."""
        for left, wide in ((self._wide, True), (self._narrow, False)):
            while (number == 0 or not wide) and self.end - time.monotonic() >= AT_LEAST:
                try:
                    name, part = left.popleft()
                except IndexError:
                    break
                more = [] if self.parts(name) == 1 else ["--part", f"{part + 1}/{self.parts(name)}"]
                given = self.environment(number, wide=wide)
                row, told = run(name, self.end - time.monotonic(), *more, marks=self.marks, environment=given)
                with self._lock:
                    self._rows.setdefault(name, []).append(row)
                    self._told.setdefault(name, []).extend(told)
                    if len(self._rows[name]) == self.parts(name):
                        self._tell(name)

    def _tell(self, name: str) -> None:
        self.done(together(self._rows.pop(name), self.parts(name)), self._told.pop(name))

    def run(self) -> None:
        """Return when all is done, or the time is up."""
        threads = [threading.Thread(target=self.work, args=[number]) for number in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in [*self._rows]:  # some of whose parts were not begun
            self._tell(name)


def main() -> int:
    """Run as many files as the time allows; exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="files, or parts of them, side by side")
    parser.add_argument("--long", action="store_true", help="also the tests that are too long for CI, such as of sleep")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="files whose path has one of these words")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the rows")
    parser.add_argument("--commit", default="", help="that is tested, where git cannot tell")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    path = options.out / STORED
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    machine = about(options.commit) | {"v2_runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "vLLM's choice")}
    names = in_order(candidates(ROOT, options.only), stored)
    failed: list[str] = []

    def done(row: Row, told: list[str]) -> None:
        print(*told, sep="\n")
        print(
            f"{row['file']}: {row['passed']} passed, {len(row['wrong'])} wrong, {row['left']} not reached"
            f"{'' if row['whole'] else ', not whole'}, {row['seconds']} s",
            flush=True,
        )
        failed.extend(row["wrong"])
        options.out.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({**row, **machine}) + "\n")

    found = cards() if options.processes > 1 else []
    wide = [name for name in names if len(found) > 1 and needs_several(ROOT, name)]
    Machine(names, max(1, options.processes), WITH_LONG if options.long else SHORT, end, done, found, wide).run()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
