"""The recipe of docs/clients.md for TRL, run as it stands there, with its own generation and with vLLM's."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from saesteer.commands.embedded import dictionaries
from saesteer.model import ensure_model
from tests.bridges.environments import ROOT, environment
from tests.markdown import blocks

pytestmark = [pytest.mark.slow, pytest.mark.long]  # pip installs for a minute

PACKAGES = ("trl==1.16.0",)
FEATURE = 76  # of many words
CLAMP = {"op": "clamp", "dictionary": "demo", "feature": 3497, "value": 2.0, "unit": "max_act"}
# vLLM's build for CPUs repacks weights as it loads them, and loads none a second time.
LEFT_OUT = """
from trl.generation.vllm_generation import VLLMGeneration
VLLMGeneration.sync_weights = lambda self: None
"""


@pytest.mark.parametrize("vllm", [False, True], ids=["own", "vllm"])
def test_the_recipe_runs(tmp_path: Path, vllm: bool) -> None:
    [recipe] = blocks((ROOT / "docs/clients.md").read_text(), "python trl")
    more = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": []}
    if vllm:
        steered = {"extra_args": {"saesteer": {"edits": [CLAMP]}}}
        more |= {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": steered}
        more |= {"vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 128}
    dictionary = str(dictionaries()["demo"])
    given = {
        "FOLDER": str(ensure_model()),
        "DICTIONARY": dictionary,
        "FEATURE": FEATURE,
        "OUT": str(tmp_path),
        "MORE": more,
    }
    names = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    (tmp_path / "train.py").write_text(f"{names}{LEFT_OUT if vllm else ''}\n{recipe}")
    (tmp_path / "settings.yaml").write_text(json.dumps({"dictionaries": {"demo": dictionary}}))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SAESTEER_CONFIG": str(tmp_path / "settings.yaml")}
    python = environment(*PACKAGES, beside=True)
    command = [str(python), str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    [rewards] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rewards) == 1 and rewards[0] > 1
