"""What README.md and docs/ tell a reader to run, runs: commands, requests, settings and Python. Knows no prose."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import typer
from safetensors.numpy import save

import saesteer
from saesteer.client import Client
from saesteer.commands.embedded import DEMO_SAE, OCEAN
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.config.modules import read_modules
from saesteer.config.settings import read_settings
from saesteer.consumers import known
from saesteer.engine import doses
from saesteer.errors import SpecError
from saesteer.kernels import layout
from saesteer.labels.store import Labels
from saesteer.language.spec import as_spec, from_json
from saesteer.planning.applied import applied, count
from saesteer.planning.planner import plan
from saesteer.workbench.cli import app

ROOT = Path(__file__).parents[1]
TEXT = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PYTHON, SHELL, JSON = ([code for kind, code in BLOCKS if kind == language] for language in ("python", "", "json"))

# A word of each Python example, by which the test below that runs it finds it.
RUN = {
    "llm": "saesteer.LLM",
    "start": "for value in",
    "failed": "PromptsFailed",
    "openai": "from openai",
    "client": "client.stream",
    "features": "client.features",
    "fetch": "client.fetch",
    "admin": "admin_key",
    "hf": "saesteer.hf",
    "files": "saesteer.load(",
    "shards": "consumers.shards",  # this and the next run in tests/consumers/test_page.py
    "consumer": "class Reward",
}


def example(name: str) -> str:
    [code] = [code for code in PYTHON if RUN[name] in code]
    return code


def test_every_python_example_has_its_test() -> None:
    assert sorted(PYTHON) == sorted(map(example, RUN))


def test_every_command_is_one() -> None:
    """Each line of a block without a language: saesteer's commands and their flags, make's targets, pip's extras."""
    commands: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    whole = [block.replace("\\\n", " ") for block in SHELL]
    lines = [line.strip() for block in whole for line in block.splitlines()]
    lines = [line for line in lines if re.match(r"(saesteer|make|pip|python) ", line)]
    assert len(lines) > 10
    for line in lines:
        program, name, *words = shlex.split(line, comments=True)
        if program == "saesteer":
            commands.commands[name].make_context(name, words)  # raises where a flag or an argument is wrong
        elif program == "make":
            assert name in targets, line
        elif program == "python":
            source = (ROOT / f"{words[0].replace('.', '/')}.py").read_text()
            assert all(f'"{flag}"' in source for flag in words if flag.startswith("--")), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name for words in re.findall(r"\.\[([a-z,]+)\]", TEXT) for name in words.split(",")} <= extras.keys()
    assert set(re.findall(r"`make ([a-z-]+)`", TEXT)) <= set(targets)


def test_json_is_json() -> None:
    """Other tests plan the requests among them; a block may show some fields of an object without its braces."""
    for kind, code in BLOCKS:
        if kind.startswith("json"):
            for one in code.splitlines() if kind == "json chats" else [code]:  # a file of lines
                json.loads(one if one[0] in "{[" else f"{{{one}}}")


def test_entry_points_are_those_that_are_looked_for() -> None:
    [example] = [tomllib.loads(code) for kind, code in BLOCKS if kind == "toml"]
    assert list(example["project"]["entry-points"]) == [known.GROUP]


def test_curl_sends_a_right_spec() -> None:
    [body] = re.findall(r"^curl .*?chat/completions .*? -d '(.*?)'", TEXT, re.DOTALL | re.MULTILINE)
    assert len(from_json(json.loads(body)["saesteer"]).edits) == 1


def test_openai_example_sends_a_right_spec() -> None:
    with patch("openai.OpenAI") as openai:
        exec(example("openai"), {})
    sent = openai.return_value.chat.completions.create.call_args.kwargs
    assert len(from_json(sent["extra_body"]["saesteer"]).edits) == 1


