"""Which files of the repository a test file can reach, by what each names. Knows no test. Standard library only.

A module is reached by an import anywhere in a file, by its dotted name in a string, and by code in a string; other
files by their path in a string. Of a file in tests/ or tools/, only the definitions that are used count, so that a
test without a server does not reach what servers import; fixtures are looked for in the conftests above a test. A file
of saesteer counts as a whole.
"""

import ast
import contextlib
import hashlib
import re
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = {"pyproject.toml", ".ci/run", "saesteer/__init__.py"}  # what is installed, how tests run, what is imported
DOTTED = re.compile(r"\b(?:saesteer|tests|bench|tools)(?:\.\w+)+")
COMMAND = "'-m' 'saesteer'"
WITHOUT = {("tests/forks.py", "IMPORTED"), ("tools/reach.py", "Reach")}  # name what only others use, who name it too
ALL, RUNS = "", "pytest_"  # in place of a definition's name: the whole file, and what runs without being named

Place = tuple[str, str]  # a file and a definition in it
Uses = tuple[set[str], set[Place]]  # names of the same file or of fixtures, and places elsewhere


class Reach:
    """The files of a repository, by their paths from its root, and which of them each reaches."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root, self.files = root, set(files)
        self.modules: dict[str, str] = {}
        self.folders: defaultdict[str, set[str]] = defaultdict(set)  # the files below each that has no Python
        python = {parent for name in self.files if name.endswith(".py") for parent in Path(name).parents}
        for name in self.files:
            home = f"saesteer/{name}" if name.startswith(("kernels/", "loaders/")) else name
            if name.endswith(".py"):
                self.modules[home.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = name
            for parent in {*Path(name).parents} - python:
                self.folders[parent.as_posix()].add(name)
        self.definitions = cache(self._definitions)

    def distances(self, test: str) -> dict[str, int]:
        """The files that a test file reaches, and how many of them lie between, plus one."""
        above = [f"{parent.as_posix()}/conftest.py" for parent in Path(test).parents]
        fixtures = [name for name in above if name in self.files]
        found = dict.fromkeys({*ALWAYS, *fixtures} & self.files, 1)
        begin = [(test, ALL), *((name, RUNS) for name in fixtures)]
        seen, waiting = set(begin), deque((place, 0) for place in begin)
        while waiting:
            (name, definition), far = waiting.popleft()
            found[name] = min(far, found.get(name, far))
            for place in self._next(name, definition, fixtures):
                if place not in seen:
                    seen.add(place)
                    waiting.append((place, far + (place[0] != name)))
        return found

    def digest(self, test: str) -> str:
        """Equal as long as nothing that a test file reaches has changed."""
        whole = hashlib.sha256()
        for name in sorted(self.distances(test)):
            whole.update(name.encode() + b"\0" + hashlib.sha256((self.root / name).read_bytes()).digest())
        return whole.hexdigest()[:16]

    def _next(self, name: str, definition: str, fixtures: Iterable[str]) -> Iterator[Place]:
        if not name.endswith(".py"):
            if not name.startswith("saesteer/"):  # a page, a notebook or a Dockerfile: what may run in it
                yield from self._string((self.root / name).read_text(errors="ignore"), name)
                yield from self._string("saesteer.__main__ saesteer.plugin.llm", name)
            return
        own, inside = self.definitions(name), name.startswith(("tests/", "tools/"))
        names, places = own[definition if inside and definition in own else ALL]
        yield from places
        for one in {RUNS, *names} if inside else ():
            yield from ((home, one) for home in ([name] if one in own else fixtures) if one in self.definitions(home))

    def _definitions(self, path: str) -> dict[str, Uses]:
        found: defaultdict[str, Uses] = defaultdict(lambda: (set(), set()), {ALL: (set(), set()), RUNS: (set(), set())})
        parts: list[tuple[list[str], ast.AST]] = []
        for node in ast.parse((self.root / path).read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    bound = (alias.asname or alias.name).partition(".")[0]
                    parts.append(([bound], type(node)(**{**vars(node), "names": [alias]})))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                unnamed = node.name.startswith(RUNS) or "autouse=True" in "".join(map(ast.unparse, node.decorator_list))
                parts.append(([node.name, *[RUNS] * unnamed], node))
            else:
                targets = [one for one in getattr(node, "targets", [getattr(node, "target", None)]) if one]
                bound_here = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
                parts.append((bound_here or [RUNS], node))
        for kept, part in parts:
            if (path, kept[0]) not in WITHOUT:
                names, places = self._uses(part, path)
                for one in (*kept, ALL):
                    found[one][0].update(names)
                    found[one][1].update(places)
        return dict(found)

    def _uses(self, node: ast.AST, path: str) -> Uses:
        names: set[str] = set()
        places: set[Place] = set()
        docstrings = {one.value for one in ast.walk(node) if isinstance(one, ast.Expr)}  # name what is only related
        for one in ast.walk(node):
            match one:
                case ast.Name(id=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.Import():
                    places.update(place for alias in one.names for place in self._module(alias.name))
                case ast.ImportFrom(module=str(module)):
                    places.update(place for alias in one.names for place in self._module(module, alias.name))
                case ast.Constant(value=str(text)) if text and one not in docstrings:
                    if not path.endswith("conftest.py"):
                        names.add(text)  # a fixture, perhaps
                    places.update(self._string(text, path))
                    if "import " in text:
                        with contextlib.suppress(SyntaxError):
                            places |= self._uses(ast.parse(text), path)[1]
                case ast.List(elts=each) | ast.Call(args=each) if COMMAND in " ".join(map(ast.unparse, each)):
                    places.update(self._module("saesteer.__main__"))
        return names, places

    def _string(self, text: str, path: str) -> Iterator[Place]:
        yield from (place for module in DOTTED.findall(text) for place in self._module(module))
        if text.endswith(".") and text.count(".") > 1:  # the rest of a module's name follows
            yield from ((name, ALL) for module, name in self.modules.items() if module.startswith(text))
        for base in ("", "saesteer/", f"{Path(path).parent.as_posix()}/"):
            found = {base + text} & self.files | self.folders.get((base + text).rstrip("/"), set())
            yield from ((name, ALL) for name in found)

    def _module(self, module: str, name: str = ALL) -> Iterator[Place]:
        if f"{module}.{name}" in self.modules:
            module, name = f"{module}.{name}", ALL
        while module not in self.modules and module.count(".") > 1:
            module, _, name = module.rpartition(".")  # of a class in a module
        if module in self.modules:
            yield self.modules[module], name
        # The packages around it; saesteer's own imports nothing by itself.
        while "." in (module := module.rpartition(".")[0]):
            if module in self.modules:
                yield self.modules[module], ALL


def repository(root: Path = ROOT) -> Reach:
    """A checkout's files, as git knows them; of this one if no other is given."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return Reach(root, (name for name in listed.splitlines() if (root / name).is_file()))
