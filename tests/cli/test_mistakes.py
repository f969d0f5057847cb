"""Mistakes on the command line, as a user makes them: one sentence on stderr, exit code 2, no traceback."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from saesteer import __version__
from saesteer.commands.embedded import DEMO_SAE
from saesteer.errors import LoadError
from saesteer.loaders.vectors import read_vectors
from tests.cli.commands import ENVIRONMENT, mistake, saesteer


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A folder with the config of a model that is 64 wide and has 2 layers."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def assert_one_sentence(done: "subprocess.CompletedProcess[str]", *parts: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("saesteer: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("words", [["demo"], ["serve", "some/model"], ["doctor"]], ids=lambda words: str(words[0]))
def test_no_extra_installed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    said = mistake(*words)
    assert "vLLM is not installed" in said and "pip install 'saesteer[gpu]' or" in said and "make setup" in said


def test_a_mistake_is_one_sentence_on_stderr(small_model: Path) -> None:
    assert_one_sentence(saesteer("serve", str(small_model), "--sites", "middle"), "'middle'")


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "nobody/no-such-model", "not a model", "{empty}"])
def test_unknown_model(model: str, tmp_path: Path) -> None:
    """Of which the last is a folder without a config."""
    place = model.format(empty=tmp_path)
    said = mistake("serve", place, "--dictionary", f"demo={DEMO_SAE}")
    assert f"model '{place}'" in said and ("config" in said or place == model)


WRONG: list[tuple[list[str], str]] = [  # words of serve, a part of what is said
    (["--dictionary", "no-equals-sign"], "expected NAME=PLACE[@SITE]"),
    (["--dictionary", "a=x", "--dictionary", "a=y"], "the name 'a' is taken"),
    (["--dictionary", f"a={DEMO_SAE}@resid_post.nine"], "resid_post.nine"),
    (["--dictionary", f"bridges={DEMO_SAE}"], "'bridges' is 576 wide, but this model is 64 wide"),
    (["--max-edits", "0"], "saesteer.max_edits: got 0, expected an integer from 1 to 4096"),
    (["--max-dose", "0"], "max_dose: got 0.0, expected a number above 0, 1000000 at most"),
    (["--max-dose-action", "refuse"], "max_dose_action: got 'refuse' without saesteer.max_dose"),
    (["--consumer", "filesystem={"], "--consumer filesystem={: not JSON"),
    (
        ["--consumer", "filesystem"],
        "consumers.filesystem has no folder, expected a path, as in --consumer 'filesystem={",
    ),
    (["--capture", "resid_post.1"], "saesteer.capture: has no place for the rows, expected --capture-folder, or a"),
    (["--capture-folder", "rows"], "saesteer.capture: is missing, expected sites for --capture-folder"),
    (["--capture", "resid_post.2", "--capture-folder", "/proc/no"], "resid_post.2 does not exist"),
    (["--capture", "resid_post.1", "--capture-folder", "/proc/no"], "folder /proc/no: cannot be written to"),
    (["--capture", "mlp_in_pregain.1", "--capture-folder", "/proc/no"], "'mlp_in_pregain.1' is not served"),
    (["--vector", "happy=/no/such.gguf"], "/no/such.gguf: no such file"),
    (["--saesteer-config", "/no/such.yaml"], "/no/such.yaml: cannot be read"),
    (["--additional-config", "[1]"], "expected a JSON object"),
    (["--additional-config", "{"], "expected a JSON object"),
    (["--additional-config", '{"saesteer": {}}'], "already has 'saesteer'"),
    (["--additional-config.key", "1"], "one JSON object"),
    (["--dictionary", "gs=/no/such/file.safetensors"], "/no/such/file.safetensors: no such file"),
    (["--dictionary", "gs=nobody/no-such-dictionary"], "nobody/no-such-dictionary: no such file"),
    (["--sites", "resid_post.2"], "layers 0 to 1"),
]


@pytest.mark.parametrize(("words", "part"), WRONG, ids=lambda one: "-".join(one)[:40] if isinstance(one, list) else "")
def test_wrong_words(small_model: Path, words: list[str], part: str) -> None:
    assert part in mistake("serve", str(small_model), *words)


def test_the_hub_logs_no_retries() -> None:
    """Its library sets its own level when it is imported."""
    code = (
        "import sys\nfrom saesteer.commands.cli import main\nsys.argv[1:] = ['--version']\n"
        "try: main()\nfinally:\n import logging\n from huggingface_hub import snapshot_download\n"
        " assert not logging.getLogger('huggingface_hub').isEnabledFor(logging.WARNING)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    done = saesteer("--version")
    assert (done.returncode, done.stdout) == (0, f"saesteer {__version__}\n")


def test_python_m() -> None:
    outputs = []
    for place in ("demo", str(DEMO_SAE)):
        done = subprocess.run([sys.executable, "-m", "saesteer", "inspect", place], capture_output=True, text=True)
        assert done.returncode == 0
        outputs.append(done.stdout)
    assert "resid_post.15" in outputs[0] and "9,216" in outputs[0] and outputs[0] == outputs[1]


def test_a_file_does_not_speak_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[32mAll checks passed\u202e"
    arrays = {name: np.ones(4, np.float32) for name in (evil, "layer.3")}
    save_file(arrays, tmp_path / "vectors.safetensors")
    with pytest.raises(LoadError, match="All checks passed") as caught:
        read_vectors(tmp_path / "vectors.safetensors")
    assert str(caught.value).isprintable() and str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    (tmp_path / "settings.yaml").write_text(json.dumps({evil: 1}))
    assert "All checks passed" in mistake("serve", "demo", "--saesteer-config", f"{tmp_path}/settings.yaml")
    done = saesteer("inspect", evil)
    assert_one_sentence(done, "All checks passed")
    assert done.stderr.strip().isprintable()
