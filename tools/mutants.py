"""Changes one place of the code at a time and counts what tests find: `python -m tools.mutants --number 100`.

Which changes are drawn follows from the commit. Each runs the quick tests that reach its file (tools/reach.py), the
nearest first, until one fails or the time is up. A change that no test finds in that time is printed: a test is
missing, or it changes nothing. Works in a checkout of its own. Knows no test.
"""

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.reach import ROOT, Reach, repository

WHERE = ("saesteer/language/", "saesteer/planning/", "saesteer/engine/table", "kernels/reference.py")
MARKS = "not slow and not network and not gpu"
HANGS = 60  # seconds after which a test counts as failed
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: of a file, from one byte to another, what stands there and what takes its place."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """What an expression is replaced by, one change at a time; a statement by nothing."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in OTHER:
            yield ast.Compare(left, [OTHER[type(op)]()], right)  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OTHER[type(op)](), values)  # type: ignore[arg-type]
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield ast.BinOp(left, OTHER[type(op)](), right)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """All changes within the functions of a file; annotations, messages and decorators stay."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while waiting:
        node, inside = waiting.pop()
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            each = field if isinstance(field, list) else [field]
            within = inside or isinstance(node, ast.FunctionDef)
            waiting += [(one, within) for one in each if isinstance(one, ast.AST)]
        for new in changed(node) if inside and isinstance(node, ast.expr) else ():
            assert node.end_lineno and node.end_col_offset is not None
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            old = text.encode()[begin:end].decode()
            yield Mutant(file, node.lineno, begin, end, old, f"({ast.unparse(ast.fix_missing_locations(new))})")


def nearest(reach: Reach, number: int = 40) -> dict[str, list[str]]:
    """The test files that reach each file, those first that are nearest to it, and then those that reach least."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for test in sorted(name for name in reach.files if re.match(r"tests/.*test_\w+\.py$", name)):
        distances = reach.distances(test)
        for name, far in distances.items():
            found.setdefault(name, []).append((far, len(distances), test))
    return {name: [test for _, _, test in sorted(tests)[:number]] for name, tests in found.items()}


class Finder:
    """The tests of a checkout; those that fail without a change are left out from then on."""

    def __init__(self, checkout: Path, seconds: float) -> None:
        self.checkout, self.seconds = checkout, seconds
        self.known: set[str] = set()  # to pass without a change
        self.out: set[str] = set()  # that fail without one

    def failure(self, tests: Sequence[str]) -> str:
        """The first test that fails; nothing if none does in time."""
        words = ["-x", "-q", "-m", MARKS, "-p", "no:cacheprovider", "--timeout", str(HANGS), "--durations=0"]
        words += [word for one in sorted(self.out) for word in ("--deselect", one)]
        whole = os.environ | {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *words, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.checkout, env=whole, capture_output=True, text=True, timeout=self.seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return ""
        if done.returncode in (0, 5):  # 5: none was selected
            return ""
        told = FAILED.search(done.stdout)
        return told[1] if told else tests[0]

    def found(self, mutant: Mutant, tests: Sequence[str]) -> str:
        """The test that finds a change, which passes without it; nothing if there is none."""
        path = self.checkout / mutant.file
        before = path.read_bytes()
        while True:
            path.write_bytes(before[: mutant.begin] + mutant.new.encode() + before[mutant.end :])
            try:
                failure = self.failure(tests)
            finally:
                path.write_bytes(before)
            if not failure or failure in self.known or not self.failure([failure]):
                self.known.add(failure)
                return failure
            self.out.add(failure)


def main() -> None:
    """Draw changes, run the tests of each, and print what survives and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=90, help="for the tests of each change")
    parser.add_argument("--commit", default="HEAD", help="what is changed, and the seed")
    asked = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", asked.commit], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(checkout), commit], check=True)
        try:
            reach = repository(checkout)
            near = nearest(reach)
            every = [
                one
                for name in sorted(reach.files) if name.startswith(WHERE) and name.endswith(".py")
                for one in mutants(name, (checkout / name).read_text())
            ]  # fmt: skip
            drawn = random.Random(commit).sample(every, min(asked.number, len(every)))
            tests, alive = Finder(checkout, asked.seconds), 0
            for number, one in enumerate(drawn, 1):
                test = tests.found(one, near.get(one.file, []))
                alive += not test
                state = f"found by {test}" if test else "SURVIVED"
                print(f"{number} {one.file}:{one.line}: {one.old!r} -> {one.new!r}: {state}", flush=True)
            print(f"{len(drawn) - alive} of {len(drawn)} found at {commit[:8]}, of {len(every)} possible")
            print(f"left out, as they fail without a change: {', '.join(sorted(tests.out)) or 'none'}")
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(checkout)], check=True)


if __name__ == "__main__":
    main()
