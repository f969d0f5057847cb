"""The bridge to lm-evaluation-harness, with the real package in an environment of its own, on tasks made here."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saesteer.model import ensure_model
from tests.bridges.environments import ROOT, environment
from tests.bridges.stand_in import PLAIN, STEERED, StandIn, serving

pytestmark = [pytest.mark.slow, pytest.mark.long]  # pip installs for a minute or two

PACKAGES = ("lm-eval[api]==0.4.13", "transformers")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = (
    TASK
    + """
output_type: multiple_choice
doc_to_choice: ["{steered}", "{plain}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
)
GENERATE = (
    TASK
    + """
output_type: generate_until
doc_to_target: "{steered}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
)


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    with serving({word: tokenizer(word).input_ids[0] for word in (STEERED, PLAIN)}) as found:
        yield found


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"The sky of day {n} is"}) + "\n" for n in range(3)))
    for name, text in {"sky_choice": CHOICE, "sky_words": GENERATE}.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(name=name, data=data, steered=STEERED, plain=PLAIN))
    return tmp_path


def compare(server: StandIn, tasks: Path, edit: dict[str, Any], names: str = "sky_choice,sky_words") -> Any:
    """The command of the docs, in the harness's environment."""
    spec = tasks / "spec.json"
    spec.write_text(json.dumps({"edits": [edit]}))
    model = f"model=demo,base_url={server.url}/completions,tokenizer={ensure_model()},max_retries=1"
    command = [str(environment(*PACKAGES)), "-m", "saesteer.bridges.lm_eval", "--spec", str(spec), "--tasks", names]
    command += ["--include-path", str(tasks), "--model-args", model]
    quiet = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tasks / "cache"),
        "COLUMNS": "120",
    }
    server.bodies.clear()
    return subprocess.run(
        command, cwd=tasks, env=os.environ | quiet, capture_output=True, text=True, timeout=600, check=False
    )


CLAMP = {"op": "clamp", "dictionary": "demo", "feature": 1, "value": 2.0}


def test_steering_changes_the_score(server: StandIn, tasks: Path) -> None:
    done = compare(server, tasks, CLAMP)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if "sky" in line]
    assert ["choice" in line for line in lines] == [True, False]
    assert all("0.0000" in line and "1.0000" in line and "+1.0000" in line for line in lines)
    assert {json.dumps(body.get("saesteer")) for body in server.bodies} == {"null", json.dumps({"edits": [CLAMP]})}
    assert {bool(body.get("echo")) for body in server.bodies if "saesteer" in body} == {True, False}


def test_a_scope_of_generated_tokens_is_refused_where_prompts_are_scored(server: StandIn, tasks: Path) -> None:
    generated = CLAMP | {"scope": {"generated": True}}
    done = compare(server, tasks, generated, "sky_choice")
    assert done.returncode != 0
    assert "edits generated tokens alone, but log-likelihoods score the tokens of a prompt" in done.stderr
    assert compare(server, tasks, generated, "sky_words").returncode == 0


def test_a_module_of_generated_tokens_is_refused_by_what_was_applied(server: StandIn, tasks: Path) -> None:
    server.windows = [[1000, None]]
    try:
        done = compare(server, tasks, {"op": "use", "module": "late"}, "sky_choice")
    finally:
        server.windows = [[1, None]]
    assert done.returncode != 0
    assert "edits generated tokens alone" in done.stderr


@pytest.mark.parametrize("task", ["sky_choice", "sky_words"])
def test_a_server_without_saesteer_is_refused(server: StandIn, tasks: Path, task: str) -> None:
    server.windows = None
    try:
        done = compare(server, tasks, CLAMP, task)
    finally:
        server.windows = [[1, None]]
    assert done.returncode != 0
    assert "the server runs without saesteer, and nothing was steered" in done.stderr
