"""The stored runs of slow test files, and which files have to run again (`--runs`). Knows no test.

A row is written when all tests of a file have run and none failed; its `reach` is a digest of all that the file reached
(`tools/reach.py`). No commit would do in its place: a rebase changes it, and a shallow clone does not know it.
"""

import json
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest


class Runs:
    """Counts what each file still has to run, and appends a row for each that ends well.

    Args:
        path: of the stored rows, of which the last of each file counts.
        tests: how many of each file are to run.
        reach: the digest of what each file reaches.
        append: False leaves the stored rows as they are.
    """

    def __init__(self, path: Path, tests: Mapping[str, int], reach: Mapping[str, str], append: bool) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        last = {row["file"]: row for row in rows}
        self.unchanged = {name: last[name]["at"] for name in tests if last.get(name, {}).get("reach") == reach[name]}
        self._path, self._reach, self._append = path, reach, append
        self._to_run, self._seconds = Counter(tests), defaultdict[str, float](float)
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def place(self, name: str) -> int:
        """Where a file stands: what has to run is 0, and then come the days of the last runs."""
        return self.unchanged.get(name, 0) // 86400

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a test took, and store the row of a file whose last test has ended."""
        name = report.nodeid.partition("::")[0]
        self._seconds[name] += report.duration
        if report.failed:
            self._failed.add(name)
        if report.passed and report.when == "call":
            self._passed.add(name)
        if report.when != "teardown":
            return
        self._to_run[name] -= 1
        if self._append and not self._to_run[name] and name in self._passed - self._failed:
            ask = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(ask, capture_output=True, text=True, check=False)
            row = {"file": name, "at": round(time.time()), "commit": commit.stdout.strip()}
            row |= {"seconds": round(self._seconds[name], 1), "reach": self._reach[name]}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
