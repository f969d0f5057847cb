"""What `saesteer serve` hands to vLLM: its words and its environment."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from saesteer.commands import attended, serve
from saesteer.commands.cli import app
from saesteer.commands.embedded import DEMO_SAE, DEMO_TRANSCODER
from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError


class Became(Exception):
    """The process would be vLLM now."""


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the process became, instead of becoming it."""
    seen: dict[str, Any] = {}

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        assert words[1] == "-P", "see test_folder.py"
        seen.update(program=program, words=[words[0], *words[2:]], environment=environment)
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    return seen


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def additional_config(words: list[str]) -> Any:
    assert words.count("--additional-config") == 1
    return json.loads(words[words.index("--additional-config") + 1])


def test_serve_becomes_vllm(model: str, become: dict[str, Any]) -> None:
    config = read_settings([f"gs={DEMO_SAE}@resid_post.3"], ["resid_post.1,resid_mid.2", "resid_pre.0"], max_edits=32)
    with pytest.raises(Became):
        serve.serve(model, config, ["--port", "8001", "--enforce-eager"])
    assert become["program"] == sys.executable
    words = become["words"]
    assert words[:5] == [sys.executable, "-m", "saesteer.plugin.vllm_cli", "serve", model]
    assert words[5:8] == ["--port", "8001", "--enforce-eager"]
    assert SaesteerConfig.from_json(additional_config(words)["saesteer"]) == config


def test_every_flag_of_ours_is_heard_and_every_other_goes_to_vllm(
    model: str, become: dict[str, Any], tmp_path: Path
) -> None:
    np.save(tmp_path / "happy.npy", np.ones(576, np.float32))
    (tmp_path / "calm.json").write_text('{"edits": [{"op": "ablate", "vector": "happy", "site": "resid_post.2"}]}')
    (tmp_path / "more.yaml").write_text("vectors: {sad: happy.npy}\nmax_edits: 8\n")
    words = ["--port", "1", "--vector", f"happy={tmp_path}/happy.npy", "--module", f"calm={tmp_path}/calm.json"]
    words += ["--sites", "resid_post.all", "--pool-rows", "9", "--inline-rows", "2", "--max-edits", "16"]
    words += ["--dictionary", f"gs={DEMO_SAE}", "--saesteer-config", f"{tmp_path}/more.yaml", "--seed=7"]
    words += ["--max-dose", "0.5", "--max-dose-action", "refuse"]
    words += ["--default-module", "calm", "--default-module-required", "--require", "spec"]
    words += ["--dictionary", f"stored=rows:{DEMO_SAE}@resid_post.2"]
    words += ["--dictionary-folder", str(DEMO_SAE.parent), "--consumer", "logging", "--capture", "z.1,resid_pre.all"]
    words += ["--consumer", f'filesystem={{"folder": "{tmp_path}/asked"}}', "--capture-folder", f"{tmp_path}/captured"]
    words += ["--max-results-mib", "8", "--result-seconds", "7"]
    words += ["--playground", "--neuronpedia", "--fail-fast", "--fail-fast-after", "64", "--memory-guard", "0.9"]
    words += ["--allow-host", "box.example,box.lan"]
    with pytest.raises(Became):
        CliRunner().invoke(app, ["serve", model, *words], catch_exceptions=False)
    assert become["words"][4:8] == [model, "--port", "1", "--seed=7"]
    said = additional_config(become["words"])["saesteer"]
    whole = {"site": None, "rows": False, "version": None}
    usual = {"bias": None, "function": None}
    unsaid = json.loads(json.dumps(SaesteerConfig().to_json()))
    assert {name: one for name, one in said.items() if one != unsaid[name]} == {
        "dictionaries": {
            "gs": {"path": str(DEMO_SAE), **whole},
            "stored": {"path": str(DEMO_SAE), **whole, "site": "resid_post.2", "rows": True},
        },
        "vectors": {name: {"path": f"{tmp_path}/happy.npy", **usual} for name in ("sad", "happy")},
        "modules": {"calm": f"{tmp_path}/calm.json"},
        "sites": ["resid_post.all"],
        "max_edits": 16,
        "pool_rows": 9,
        "inline_rows": 2,
        "max_results_mib": 8,
        "result_seconds": 7,
        "dictionary_folder": str(DEMO_SAE.parent),
        "default_module": "calm",
        "require": ["spec", "default"],
        "max_dose": 0.5,
        "max_dose_action": "refuse",
        "consumers": {"logging": {}, "filesystem": {"folder": f"{tmp_path}/asked"}},
        "capture": ["z.1", "resid_pre.all"],
        "capture_folder": f"{tmp_path}/captured",
        "fail_fast": True,
        "fail_fast_after": 64,
        "memory_guard": 0.9,
        "allow_hosts": ["box.example", "box.lan"],
        "playground": True,
        "neuronpedia": True,
    }
    assert not [*tmp_path.glob("*/.*")], "the folders can be written to, and nothing is in them"


