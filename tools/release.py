"""Makes a release of a commit: checks, builds and lints both packages, tags, and prints what to push. Sends nothing.

    python -m tools.release 0.1.0 --dry-run

What is built is the commit, not the folder. With --dry-run nothing is tagged. docs/versions.md says what a version
promises.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"
LARGEST = 1_000_000  # bytes of the wheel that everybody installs


def build(source: Path, out: Path) -> list[Path]:
    """Both packages, each as archive and wheel.

    Args:
        source: a copy of the repository, in which the builds leave files.
        out: where they go.
    """
    for folder in (source, source / "packages/demo"):
        for kind in ("sdist", "wheel"):
            command = [sys.executable, "-c", BUILD.format(kind, str(out))]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return sorted(out.iterdir())


def lint(files: Sequence[Path]) -> Iterator[str]:
    """What linters of package indexes and the bound of the wheel's size have against the built files."""
    wheels = [str(one) for one in files if one.suffix == ".whl"]
    for name, *words in (["twine", "check", "--strict", *map(str, files)], ["check_wheel_contents", *wheels]):
        done = subprocess.run([sys.executable, "-m", name, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{name}: {(done.stdout + done.stderr).strip()}"
    for one in files:
        if one.name.startswith("saesteer-") and one.suffix == ".whl" and one.stat().st_size > LARGEST:
            yield f"{one.name} has {one.stat().st_size} bytes, expected at most {LARGEST}"


def disagreeing(root: Path, version: str) -> Iterator[str]:
    """Where the sources have another version, or none."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    demo = tomllib.loads((root / "packages/demo/pyproject.toml").read_text())["project"]["version"]
    found = {
        "pyproject.toml": project["version"],
        "saesteer/__init__.py": _one(root / "saesteer/__init__.py", r'^__version__ = "(.*)"'),
        "CITATION.cff": _one(root / "CITATION.cff", r"^version: (.*)"),
        "CHANGELOG.md, first heading": _one(root / "CHANGELOG.md", r"^## (.*)").partition(" (tag")[0],
    }
    yield from (f"{place} has version {one!r}, expected {version!r}" for place, one in found.items() if one != version)
    if "not yet released" in _one(root / "CHANGELOG.md", r"^## (.*)"):
        yield "CHANGELOG.md, first heading, has 'not yet released', expected a date"
    extra = map(Requirement, project["optional-dependencies"]["demo"])
    [wanted] = [one for one in extra if one.name == "saesteer-demo"]
    if demo not in wanted.specifier:
        yield f"packages/demo has version {demo!r}, expected one that fits {wanted}"


def _one(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return found[1] if found else ""


def _git(*words: str, root: Path) -> bytes:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Make a release: 0, or 1 with a line for everything that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="such as 0.1.0")
    parser.add_argument("--dry-run", action="store_true", help="tag nothing")
    parser.add_argument("--out", type=Path, default=root / "dist", help="where the files go; default: dist")
    options = parser.parse_args(words)
    tag, out = f"v{options.version}", options.out.resolve()
    wrong = [*disagreeing(root, options.version)]
    if _git("status", "--porcelain", root=root):
        wrong.append("the tree has changes that are not committed")
    if _git("tag", "--list", tag, root=root):
        wrong.append(f"the tag {tag} exists")
    if out.is_dir() and any(out.iterdir()):
        wrong.append(f"{out} is not empty")
    if not wrong:
        with tempfile.TemporaryDirectory() as source:
            with tarfile.open(fileobj=BytesIO(_git("archive", "HEAD", root=root))) as archive:
                archive.extractall(source, filter="data")
            wrong = [*lint(files := build(Path(source), out))]
    if wrong:
        print("\n".join(wrong))
        return 1
    for one in files:
        print(f"{one.stat().st_size / 1e6:6.1f} MB  {one}")
    if not options.dry_run:
        _git("tag", "--annotate", tag, "--message", f"saesteer {options.version}", root=root)
    print(f"\n{'Nothing is tagged' if options.dry_run else f'{tag} is tagged'}. What to push:\n")
    print(f"    git push origin main {tag}")
    print("    " + " ".join(["twine upload", *map(str, files)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
