"""What holds for all files: their size, their first sentence, and who may import whom."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("saesteer", "loaders", "kernels", "tests", "tools", "bench", "docs")
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
MAX_LINES = 400

# The rooms, lowest first, and which rooms each may import. A room is a folder, or one of the files in saesteer's root.
# The last ones are wings, which the core finds by name and works without (tests/test_wings.py).
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "wings": set(),
    "kernels": set(),
    "language": {"errors"},
    "models": {"errors", "language"},
    "dictionaries": {"errors", "language"},
    "loaders": {"errors", "language", "dictionaries"},
    "planning": {"errors", "language", "dictionaries"},
    "consumers": {"errors", "language", "planning"},
    "config": {"errors", "language", "models", "planning", "dictionaries", "loaders"},
    "engine": {"errors", "language", "planning", "dictionaries", "loaders", "config", "kernels"},
    "hf": {"errors", "language", "planning", "dictionaries", "loaders", "config", "engine", "models"},
    "plugin": {
        "errors",
        "wings",
        "language",
        "planning",
        "dictionaries",
        "consumers",
        "config",
        "kernels",
        "engine",
        "models",
    },
    "commands": {"errors", "wings", "dictionaries", "loaders", "consumers", "config", "hf", "plugin", "models"},
    "labels": {"errors", "language", "models", "dictionaries", "loaders", "config", "planning", "plugin"},
    "client": {"errors", "language"},
    "bridges": {"errors", "language", "planning"},
    "workbench": {
        "errors",
        "language",
        "dictionaries",
        "loaders",
        "labels",
        "consumers",
        "config",
        "engine",
        "hf",
        "plugin",
        "models",
        "commands",
    },
}
# Public paths that stay though the code lives in a room: each only hands names on.
PUBLIC_PATHS = {"__init__", "__main__", "demo", "model", "spec"}
STANDARD_LIBRARY_ONLY = {"errors", "language", "models"}
OUR_FILES = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("saesteer", "loaders", "kernels")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The room of a file: the folder below saesteer, or the file's own name."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "saesteer":
        return parts[0]
    return parts[1].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or inside a function; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "opens without a docstring"


@pytest.mark.parametrize("path", OUR_FILES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(path)
    ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("saesteer.")} - {"__version__"}
    if room in PUBLIC_PATHS:
        assert len(path.read_text().splitlines()) <= 10 or room == "__init__"
        return
    assert room in ROOMS, f"{room} has no place in ROOMS yet"
    assert ours <= ROOMS[room] | {room}


def test_the_rooms_have_an_order() -> None:
    for place, (room, below) in enumerate(ROOMS.items()):
        assert below <= set(list(ROOMS)[:place]), f"{room} imports a room that stands behind it"


@pytest.mark.parametrize("path", OUR_FILES, ids=name_of)
def test_foreign_imports_have_one_home(path: Path) -> None:
    room = room_of(path)
    foreign = {name.split(".")[0] for name in imports_of(path)} - {"saesteer"}
    if room != "plugin":
        assert "vllm" not in foreign
    if name_of(path) != "loaders/hub.py":
        assert "huggingface_hub" not in foreign
    if room in STANDARD_LIBRARY_ONLY:
        vectors = {"pybase64", "numpy"} if name_of(path) == "saesteer/language/inline.py" else set()
        assert foreign <= sys.stdlib_module_names | vectors
    if room == "planning":
        assert foreign <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_kernels_and_loaders_are_imported_from_saesteer(path: Path) -> None:
    """PyPI's kernels is another package."""
    assert not {name.split(".")[0] for name in imports_of(path)} & {"kernels", "loaders"}


def test_kernels_is_no_package_of_its_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for name in ("kernels", "loaders"):
        link = ROOT / "saesteer" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


def test_every_room_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for folder in ("saesteer", "loaders", "kernels") for path in (ROOT / folder).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders if folder.name != "__pycache__"}
    names = {name if name.startswith("saesteer") else f"saesteer.{name}" for name in names}
    assert set(project["tool"]["setuptools"]["packages"]) == names


def ours() -> Iterator[Path]:
    """All files of the repository that are not large; in an archive, which has no git, all that lie there."""
    paths = ROOT.rglob("*")
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = (ROOT / name for name in listed.split("\0") if name)
    yield from (path for path in paths if path.is_file() and path.stat().st_size < 2_000_000)


def test_nothing_speaks_of_one_machine() -> None:
    """No path that exists on somebody's machine alone, and no index of packages that others do not reach."""
    private = re.compile(
        rb"(?<![\w.~])/(?:root|work|home(?!/saesteer\b)|Users)/\w|\.\./shared|file:/{3}|PIP_[I]NDEX|trusted-[h]ost"
    )
    assert not [name_of(path) for path in ours() if private.search(path.read_bytes())]


@pytest.mark.parametrize("module", ["transformers", "vllm", "saesteer.plugin"])
def test_import_from_the_root(module: str) -> None:
    """Transformers looks for a module `kernels` on sys.path, where the repository has a folder of this name."""
    code = f"import {module}, sys; assert 'kernels' not in sys.modules and 'loaders' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