@pytest.mark.parametrize(
    ("verbose", "variable", "quiet"),
    [
        (False, "", True),
        (True, "", False),
        (False, "VLLM_LOGGING_LEVEL", False),
        (False, "VLLM_CONFIGURE_LOGGING", False),
    ],
)
def test_a_terminal_is_quiet_unless_the_log_is_wanted(
    model: str, become: dict[str, Any], verbose: bool, variable: str, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words and environment are the same. Without a terminal, as in all other tests here, the process becomes vLLM."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    if variable:
        monkeypatch.setenv(variable, "1")
    run: dict[str, Any] = {}

    def attend(_: Any, words: list[str], environment: dict[str, str], about: Any) -> int:
        run.update(words=words, environment=environment, about=about({"API": "http://h:1/v1", "sites": "z.1"}))
        return 5

    monkeypatch.setattr(attended, "run", attend)
    with pytest.raises(SystemExit if quiet else Became) as caught:
        serve.serve(model, read_settings([]), ["--api-key", "k"], verbose=verbose)
    if not quiet:
        assert not run
        return
    assert isinstance(caught.value, SystemExit) and caught.value.code == 5 and not become
    assert run["words"][:5] == [sys.executable, "-P", "-m", "saesteer.plugin.vllm_cli", "serve"]
    assert run["environment"]["PYTHONSAFEPATH"] == "1"
    assert run["about"] == {
        "page": "none; --playground serves one",
        "curl": "curl -s -H 'Authorization: Bearer KEY' http://h:1/v1/saesteer",
        "model": model,
        "sites": "z.1",
    }


@pytest.mark.parametrize("name", ["additional-config", "additional_config"])
def test_a_file_of_vllms_arguments_loses_nothing(model: str, become: dict[str, Any], name: str, tmp_path: Path) -> None:
    """vLLM reads it before the command line, whose --additional-config would replace the file's."""
    file = tmp_path / "vllm.yaml"
    file.write_text("max-model-len: 64\n")
    with pytest.raises(Became):
        serve.serve(model, read_settings([]), ["--config", str(file)])
    assert "--config" in become["words"]
    file.write_text(f"max-model-len: 64\n{name}:\n  other: 1\n")
    with pytest.raises(ConfigError, match="has additional-config, which saesteer's own part would replace"):
        serve.serve(model, read_settings([]), ["--config", str(file)])


@pytest.mark.parametrize(
    "form", [["--additional-config", '{"a": 1}'], ['--additional_config={"a": 1}']], ids=["two", "one"]
)
def test_users_additional_config_is_kept(model: str, become: dict[str, Any], form: list[str]) -> None:
    with pytest.raises(Became):
        serve.serve(model, read_settings([]), ["--port", "1", *form, "--seed", "7"])
    words = become["words"]
    assert words[5:9] == ["--port", "1", "--seed", "7"]
    found = additional_config(words)
    assert (found["a"], found["saesteer"]["max_edits"]) == (1, 64)


def test_demo_brings_model_dictionary_and_options(
    model: str, become: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "ensure_model", lambda *_, **__: Path(model))
    monkeypatch.setattr(
        serve, "engine_options", lambda: {"max_model_len": 2048, "dtype": "bfloat16", "enforce_eager": True}
    )
    with pytest.raises(Became):
        serve.serve("demo", read_settings([]), ["--max_model_len=512", "--no-enforce-eager"])
    words = become["words"]
    assert words[4:7] == [model, "--max_model_len=512", "--no-enforce-eager"]
    assert words[7:13] == ["--dtype", "bfloat16", "--served-model-name", "demo", "--host", "127.0.0.1"]
    sources = {"demo": str(DEMO_SAE), "demo-mlp": str(DEMO_TRANSCODER)}
    config = additional_config(words)["saesteer"]
    assert config["playground"] is True
    held = config["dictionaries"]
    assert held == {
        name: {"path": path, "site": None, "rows": False, "version": None} for name, path in sources.items()
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "saesteer"}),
        ({"VLLM_PLUGINS": "a,b"}, {"VLLM_PLUGINS": "a,b,saesteer"}),
        ({"VLLM_PLUGINS": "saesteer,a"}, {"VLLM_PLUGINS": "saesteer,a"}),
    ],
)
def test_vllm_plugins(given: dict[str, str], expected: dict[str, str]) -> None:
    assert serve.environment(given) == expected | {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_the_admins_key_goes_by_the_environment(
    model: str, become: dict[str, Any], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--saesteer-admin-key", "secret"] if by == "flag" else []
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "other" if by == "flag" else "secret")
    with pytest.raises(Became):
        CliRunner().invoke(app, ["serve", model, "--port", "1", *words], catch_exceptions=False)
    assert become["environment"]["SAESTEER_ADMIN_KEY"] == "secret"
    assert "secret" not in " ".join(become["words"])


def test_a_file_of_vllms_arguments_says_where_the_demo_listens(
    model: str, become: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Words of the command line win over the file, so those that nobody has given stay away."""
    monkeypatch.setattr(serve, "ensure_model", lambda *_, **__: Path(model))
    monkeypatch.setattr(serve, "engine_options", lambda: {"max_model_len": 2048, "dtype": "bfloat16"})
    file = tmp_path / "vllm.yaml"
    file.write_text("host: 0.0.0.0\nmax_model_len: 64\n")
    with pytest.raises(Became):
        serve.serve("demo", read_settings([]), ["--config", str(file)])
    words = become["words"]
    assert "--host" not in words and "--max-model-len" not in words
    assert words[words.index("--dtype") + 1] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        (["--hf-token", "hf_x"], ""),
        (["--hf_token"], ""),
        (["--code-revision", "v1"], ""),
        (["--trust-remote-code"], ""),
        ([], "True"),
        ([], "1"),
    ],
)
def test_a_model_that_vllm_finds_otherwise_is_left_to_vllm(
    become: dict[str, Any], flags: list[str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", variable)
    with pytest.raises(Became):
        serve.serve("org/gated", read_settings([]), flags)
    assert become["words"][4] == "org/gated"


def test_the_admins_key_may_stand_in_a_file(
    model: str, become: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SAESTEER_ADMIN_KEY", raising=False)
    file = tmp_path / "key"
    monkeypatch.setenv("SAESTEER_ADMIN_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=r"SAESTEER_ADMIN_KEY_FILE .*key cannot be read"):
        serve.serve(model, read_settings([]), [])
    for wrong, words in (("", "is empty"), ("two words", "cannot be sent in a header")):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=f"SAESTEER_ADMIN_KEY_FILE .*{words}"):
            serve.serve(model, read_settings([]), [])
    file.write_text("secret\n")
    with pytest.raises(ConfigError, match="equals a key of --api-key"):
        serve.serve(model, read_settings([]), ["--api-key", "secret"])
    assert not become
    with pytest.raises(Became):
        serve.serve(model, read_settings([]), [])
    given = become["environment"]
    assert "SAESTEER_ADMIN_KEY" not in given and given["SAESTEER_ADMIN_KEY_FILE"] == str(file)
    with pytest.raises(Became):
        serve.serve(model, read_settings([]), [], "other")
    given = become["environment"]
    assert given["SAESTEER_ADMIN_KEY"] == "other" and "SAESTEER_ADMIN_KEY_FILE" not in given


@pytest.mark.parametrize("key", ["two words", "schlüssel", "new\nline"])
def test_a_key_that_no_header_carries_is_refused(model: str, become: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="--saesteer-admin-key"):
        serve.serve(model, read_settings([]), [], key)
    assert not become


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        (["--api-key", "same"], ""),
        (["--api_key=same", "--port", "1"], "other"),
        (["--api-key", "other", "same", "--enforce-eager"], ""),
        (["--port", "1"], "same"),
    ],
)
def test_a_key_that_everybody_has_is_refused(
    model: str, become: dict[str, Any], monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    with pytest.raises(ConfigError, match="--saesteer-admin-key equals a key of --api-key or VLLM_API_KEY"):
        serve.serve(model, read_settings([]), flags, "same")
    assert not become
    with pytest.raises(Became):
        serve.serve(model, read_settings([]), flags, "another")
