"""What test files reach, in a small repository and in this one, and which of their runs are stored."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slow_runs import Runs
from tools.reach import Reach, repository

FILES = {
    "tests/conftest.py": "from tests.serving import served, HOST\n@pytest.fixture\ndef server(): return served()\n",
    "tests/serving.py": "from tests.far import far\nHOST = 1\ndef served(): return ['python', '-m', 'saesteer'], far\n",
    "tests/far.py": "def far(): return open('docs/page.md')\n",
    "docs/page.md": "`saesteer.client.client` is for Python.",
    "saesteer/__init__.py": "",
    "saesteer/__main__.py": "from saesteer.commands.cli import main\n",
    "saesteer/commands/cli.py": "def main(): from saesteer import errors\n",
    "saesteer/errors.py": '"""For saesteer.engine.engine."""\n',
    "saesteer/engine/__init__.py": "",
    "saesteer/engine/engine.py": "from saesteer.errors import Wrong\nopen('data/one.json')\n",
    "saesteer/data/one.json": "{}",
    "saesteer/client/client.py": "",
    "kernels/add.py": "",
    "tests/test_server.py": "def test_it(server): pass\n",
    "tests/test_host.py": "from tests.serving import HOST\n",
    "tests/test_engine.py": "CODE = 'from saesteer.engine import engine'\n",
    "tests/test_kernels.py": "from importlib import import_module\nimport_module(f'saesteer.kernels.{1}')\n",
}
SERVED = {"saesteer/__main__.py", "saesteer/commands/cli.py", "saesteer/errors.py", "docs/page.md"}
ENGINE = {"saesteer/engine/__init__.py", "saesteer/engine/engine.py", "saesteer/errors.py", "saesteer/data/one.json"}


@pytest.fixture
def small(tmp_path: Path) -> Reach:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Reach(tmp_path, FILES)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("server", SERVED | {"saesteer/client/client.py", "tests/serving.py", "tests/far.py"}),
        ("host", {"tests/serving.py"}),
        ("engine", ENGINE),
        ("kernels", {"kernels/add.py"}),
    ],
)
def test_what_a_test_names_is_reached(small: Reach, test: str, expected: set[str]) -> None:
    name = f"tests/test_{test}.py"
    assert set(small.distances(name)) == expected | {name, "tests/conftest.py", "saesteer/__init__.py"}


def test_a_digest_changes_with_what_is_reached_alone(small: Reach) -> None:
    before = {name: small.digest(name) for name in FILES if name.startswith("tests/test_")}
    (small.root / "saesteer/data/one.json").write_text("[]")
    changed = {name for name, digest in before.items() if digest != small.digest(name)}
    assert changed == {"tests/test_engine.py"}


def test_real_tests_reach_what_they_start() -> None:
    reach = repository()
    inside, served = (set(reach.distances(f"tests/plugin/test_{name}.py")) for name in ("reads", "http"))
    worker = {"saesteer/plugin/worker/worker.py", "kernels/reference.py", "saesteer/planning/planner.py"}
    assert worker <= inside and worker <= served
    cli = "saesteer/commands/cli.py"
    assert cli in served and cli not in inside


def test_only_whole_runs_without_a_failure_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    tests, reach = (
        {"good": 2, "bad": 2, "skipped": 1, "left": 2},
        dict.fromkeys(("good", "bad", "skipped", "left"), "now"),
    )
    runs = Runs(path, tests, reach, append=True)

    def report(nodeid: str, outcome: str = "passed") -> None:
        for when in ("call", "teardown"):
            said = outcome if when == "call" else "passed"
            one: Any = SimpleNamespace(
                nodeid=nodeid, when=when, duration=1.5, passed=said == "passed", failed=said == "failed"
            )
            runs.pytest_runtest_logreport(one)

    for nodeid, outcome in [
        ("good::a", "passed"),
        ("bad::a", "failed"),
        ("skipped::a", "skipped"),
        ("left::a", "passed"),
    ]:
        report(nodeid, outcome)
    report("bad::b")
    report("good::b", "skipped")
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["file"], row["seconds"], row["reach"]) == ("good", 6.0, "now")
    again = Runs(path, tests, reach, append=False)
    assert set(again.unchanged) == {"good"} and again.place("good") > again.place("bad") == 0
    assert not Runs(path, tests, {**reach, "good": "later"}, append=False).unchanged