def test_settings_example_is_right(tmp_path: Path) -> None:
    [text] = [code for kind, code in BLOCKS if kind == "yaml"]
    (tmp_path / "settings.yaml").write_text(text)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "golden-gate.json").write_text("{}")
    config = read_settings(file=tmp_path / "settings.yaml")
    assert sorted(read_modules(config.modules, dictionaries=config.dictionaries, vectors=config.vectors)) == [
        "calm",
        "golden-gate",
    ]
    assert config.modules["golden-gate"] == str(tmp_path / "modules" / "golden-gate.json")


def answered(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> None:
    """Every client of an example is answered so."""
    monkeypatch.setattr(Client, "_KIND", partial(httpx.Client, mounts={"http://": httpx.MockTransport(answer)}))


def test_client_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        asked.append(json.loads(request.content))
        choice = {"message": {"content": "The Bridge."}, "delta": {"content": "The Bridge."}}
        body = json.dumps({"choices": [choice], "saesteer": {"applied": []}})
        return httpx.Response(200, content=f"data: {body}\n\ndata: [DONE]\n\n" if asked[-1].get("stream") else body)

    answered(monkeypatch, answer)
    exec(example("client"), {})
    assert capsys.readouterr().out == "The Bridge.\nThe Bridge."
    assert all(len(from_json(body["saesteer"]).edits) == 1 for body in asked)


def test_failed_prompts_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails:
        def generate(self, *_: Any, **__: Any) -> Any:
            error = SpecError("consumer 'reward' failed", field="saesteer.return.consumers.reward", code="consumer")
            raise saesteer.PromptsFailed({1: error}, ["an output", None])

    names: dict[str, Any] = {"saesteer": saesteer, "llm": Fails(), "prompts": [], "params": None, "specs": []}
    exec(example("failed"), names)
    assert names["outputs"] == ["an output", None]
    said = capsys.readouterr().out.strip()
    assert said == "1 saesteer.return.consumers.reward: consumer 'reward' failed" and said[1:] in example("failed")


def test_start_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        asked.append(json.loads(request.content)["saesteer"])
        [edit] = asked[-1]["edits"]
        told = {"applied": [], "dose": [{"site": "resid_post.15", "max": 1.0, "mean": edit["value"] / 4, "tokens": 1}]}
        return httpx.Response(200, json={"choices": [{"message": {"content": "Ocean."}}], "saesteer": told})

    answered(monkeypatch, answer)
    exec(example("start"), {})
    assert capsys.readouterr().out.splitlines() == [f"{v} {v / 4} Ocean." for v in (0.5, 1.0, 2.0, 4.0)]
    assert all(from_json(spec).returns.dose and spec["edits"][0]["feature"] == OCEAN for spec in asked)


def test_admin_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content or b"{}")))
        entry = {"name": "calm", "version": "0123456789abcdef", "uses": 1}
        said = {"choices": [{"message": {"content": "Calm."}}], "saesteer": {"applied": []}}
        return httpx.Response(200, json={"data": [{"id": "demo"}], **said, "modules": [entry], **entry})

    answered(monkeypatch, answer)
    exec(example("admin"), {})
    assert capsys.readouterr().out == "Calm.\n[('calm', '0123456789abcdef', 1)]\n"
    [curl] = re.findall(r"--data '(.*?)'\n", TEXT, re.DOTALL)
    [module] = [body for method, path, body in asked if (method, path) == ("POST", "/v1/saesteer/modules")]
    assert from_json(module["spec"]) == from_json(json.loads(curl)["spec"])
    assert json.loads(curl)["name"] == module["name"]


