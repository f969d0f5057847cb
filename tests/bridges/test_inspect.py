"""The bridge to Inspect, with the real package in an environment of its own, on a task made here."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.bridges.environments import ROOT, environment
from tests.bridges.stand_in import PLAIN, STEERED, StandIn, serving

pytestmark = [pytest.mark.slow, pytest.mark.long]  # pip installs for a minute or two

PACKAGES = ("inspect-ai==0.3.285", "openai")
TASK = f"""
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match

@task
def sky():
    return Task(dataset=[Sample(input=f"What is the sky of day {{n}}?", target="{STEERED.strip()}") for n in range(3)],
                scorer=match())
"""

SPEC = {"edits": [{"op": "clamp", "dictionary": "demo", "feature": 1, "value": 2.0}]}


def install(folder: Path) -> None:
    """What an installed saesteer has beside its code: the entry point by which Inspect finds the provider."""
    group = "inspect_ai"
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    about = folder / "saesteer-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: saesteer\nVersion: 0\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def evaluate(server: StandIn, folder: Path, models: str, *more: str) -> "subprocess.CompletedProcess[str]":
    """The command of the docs, in the harness's environment."""
    install(folder)
    (folder / "sky.py").write_text(TASK)
    (folder / "spec.json").write_text(json.dumps(SPEC))
    quiet = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "SAESTEER_BASE_URL": server.url,
        "INSPECT_DISPLAY": "plain",
    }
    inspect = str(environment(*PACKAGES).with_name("inspect"))
    command = [inspect, "eval", "sky.py", "--log-format", "json", "--log-dir", "logs", "--model", models, *more]
    return subprocess.run(
        command, cwd=folder, env=os.environ | quiet, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("more", [[], ["-M", "stream=true"]], ids=["whole", "stream"])
def test_steering_changes_the_score(tmp_path: Path, more: list[str]) -> None:
    with serving({STEERED: 1, PLAIN: 2}) as server:
        done = evaluate(server, tmp_path, "saesteer/demo,saesteer/demo@spec.json", *more)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        sent = [body.get("saesteer") for body in server.bodies]
        assert all(bool(body.get("stream")) is bool(more) for body in server.bodies)
    assert [sent.count(None), sent.count(SPEC)] == [3, 3]
    assert {body["model"] for body in server.bodies} == {"demo"}
    logs = [json.loads(file.read_text()) for file in (tmp_path / "logs").glob("*.json")]
    scores = {one["eval"]["model"]: one["results"]["scores"][0]["metrics"]["accuracy"]["value"] for one in logs}
    assert scores == {"saesteer/demo": 0.0, "saesteer/demo@spec.json": 1.0}


def test_a_server_without_saesteer_is_refused(tmp_path: Path) -> None:
    with serving({STEERED: 1, PLAIN: 2}) as server:
        server.windows = None
        evaluate(server, tmp_path, "saesteer/demo@spec.json")
    [log] = [json.loads(file.read_text()) for file in (tmp_path / "logs").glob("*.json")]
    assert log["status"] == "error"
    assert "the server runs without saesteer, and nothing was steered" in log["error"]["message"]
