"""The bridge to Inspect, with the real package in an environment of its own, on a task made here."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.bridges.environments import ROOT, environment
from tests.bridges.stand_in import PLAIN, STEERED, serving

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


def install(folder: Path) -> None:
    """What an installed saesteer has beside its code: the entry point by which Inspect finds the provider."""
    group = "inspect_ai"
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    about = folder / "saesteer-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: saesteer\nVersion: 0\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_steering_changes_the_score(tmp_path: Path) -> None:
    spec, python = (
        {"edits": [{"op": "clamp", "dictionary": "demo", "feature": 1, "value": 2.0}]},
        environment(*PACKAGES),
    )
    install(tmp_path)
    (tmp_path / "sky.py").write_text(TASK)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    with serving({STEERED: 1, PLAIN: 2}) as server:
        quiet = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "SAESTEER_BASE_URL": server.url,
            "INSPECT_DISPLAY": "plain",
        }
        command = [str(python.with_name("inspect")), "eval", "sky.py", "--log-format", "json", "--log-dir", "logs"]
        models = ["--model", "saesteer/demo,saesteer/demo@spec.json"]
        done = subprocess.run(
            [*command, *models],
            cwd=tmp_path,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        sent = [body.get("saesteer") for body in server.bodies]
    assert [sent.count(None), sent.count(spec)] == [3, 3]
    assert {body["model"] for body in server.bodies} == {"demo"}
    logs = [json.loads(file.read_text()) for file in (tmp_path / "logs").glob("*.json")]
    scores = {one["eval"]["model"]: one["results"]["scores"][0]["metrics"]["accuracy"]["value"] for one in logs}
    assert scores == {"saesteer/demo": 0.0, "saesteer/demo@spec.json": 1.0}