def test_features_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Answered from the embedded labels, as the server does."""

    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params
        with Labels.open(DEMO_SAE.with_name(f"{DEMO_SAE.name}.labels")) as labels:
            found = labels.find(query["q"], int(query["limit"])) if "q" in query else []
            features = [one for _, one in found] if found else [labels.feature(int(query["feature"]))]
        said = [{**one.to_json(), "dictionary": "demo", "max_act": 5.65} for one in features if one is not None]
        return httpx.Response(200, json={"features": said})

    answered(monkeypatch, answer)
    exec(example("features"), {})
    *found, token = capsys.readouterr().out.splitlines()
    assert len(found) == 3 and any(line.startswith(f"demo {OCEAN} ") for line in found)
    assert token.strip().lower() == "bridge"


def test_fetch_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"a": save({"activations": np.ones((3, 8), np.float32), "positions": np.arange(3)})}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return httpx.Response(200, json={"handle": "a", "deleted": bool(kept.pop("a"))})
        if "results" in request.url.path:
            return httpx.Response(200, content=kept["a"])
        said = {
            "choices": [{"message": {"content": ""}}],
            "saesteer": {"applied": [], "activations": [{"handle": "a"}]},
        }
        return httpx.Response(200, json={"data": [{"id": "demo"}], **said})

    answered(monkeypatch, answer)
    exec(example("fetch"), {})
    assert capsys.readouterr().out == "(3, 8)\n" and not kept


def test_what_an_answer_says_is_what_it_would_say() -> None:
    [body] = re.findall(r"^curl .*?chat/completions .*? -d '(.*?)'", TEXT, re.DOTALL | re.MULTILINE)
    [said] = [block for block in JSON if "tokens_edited" in block]
    [dosed] = [block for block in JSON if block.startswith('"dose"')]
    config = SaesteerConfig.from_json({"dictionaries": {"demo": str(DEMO_SAE)}})
    catalog = Assets.open(config).catalog(width=576, layers=30)
    found = applied(plan(from_json(json.loads(body)["saesteer"]), catalog, 34), catalog)
    count(found, [33 + 47], 0)
    want = json.loads(said)
    assert found == [want]
    [one] = json.loads("{" + dosed + "}")["dose"]
    told = np.zeros(1 + layout.DOSE_WORDS, dtype=np.int32)
    told[1 + layout.DOSE_TOKENS] = want["tokens_edited"]
    told.view(np.float32)[1:3] = one["max"], one["mean"] * want["tokens_edited"]
    assert doses.report(told, 1, [want["site"]]) == [one]


def test_flags_of_the_limit_are_right() -> None:
    [limit] = re.findall(r"saesteer serve … (--max-dose \S+)`", TEXT)
    [action] = re.findall(r"`(--max-dose-action \S+)` its\s+request", TEXT)
    config = read_settings(max_dose=float(limit.split()[1]), max_dose_action=action.split()[1])
    assert (config.max_dose, config.max_dose_action) == (0.5, "refuse")
    [asked] = re.findall(r"`steer=(\{.*?\})`", TEXT)
    spec = as_spec(eval(asked, {"bridge": saesteer.clamp("demo", 3497, 2.0)}))
    assert spec is not None and spec.returns.dose


def test_file_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("files"), {})
    assert capsys.readouterr().out == "saesteer resid_post.15 9216 jumprelu\n(9216, 576)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("openai", ["bridge"]), ("client", ["bridge"]), ("start", ["", "ocean", "ocean", "ocean"])]
)
def test_answers_of_the_examples_have_their_word(
    demo_server: httpx.Client, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    """In the order of the lines, where each is an answer; the weakest dose of the first page need not speak."""
    exec(example(name).replace("http://localhost:8000", str(demo_server.base_url).rstrip("/")), {})
    printed = capsys.readouterr().out.lower()
    lines = printed.splitlines() if len(words) > 1 else [printed]
    assert [word for word, line in zip(words, lines, strict=True) if word not in line] == [], printed


@pytest.mark.slow
def test_transformers_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("hf"), {})
    *text, doses = capsys.readouterr().out.splitlines()
    assert "Bridge" in text[0]
    [dosed] = ast.literal_eval(doses)
    assert dosed["site"] == "resid_post.15" and dosed["tokens"] > 0


@pytest.mark.slow
def test_python_example_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example("llm"))
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, env=quiet, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = done.stdout.splitlines()
    assert "Bridge" not in first and second.startswith("The Bridge.")
