"""Dictionaries count in vLLM's memory budget: the KV cache gets what they leave. This file is also an engine's process.

All other tests give the KV cache a size of its own, which skips vLLM's measurement.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from bench.dummy import cache_bytes, model_folder
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.loaders.formats import own
from tests.apart import hear, tell

MODEL, WIDTH = "llama-3-1b", 2048  # every layer has full attention, so a block has the size of its tokens
GIB = 1 << 30


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
