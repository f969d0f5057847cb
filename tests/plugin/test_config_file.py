"""SAESTEER_CONFIG names the settings file of engines that other programs make."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.commands.serve import environment
from saesteer.config.config import KEY
from saesteer.errors import ConfigError
from saesteer.plugin import configured
from tests.apart import hear
from tests.plugin.conftest import BRIDGE, Dictionaries

START = """
import json, os, sys
from vllm import LLM, SamplingParams
from tests.apart import tell
if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    found = LLM(**options).chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2))[0].outputs[0]
    told = [[one["edit"] for one in found.saesteer["applied"]]]
    try:
        LLM(**options, additional_config={"saesteer": {}})
    except Exception as error:
        told.append(str(error))
    tell(told)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "settings.yaml"
    found.write_text("sites: [resid_post.1]\n")
    monkeypatch.setenv("SAESTEER_CONFIG", str(found))
    return found


def test_it_stands_in_for_additional_config(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = configured._configuring(lambda self: seen.append(self.additional_config))
    arguments = SimpleNamespace(additional_config={"other": 1})
    for _ in range(2):
        make(arguments)
    assert [(one["other"], one[KEY]["sites"]) for one in seen] == [(1, ("resid_post.1",))] * 2
    assert arguments.additional_config == {"other": 1}, "the caller's own stays as it is"
    with pytest.raises(ConfigError, match=r"settings\.yaml, and additional_config has 'saesteer' as well"):
        make(SimpleNamespace(additional_config={KEY: {}}))
    assert "SAESTEER_CONFIG" not in environment({"SAESTEER_CONFIG": "x"}), "`saesteer serve` has read it"
    file.write_text("sides: []\n")
    with pytest.raises(ConfigError, match=r"settings\.yaml.*sides"):
        make(arguments)
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    make(arguments)
    assert seen[-1] == {"other": 1}


@pytest.mark.slow
def test_an_engine_of_a_program_that_does_not_know_saesteer(
    model_dir: str, dictionaries: Dictionaries, file: Path
) -> None:
    settings = {**dictionaries.options, "modules": {"m": {"edits": [BRIDGE]}}, "default_module": "m"}
    file.write_text(json.dumps(settings))
    options = {"model": model_dir, "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 100 << 20}
    applied, refused = hear("-c", START, json.dumps(options), timeout=600, fork=True)
    assert applied == ["saesteer.defaults.edits[0]"]
    assert "and additional_config has 'saesteer' as well, expected one of them" in refused
