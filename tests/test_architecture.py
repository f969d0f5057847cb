"""What holds for all files: their size, their first sentence, who may import whom, and that wheels hold every room."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("saesteer", "loaders", "kernels", "tests", "tools", "bench")
PYTHON = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
MAX_LINES = 400

# The rooms, lowest first: a file imports from its own room and from those that stand before it.
ROOMS = (
    "errors",
    "cache",
    "families",
    "sites",
    "checks",
    "inline",
    "edits",
    "spec",
    "planned",
    "scopes",
    "messages",
    "names",
    "conditions",
    "uses",
    "plan",
    "coder",
    "kernels",
    "dose",
    "testing",
    "loaders",
    "vectors",
    "applied",
    "runs",
    "identity",
    "modules",
    "config",
    "inspect",
    "settings",
    "rows",
    "pool",
    "tables",
    "registry",
    "weights",
    "engine",
    "hf",
    "plugin",
    "answers",
    "client",
    "model",
    "demo",
    "launch",
    "doctor",
    "features",
    "calibrate",
    "cli",
    "__main__",
)
PLANNING = ("planned", "scopes", "messages", "names", "conditions", "uses", "plan")
# Stricter than the order.
ONLY = {
    "answers": {"answers", "errors"},
    "client": {"answers", "client", "errors", "spec"},
    "kernels": {"kernels"},
    "loaders": {"loaders", "errors", "cache", "coder"},
    **{room: set(ROOMS[: ROOMS.index("coder")]) for room in PLANNING},
}
STANDARD_LIBRARY_ONLY = set(ROOMS[: ROOMS.index("coder")])
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
    if room == "__init__":
        return  # the list of public names, imported when asked for
    assert room in ROOMS, f"{room} has no place in ROOMS yet"
    allowed = ONLY.get(room, set(ROOMS[: ROOMS.index(room) + 1]))
    ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("saesteer.")} - {"__version__"}
    assert ours <= allowed


@pytest.mark.parametrize("path", OUR_FILES, ids=name_of)
def test_foreign_imports_have_one_home(path: Path) -> None:
    room = room_of(path)
    foreign = {name.split(".")[0] for name in imports_of(path)} - {"saesteer"}
    if room != "plugin":
        assert "vllm" not in foreign
    if name_of(path) != "loaders/files.py":
        assert "huggingface_hub" not in foreign
    if room in STANDARD_LIBRARY_ONLY:
        base64 = {"pybase64"} if name_of(path) == "saesteer/inline.py" else set()
        assert foreign <= sys.stdlib_module_names | base64


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


def test_wheel_holds_real_files(tmp_path: Path) -> None:
    for folder in ("saesteer", "loaders", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "dist"], cwd=tmp_path, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {info.filename: info.file_size for info in archive.infolist()}
    for path in OUR_FILES:
        name = name_of(path)
        assert held[name if name.startswith("saesteer") else f"saesteer/{name}"] == path.stat().st_size
    assert held["saesteer/data/smollm2-135m-l15-9216.safetensors"] > 20_000_000


def test_nothing_speaks_of_one_machine() -> None:
    """No path that exists on somebody's machine alone."""
    private = re.compile(r"(?<![\w.~])/(?:root|work|home|Users)/\w|\.\./shared")
    texts = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}] + [ROOT / "Makefile", ROOT / ".ci/run"]
    texts += (ROOT / "docs").glob("*.md")
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    found = [name_of(path) for path in [*PYTHON, *texts, *notebooks] if private.search(path.read_text())]
    assert not found


@pytest.mark.parametrize("module", ["transformers", "vllm", "saesteer.plugin"])
def test_import_from_the_root(module: str) -> None:
    """Transformers looks for a module `kernels` on sys.path, where the repository has a folder of this name."""
    code = f"import {module}, sys; assert 'kernels' not in sys.modules and 'loaders' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
