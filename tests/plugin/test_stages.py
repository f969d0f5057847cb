"""Two stages of a pipeline, compiled: stock's bits for whoever is not steered, and a cache that keeps edits apart.

tests/plugin/test_ranks.py has what they say, count and read. Stock vLLM cannot start them eagerly on a CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer.plugin.job import Batch, Completion, run
from tests.plugin.asked import CLAMP, FEATURES, NOISE, PROMPTS, ROWS, WIDTH, add, tiny_llama
from tests.plugin.conftest import engine_options
from tests.plugin.said import bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two stages need two GPUs, or none"),
]

LONG = [3 + (7 * n) % 500 for n in range(150)]  # more than four blocks of the cache
FIRST, SECOND = {"edits": [add(ROWS[0], "resid_post.0")]}, {"edits": [CLAMP]}  # on the first stage, and on the second
BOTH = {"edits": [*FIRST["edits"], *SECOND["edits"]]}
SPECS: dict[str, Any] = {"first": FIRST, "second": SECOND, "both": BOTH, "nobody": None}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Completion]]:
    """Of stock vLLM, and of ours by what was asked."""
    from bench.dummy import dictionary_file

    folder: Path = tmp_path_factory.mktemp("stages")
    random = {"random": f"{dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"}
    options = engine_options("float32", skip_tokenizer_init=True, max_model_len=512)
    options |= {"pipeline_parallel_size": 2, "enforce_eager": False}
    plain = Batch(PROMPTS, max_tokens=12, ignore_eos=True)
    asked = {"before": plain, "mixed": Batch(PROMPTS, [None, BOTH, None], max_tokens=12, ignore_eos=True, fresh=True)}
    asked |= {"behind": Batch(PROMPTS, max_tokens=12, ignore_eos=True, fresh=True)}
    for name, spec in SPECS.items():
        asked[f"{name}, cold"] = Batch([LONG], [spec], max_tokens=12, ignore_eos=True, fresh=True)
    for name, spec in SPECS.items():
        asked[name] = Batch([LONG], [spec], max_tokens=12, ignore_eos=True)  # behind "nobody, cold"
        asked[f"{name}, again"] = Batch([LONG], [spec], max_tokens=12, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        (stock,) = run(tiny_llama(folder), [plain], dictionaries=None, options=options)
        ours = run(
            tiny_llama(folder), [*asked.values()], dictionaries=random, options=options | {"sites": ["resid_post.all"]}
        )
    return {"stock": stock} | dict(zip(asked, ours, strict=True))


@pytest.mark.parametrize("batch", ["before", "mixed", "behind"])
def test_whoever_is_not_steered_has_stocks_bits(answers: dict[str, list[Completion]], batch: str) -> None:
    stock, ours = bits(answers["stock"]), bits(answers[batch])
    assert ours[0] == stock[0] and ours[2] == stock[2]
    assert (ours[1] == stock[1]) == (batch != "mixed")


@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_shared_with_the_same_edits_only(answers: dict[str, list[Completion]], name: str) -> None:
    """Whatever the cache holds, an answer is the one from an empty cache."""
    [cold], [warm], [again] = (answers[f"{name}{how}"] for how in (", cold", "", ", again"))
    assert cold.cached == 0 < again.cached
    assert (warm.cached > 0) == (name == "nobody"), "the cache held the blocks of nobody's edits"
    for one in (warm, again):
        assert one.ids == cold.ids and one.logprobs == pytest.approx(cold.logprobs, abs=NOISE)
    if name != "nobody":
        assert cold.logprobs != pytest.approx(answers["nobody, cold"][0].logprobs, abs=10 * NOISE), "it is steered"
