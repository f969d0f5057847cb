"""Dictionaries count in vLLM's memory budget: the KV cache gets what they leave. This file is also an engine's process.

All other tests give the KV cache a size of its own, which skips vLLM's measurement.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from bench.dummy import cache_bytes, model_folder
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.loaders.formats import own
from saesteer.plugin import contract
from saesteer.plugin.results import counts
from saesteer.plugin.worker import worker
from tests.apart import hear, tell

MODEL, WIDTH = "llama-3-1b", 2048  # every layer has full attention, so a block has the size of its tokens
GIB = 1 << 30


def test_what_is_built_behind_the_weights_counts_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 plans the KV cache with this figure; a reload of the model begins it anew."""
    held = [1 * GIB]  # by others

    def allocate(size: int) -> None:
        held[0] += size

    def load_model() -> None:
        allocate(8 * GIB)
        runner.model_memory_usage = 8 * GIB

    def build(*_: Any) -> Any:
        allocate(6 * GIB)
        return SimpleNamespace(engine=SimpleNamespace(warm_reads=lambda: allocate(GIB // 4)), health=None)

    parallel = SimpleNamespace(distributed_executor_backend="mp", world_size=1)
    config = SimpleNamespace(parallel_config=parallel)
    runner = SimpleNamespace(load_model=load_model, vllm_config=config, model_memory_usage=0)
    made: Any = SimpleNamespace(model_runner=runner, is_driver_worker=True, compile_or_warm_up_model=None)
    made.compile_or_warm_up_model = lambda: None
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held[0])
    monkeypatch.setattr(contract, "install", lambda _: None)
    monkeypatch.setattr(counts, "attach", lambda *_: None)
    for name, stand_in in (("_build", build), ("_wrap_v1", lambda *_: None)):
        monkeypatch.setattr(worker, name, stand_in)
    assets: Any = None
    worker.attach(made, assets)
    for _ in range(2):
        runner.load_model()
        assert runner.model_memory_usage == 8 * GIB + 6 * GIB + GIB // 4


@pytest.mark.slow
@pytest.mark.gpu
def test_the_kv_cache_is_smaller_by_a_dictionary_of_4_gib(tmp_path: Path) -> None:
    folder = model_folder(MODEL, tmp_path)
    files = [_zeros(features, tmp_path) for features in (512, 1 << 19)]
    planned = [_tokens(folder, file) * cache_bytes(MODEL) for file in files]
    larger = files[1].stat().st_size - files[0].stat().st_size
    assert larger > 4 * GIB - GIB // 64
    # A larger dictionary also takes more scratch memory, 264 MiB at most.
    assert larger <= planned[0] - planned[1] <= larger + 264 * 2**20 + GIB // 16


def _zeros(features: int, folder: Path) -> Path:
    """A dictionary file: only its size counts, and numbers drawn by chance take minutes."""
    weights = torch.zeros(features, WIDTH, dtype=torch.bfloat16)
    small = torch.zeros(features)
    info = CoderInfo("saesteer", WIDTH, WIDTH, features, "relu", None, "none", None, None, "raw", True, 1, "zeros", "")
    path = folder / f"zeros-{features}.safetensors"
    own.write(path, SparseCoder(weights, small, weights, torch.zeros(WIDTH), info, max_act=small + 1))
    return path


def _tokens(folder: Path, file: Path) -> int:
    """Tokens that vLLM plans the KV cache for, beside the dictionary in a file."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found: int = hear("-m", "tests.plugin.test_memory_budget", str(folder), str(file), environment=environment)
    return found


def _plan(folder: str, file: str) -> None:
    import saesteer

    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    options |= {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 16}
    llm = saesteer.LLM(folder, dictionaries={"d": f"{file}@resid_post.3"}, gpu_memory_utilization=0.5, **options)
    cache = llm.llm_engine.vllm_config.cache_config
    print(json.dumps({"blocks": cache.num_gpu_blocks, "tokens a block": cache.block_size}))
    assert cache.num_gpu_blocks is not None
    tell(cache.num_gpu_blocks * cache.block_size)


if __name__ == "__main__":
    _plan(*sys.argv[1:])
