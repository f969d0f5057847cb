"""Measures the house: prints the figures that bound it, and exits with 1 if one of them is worse than its bound.

    python -m tools.house

The house is Python in saesteer, loaders and kernels. All imports count, also those inside functions and for types.
"""

import ast
import sys
import tokenize
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
NO_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
# What can be deleted, and the core works.
WINGS = {
    "workbench": ("saesteer/workbench",),
    "labels": ("saesteer/labels",),
    "neuronpedia": ("saesteer/plugin/http/neuronpedia",),
    "playground": ("saesteer/plugin/http/playground.py", "saesteer/playground"),
    "bridges": ("saesteer/bridges",),
    "client": ("saesteer/client",),
    "sinks": tuple(f"saesteer/consumers/{name}.py" for name in ("filesystem", "lines", "shards")),
}
# What takes counts and rows from the device into answers, files and consumers.
BACK = {
    "consumers": ("",),
    "journal": ("",),
    "engine": (
        *("brought", "captures", "doses", "filer", "lanes", "private", "published", "readouts"),
        *("sinks", "staging", "writer"),
    ),
    "planning": ("answers", "applied", "reductions", "rules"),
    "plugin/worker": ("counts", "drafts", "earlier"),
    "plugin/results": (
        *("consuming", "counts", "forms", "gathering", "kept", "reads", "report", "rules", "sending", "spools"),
        "unsent",
    ),
}
FRONT = ("saesteer/plugin/http", "saesteer/plugin/door", "saesteer/client")


@cache
def files() -> Mapping[str, Path]:
    """The files of the house, by the name of the module."""
    found = {}
    for folder in ("saesteer", "loaders", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] not in (("saesteer", "loaders"), ("saesteer", "kernels")):  # links to the folders above
                whole = parts if folder == "saesteer" else ("saesteer", *parts)
                found[".".join(whole).removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the house that a module imports."""
    names = []
    for node in ast.walk(tree(files()[module])):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{one.name}" for one in node.names]
    known = (name if name in files() else name.rpartition(".")[0] for name in names)
    return frozenset(known) & files().keys() - {module, "saesteer"}


def closure(modules: Iterable[str]) -> set[str]:
    """Everything that these modules import, also through others."""
    found, left = set[str](), [*modules]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += imports(one)
    return found


def is_in(module: str, places: Collection[str]) -> bool:
    """Whether a module is one of these files, or in one of these folders."""
    name = files()[module].relative_to(ROOT).as_posix()
    return any(name == one or name.startswith(f"{one}/") for one in places)


def wing_of(module: str) -> str | None:
    return next((name for name, places in WINGS.items() if is_in(module, places)), None)


def tokens() -> int:
    """Tokens of code, without comments and docstrings; a formatted string is one, as it was before Python 3.12."""
    found = 0
    for path in files().values():
        bodies = (one.body for one in ast.walk(tree(path)) if isinstance(one, DOCUMENTED))
        docstrings, inside = {body[0].lineno for body in bodies if is_string(body)}, 0
        with tokenize.open(path) as file:
            for one in tokenize.generate_tokens(file.readline):
                name = tokenize.tok_name[one.type]
                inside -= name == "FSTRING_END"
                skipped = name in NO_CODE or (name == "STRING" and one.start[0] in docstrings)
                found += not (inside or skipped or name == "FSTRING_END")
                inside += name == "FSTRING_START"
    return found


def is_string(body: list[ast.stmt]) -> bool:
    """Whether a body begins with a docstring."""
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def lines(modules: Iterable[str]) -> int:
    return sum(len(files()[one].read_text().splitlines()) for one in modules)


def circles() -> list[set[str]]:
    """Groups of modules of one room that import each other."""
    rooms = [module.split(".")[1] for module in files() if "." in module]
    found: list[set[str]] = []
    for room in dict.fromkeys(rooms):
        inside = {one: imports(one) for one in files() if one.split(".")[1:2] == [room]}
        while free := [one for one, others in inside.items() if not others & inside.keys()]:
            for one in free:
                del inside[one]
        found += [{*inside}] if inside else []
    return found


def documented() -> float:
    """Percent of the public classes and functions that have a docstring."""
    public = [
        one
        for path in files().values()
        for holder in ast.walk(tree(path))
        if isinstance(holder, ast.Module | ast.ClassDef)
        for one in holder.body
        if isinstance(one, DOCUMENTED) and not one.name.startswith("_")
    ]
    return 100 * sum(is_string(one.body) for one in public) / len(public)


def main() -> None:
    worker = closure(["saesteer.plugin.worker.worker"])
    core = [one for one in files() if wing_of(one) is None]
    wrong = [(one, other) for one in core for other in imports(one) if wing_of(other)]
    foreign = [one for one in worker if wing_of(one) or is_in(one, FRONT)]
    back = [f"saesteer/{room}/{name}.py".replace("/.py", "") for room, names in BACK.items() for name in names]
    # Each with its bound: what stands today, or the aim where that is met.
    figures = (
        ("code tokens", tokens(), 270_000),
        ("lines of the way back", lines(one for one in files() if is_in(one, back)), 5_600),
        ("lines that the worker imports", lines(worker), 20_600),
        ("modules of the front end and wings among them", len(foreign), 0),
        ("imports of wings in the core", len(wrong), 0),
        ("circles inside rooms", len(circles()), 0),
        ("public names without a docstring, percent", round(100 - documented(), 1), 5),
    )
    for name, found, most in figures:
        print(f"{found:>9,} {name} (at most {most:,})")
    for one in (*wrong, *foreign, *circles()):
        print("wrong:", one)
    sys.exit(any(found > most for _, found, most in figures))


if __name__ == "__main__":
    main()
