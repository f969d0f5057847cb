"""In float16 no edit makes a number overflow, in its own answer or in those that get its KV blocks behind it."""

import math
from typing import Any

import pytest

from tests.plugin.conftest import PROMPTS, generate

pytestmark = pytest.mark.slow

CLAMP = {"op": "clamp", "dictionary": "demo", "feature": 3497}
EXTREME = {
    "just above what float16 holds": {"edits": [{**CLAMP, "value": 66_000.0}]},
    "as large as a number may be": {"edits": [{**CLAMP, "value": 3e38}]},
    "at several layers": {"edits": [{"op": "add", "vector": "each", "site": "resid_post", "scale": 1e37}]},
    "before the MLP": {"edits": [{"op": "add", "vector": "any", "site": "resid_mid.7", "scale": -1e37}]},
    "at the embedding": {"edits": [{"op": "add", "vector": "any", "site": "resid_pre.0", "scale": 1e37}]},
    "at the last layer": {"edits": [{"op": "add", "vector": "any", "site": "resid_post.29", "scale": 1e37}]},
}


def test_extreme_edits_leave_finite_blocks(make_engine: Any) -> None:
    """With so few blocks that the plain answers behind them are written over theirs."""
    llm = make_engine(dtype="float16", max_model_len=256, max_num_seqs=8, block_size=32, num_gpu_blocks_override=14)
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} {n}" for n in range(len(EXTREME))]
    plain = generate(llm, prompts, tokens=40)
    extreme = generate(llm, prompts, list(EXTREME.values()), tokens=40)
    assert llm.reset_prefix_cache()
    for answers in (extreme, generate(llm, prompts, tokens=40)):
        for name, answer in zip(EXTREME, answers, strict=True):
            assert all(math.isfinite(logprob) for _, logprob in answer), name
    assert [[token for token, _ in answer] for answer in answers] == [[token for token, _ in one] for one in plain]
