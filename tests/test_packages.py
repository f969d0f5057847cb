"""What is published: a small wheel, the package of the demo, and an archive whose tests run."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from saesteer.commands.embedded import DICTIONARIES
from tests.test_architecture import OUR_FILES, ROOT, name_of
from tests.test_deploy import MADE_OF, lint, linter

BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")
# Searches the embedded labels.
FEATURES = "tests/cli/test_labels.py::test_known_features_are_among_the_first_three"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    out = copy / "dist"
    for folder, kind in ((copy, "sdist"), (copy, "wheel"), (copy / "packages/demo", "wheel")):
        command = [sys.executable, "-c", BUILD.format(kind, str(out))]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return out


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
    assert wheel.stat().st_size < 1_000_000


def test_the_demo_is_a_package_of_the_same_files(built: Path) -> None:
    [wheel] = built.glob("saesteer_demo-*.whl")
    names = held(wheel)
    for file in DICTIONARIES.values():
        for path in (file, file.with_name(f"{file.name}.labels")):
            assert names[f"saesteer_demo/{path.name}"] == path.stat().st_size
    project = tomllib.loads((ROOT / "packages/demo/pyproject.toml").read_text())["project"]
    [wanted] = [
        one for one in map(Requirement, PROJECT["optional-dependencies"]["demo"]) if one.name == project["name"]
    ]
    assert project["version"] in wanted.specifier


def test_linters_of_indexes_find_nothing(built: Path) -> None:
    files = sorted(map(str, built.iterdir()))
    lint(linter("twine"), "check", "--strict", *files)
    lint(linter("check-wheel-contents"), *(one for one in files if one.endswith(".whl")))


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
    [path] = built.glob("*.tar.gz")
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


def test_tests_of_the_archive_run(unpacked: Path) -> None:
    assert not list((unpacked / "saesteer/data").glob("*.safetensors"))
    run_tests(
        unpacked, "tests/spec/test_sites.py", "tests/cli/test_labels.py::test_known_features_are_among_the_first_three"
    )


@pytest.mark.slow
@pytest.mark.long
def test_all_quick_tests_of_the_archive_pass(unpacked: Path) -> None:
    run_tests(unpacked, "-m", "not slow and not network", "-n", "2", "--dist", "loadfile")
