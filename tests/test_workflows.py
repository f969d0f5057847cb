"""What GitHub runs: the commands of the workflows run here as they stand there. Also what pre-commit runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_architecture import ROOT
from tests.test_deploy import linter

FOLDER = ROOT / ".github/workflows"
# The file and what it runs: `.ci/run` runs this test, and make and gh are run below.
EXPECTED = {"ci.yml": [".ci/run"], "docs.yml": ["make docs"]}
CONTRACT = "make contract ISSUE=build/issue.md"


@pytest.fixture
def set_up() -> None:
    """Commands set up first, and the environment may be another folder's."""
    if subprocess.run(["make", "--question", ".venv/.ready"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the environment is not this folder's newest; make setup")


def commands(name: str) -> list[str]:
    """What a workflow runs, in order."""
    jobs: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def run(command: str, folder: Path = ROOT, **env: str) -> "subprocess.CompletedProcess[str]":
    """As GitHub's runners do."""
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    return subprocess.run(words, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False)


def test_each_command_is_run_by_a_test() -> None:
    found = {path.name: commands(path.name) for path in FOLDER.iterdir()}
    first, issue = found.pop("nightly.yml")
    assert found == EXPECTED and first == CONTRACT and "gh issue create" in issue
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for command in ["make docs", CONTRACT]:
        assert run(f"{command} --dry-run").returncode == 0


def test_linters_of_workflows_would_find_something(tmp_path: Path) -> None:
    """`make check` runs them on what is there."""
    for name in (".github", "Makefile", "pyproject.toml", "tools"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/check-jsonschema").symlink_to(linter("check-jsonschema"))
    (tmp_path / ".venv/.ready").touch()
    path = tmp_path / ".github/workflows/ci.yml"
    path.write_text(path.read_text().replace("runs-on", "run-on"))
    done = run("make workflows", tmp_path)
    assert done.returncode == 2 and "ci.yml" in done.stdout


@pytest.mark.parametrize("known", [0, 1])
def test_an_issue_is_written_once(known: int, tmp_path: Path) -> None:
    """By the command as it stands, and a program gh that keeps what it gets."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build/issue.md").write_text("vLLM 9.9 differs\n\n- a row\n")
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/bash\n[ "$2" != list ] || {{ echo {known}; exit; }}\nprintf "%s|" "$@"; cat\n')
    gh.chmod(0o755)
    done = run(commands("nightly.yml")[1], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    made = "issue|create|--title|vLLM 9.9 differs|--body-file|-|- a row\n"
    assert done.stdout == ("" if known else made)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("set_up")
def test_the_site_is_built() -> None:
    done = run(commands("docs.yml")[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build/site/README.html").is_file()


@pytest.mark.network
@pytest.mark.usefixtures("set_up")
def test_the_contract_is_read() -> None:
    done = run(commands("nightly.yml")[0])
    assert done.returncode in (0, 2), done.stdout + done.stderr  # 2: make's, of a row that fails
    assert "of vLLM" in done.stdout or "the contract" in done.stdout


def test_pre_commit_runs_what_is_there() -> None:
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for hook in local["hooks"]:
        program, *words = hook["entry"].split()
        assert words[0] in targets if program == "make" else linter(Path(program).name)
