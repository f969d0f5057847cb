"""What is published: a small wheel, the package of the demo, and an archive whose tests run."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from saesteer.commands.embedded import DICTIONARIES
from tests.test_architecture import OUR_FILES, ROOT, name_of, ours
from tests.test_deploy import MADE_OF, linter
from tools.release import LARGEST, build, disagreeing, lint, main

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")
# Searches the embedded labels.
FEATURES = "tests/cli/test_labels.py::test_known_features_are_among_the_first_three"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


in_clone = pytest.mark.skipif(
    not any((ROOT / "saesteer/data").glob("*.labels")), reason="an archive has no embedded dictionaries"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels and the archive, made of a copy: a build leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("copy")
    listed = (line.split()[1:] for line in (ROOT / "MANIFEST.in").read_text().splitlines())
    tops = {one.partition("/")[0] for words in listed for one in words} & set(os.listdir(ROOT))
    for name in tops | {*MADE_OF, "MANIFEST.in"} | {path.name for path in ROOT.glob("*.md")}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, copy)
    build(copy, copy / "dist")
    return copy / "dist"


def held(path: Path) -> dict[str, int]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_the_wheel_holds_real_files_and_no_dictionary(built: Path) -> None:
    [wheel] = built.glob("saesteer-*.whl")
    names = held(wheel)
    for path in OUR_FILES:
        name = name_of(path)
        assert names[name if name.startswith("saesteer") else f"saesteer/{name}"] == path.stat().st_size
    for path in (ROOT / "saesteer/playground").rglob("*.*"):
        assert names[name_of(path)] == path.stat().st_size
    assert wheel.stat().st_size < LARGEST


@in_clone
def test_the_demo_is_a_package_of_the_same_files(built: Path) -> None:
    [wheel] = built.glob("saesteer_demo-*.whl")
    names = held(wheel)
    for file in DICTIONARIES.values():
        for path in (file, file.with_name(f"{file.name}.labels")):
            assert names[f"saesteer_demo/{path.name}"] == path.stat().st_size


def test_linters_of_indexes_find_nothing(built: Path) -> None:
    linter("check-wheel-contents")
    assert not [*lint(sorted(built.iterdir()))]


def test_links_of_the_readme_lead_somewhere_from_an_index(built: Path) -> None:
    [wheel] = built.glob("saesteer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"saesteer-{PROJECT['version']}.dist-info/METADATA").decode()
    tagged = rf"{re.escape(PROJECT['urls']['Repository'])}/(?:blob|raw)/v{re.escape(PROJECT['version'])}/"
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20
    for link in links:
        path, found = re.subn(tagged, "", link)
        assert found and (ROOT / path.partition("#")[0]).exists(), link


@pytest.fixture
def unpacked(built: Path, tmp_path: Path) -> Path:
    [path] = built.glob("saesteer-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    with zipfile.ZipFile(next(built.glob("saesteer_demo-*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    return folder


def run_tests(folder: Path, *words: str) -> None:
    """In the archive, beside the package of the demo."""
    paths = os.pathsep.join([str(folder), str(folder.parent / "installed")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@in_clone
def test_tests_of_the_archive_run(unpacked: Path) -> None:
    assert not list((unpacked / "saesteer/data").glob("*.safetensors"))
    assert (unpacked / "saesteer/kernels").readlink() == Path("../kernels")
    run_tests(
        unpacked, "tests/spec/test_sites.py", "tests/cli/test_labels.py::test_known_features_are_among_the_first_three"
    )


@in_clone
@pytest.mark.slow
@pytest.mark.long
def test_all_quick_tests_of_the_archive_pass(unpacked: Path) -> None:
    run_tests(unpacked, "-m", "not slow and not network", "-n", "2", "--dist", "loadfile")


def repository(folder: Path, names: Iterable[str]) -> None:
    """These files of ours with a date in the changes, committed to a repository of their own."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=LEFT_OUT)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    changes = folder / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(", not yet released", ", 2026-12-01", 1))
    for words in ("init -q", "config user.name a", "config user.email a", "add -f .", "commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)


def test_a_release_is_refused_with_all_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [unreleased] = disagreeing(ROOT, PROJECT["version"])
    assert unreleased == "CHANGELOG.md, first heading, has 'not yet released', expected a date"
    files = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "saesteer/__init__.py", "packages/demo/pyproject.toml")
    repository(tmp_path, files)
    (tmp_path / "new").touch()
    assert main(["9.9.9", "--dry-run"], tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and "saesteer/__init__.py has version '0.1.0', expected '9.9.9'" in said


@in_clone
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_release_is_tagged_and_nothing_is_sent(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tops = {name_of(path).partition("/")[0] for path in ours()}
    repository(tmp_path / "copy", tops)
    tag = f"v{PROJECT['version']}"
    assert main([PROJECT["version"], "--out", str(tmp_path / "out"), *words], tmp_path / "copy") == 0
    tags = subprocess.run(["git", "tag"], cwd=tmp_path / "copy", capture_output=True, text=True, check=True).stdout
    assert tags.split() == ([] if words else [tag])
    said = capsys.readouterr().out
    assert f"git push origin main {tag}" in said and "twine upload" in said
