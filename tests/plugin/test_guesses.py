"""Speculative decoding: answers, counts, doses, reads and rules are those of an engine that guesses nothing.

Each engine runs in a process of its own; this file is both the tests and that process. The model is tiny and random, so
that some guesses hold and some do not. Two ranks send what they have counted between processes, one rank does not.
"""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.apart import hear, tell
from tests.plugin.asked import CLAMP, EVERYWHERE, FEATURES, LAYERS, NOISE, PROBE, ROWS, WIDTH, add, tiny_llama
from tests.plugin.conftest import CUDA
from tests.plugin.heads import head
from tests.plugin.said import same
from tests.plugin.tiny_engine import GENERATED, TOKENS, left, metric, params_of, told

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two or three engines

PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 4, [400, 3, 77] * 9, [9] * 40]
SCORES = {"probes": [{**PROBE, "scope": EVERYWHERE}]}
SPECS: dict[str, Any] = {
    "plain": None,
    "clamp": {"edits": [CLAMP], "return": {"dose": True}},
    "generated": {"edits": [{**add(ROWS[0]), "scope": GENERATED}], "return": {"dose": True}},
    "from a position on": {"edits": [{**add(ROWS[1]), "scope": {"positions": [[50, 60]]}}], "return": {"dose": True}},
    "gated": {
        "edits": [{**add(ROWS[0], "resid_post.3"), "when": {"dictionary": "random", "feature": 3, "above": 0.2}}]
    },
    "scores": {"edits": [add(ROWS[0])], "return": SCORES},
    "features": {"edits": [CLAMP], "return": {"features": [{"dictionary": "random", "top_k": 4, "scope": EVERYWHERE}]}},
    "tensors": {
        "edits": [CLAMP],
        "return": {
            "activations": [
                {"site": "resid_post.0", "scope": EVERYWHERE},
                {"site": "resid_post.1", "scope": GENERATED, "reduce": "mean"},
                {"site": "resid_post.2", "scope": EVERYWHERE, "reduce": "max"},
                {"site": "resid_post.3", "scope": GENERATED, "reduce": "last", "at": "after"},
            ],
            "hidden": True,
        },
    },
}
ENGINES = {
    "no guesses": (1, ""),
    "n-grams": (1, "ngram"),
    "n-grams, two ranks": (2, "ngram"),
    "a draft model": (1, "draft_model"),
    "EAGLE": (1, "eagle"),
    "EAGLE 3": (1, "eagle3"),
}
TWO = [pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")]


class Runs(dict[str, Any]):
    """What each engine answered, which runs when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._environment |= {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        if not CUDA:
            self._environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def __missing__(self, name: str) -> Any:
        ranks, how = ENGINES[name]
        words = "-m", "tests.plugin.test_guesses", str(self._folder), str(ranks), how
        self[name] = hear(*words, environment=self._environment, timeout=500, fork=True)
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("guesses"))


@pytest.fixture(
    params=[pytest.param(name, marks=TWO if ranks > 1 else ()) for name, (ranks, how) in ENGINES.items() if how]
)
def engine(request: pytest.FixtureRequest, runs: Runs) -> Any:
    """What an engine that guesses said."""
    return runs[request.param]


def test_some_guesses_hold_and_some_do_not(runs: Runs, engine: Any) -> None:
    assert runs["no guesses"]["guessed"] == [0, 0]
    guessed, held = engine["guessed"]
    assert 100 < held < guessed - 100


@pytest.mark.parametrize("name", SPECS)
def test_answers_are_those_without_guesses(runs: Runs, engine: Any, name: str) -> None:
    for answer, found in zip(runs["no guesses"]["answers"][name], engine["answers"][name], strict=True):
        assert found["tokens"] == answer["tokens"]
        assert found["said"].keys() == answer["said"].keys()
        same(found["said"], answer["said"], 10 * NOISE, name)


def _tied(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers part between equally likely tokens, as on a GPU, whose sums depend on a step's tokens."""
    each = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=False)
    parting = next((abs(first - second) for token, its, first, second in each if token != its), None)
    return CUDA and parting is not None and parting < NOISE


@pytest.mark.parametrize("name", ["stops", "flags", "stop tokens", "crowd", "crowd with rules"])
def test_rules_and_ends_are_where_they_are_without_guesses(runs: Runs, engine: Any, name: str) -> None:
    expected = runs["no guesses"][name]
    assert len(engine[name]) == len(expected) > 2
    pairs = [*zip(expected, engine[name], strict=True)]
    ties = [_tied(*pair) for pair in pairs]
    assert sum(ties) <= len(pairs) // 4
    for answer, found in (pair for pair, tied in zip(pairs, ties, strict=True) if not tied):
        assert (found["tokens"], found["end"]) == (answer["tokens"], answer["end"])
        assert len(found["logprobs"]) == len(found["tokens"])
        said, wanted = dict(found["said"]), dict(answer["said"])
        if name == "crowd":  # doses are of the tokens that were computed, and the cache had others of the same crowd
            assert (said.pop("dose", None) is None) == (wanted.pop("dose", None) is None)
        same(said, wanted, 10 * NOISE, name)


def test_stops_end_in_the_middle_of_a_step(engine: Any) -> None:
    """Else the test above says little."""
    lengths = {len(answer["tokens"]) for answer in engine["stops"]}
    assert len(lengths) > 3 and max(lengths) < TOKENS


def test_a_crowd_was_preempted(engine: Any) -> None:
    assert engine["preemptions"] > 0


def test_the_prefix_cache_holds_no_guess_and_no_edit_of_others(engine: Any) -> None:
    found = 32 if engine["how"].startswith("eagle") else 64  # vLLM computes the last block again for its hidden states
    for name, (warm, cold) in engine["second turns"].items():
        # What was generated is the second turn's prompt, where an edit of generated tokens would not have been.
        assert (warm["cached"], cold["cached"]) == (0 if name == "generated" else found, 0), name
        assert warm["tokens"] == cold["tokens"]
        assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=NOISE)


def test_an_aborted_request_leaves_nothing(engine: Any) -> None:
    assert engine["left"] and all(not any(rank) for rank in engine["left"])


def _ask(llm: Any, specs: Any, prompts: Any = PROMPTS, **options: Any) -> list[dict[str, Any]]:
    each = specs if isinstance(specs, list) else [specs] * len(prompts)
    params = [params_of(spec, **options) for spec in each]
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return [told(output) for output in outputs]


def _bounds(answer: dict[str, Any], prompt: int) -> list[float]:
    """Bounds that are first exceeded where a score is higher than all before it in the answer."""
    scores = [score for at, score in answer["said"]["probes"] if at >= prompt]
    highest = [max(scores[: at + 1]) for at in range(len(scores))]
    rises = [(lo, hi) for lo, hi in pairwise(highest) if hi > lo + 100 * NOISE]
    return [(lo + hi) / 2 for lo, hi in rises]


def _rules(llm: Any, op: str) -> list[dict[str, Any]]:
    found = []
    for prompt, answer in zip(PROMPTS, _ask(llm, SPECS["scores"]), strict=True):
        for bound in _bounds(answer, len(prompt)):
            rule = {"op": op, "when": {**PROBE, "above": bound}, "scope": GENERATED}
            spec = {"edits": [add(ROWS[0]), rule], "return": {**SCORES, "hidden": True, "dose": True}}
            found += _ask(llm, spec, [prompt])
    return found


def main(folder: Path, ranks: int, how: str) -> None:
    """Start an engine, ask it everything, and say what it said."""
    from bench.dummy import dictionary_file
    from saesteer import LLM

    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    options: dict[str, Any] = {"gpu_memory_utilization": 0.1} if CUDA else {}
    if how:
        more: dict[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        if how != "ngram":
            more = {"model": tiny_llama(folder) if how == "draft_model" else head(folder, how, PROMPTS, TOKENS)}
        options["speculative_config"] = {"method": how, "num_speculative_tokens": 4, **more}
        # Refused with guesses, and a GPU's default: in vLLM 0.26 with EAGLE, later with draft models, too.
        options["async_scheduling"] = False
    llm = LLM(
        tiny_llama(folder),
        dictionaries={"random": f"{dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"},
        vectors={"probe": str(folder / "probe.npy")},
        sites=["resid_post.all"],
        reads=[f"resid_post.{layer}" for layer in range(LAYERS)],
        tensor_parallel_size=ranks,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=12,  # enough for three answers, and not for four of a crowd
        seed=0,
        disable_log_stats=False,
        **options,
    )

    def ask(*words: Any, **more: Any) -> list[dict[str, Any]]:
        assert llm.reset_prefix_cache()
        return _ask(llm, *words, **more)

    found: dict[str, Any] = {"how": how, "answers": {name: ask(spec) for name, spec in SPECS.items()}}
    found["stops"], found["flags"] = (_rules(llm, op) for op in ("stop", "flag"))
    plain = found["answers"]["scores"][0]["tokens"]
    tokens = [plain[at] for at in range(8, 32, 3)]
    found["stop tokens"] = [one for token in tokens for one in ask(SPECS["scores"], stop_token_ids=[token])]
    # Of a conditional edit, tokens from the cache count as edited, so its count depends on what was preempted.
    crowd = 2 * [spec for name, spec in SPECS.items() if name != "gated"]
    prompts = [PROMPTS[number % 3] for number in range(len(crowd))]
    before = metric(llm, "num_preemptions")
    found["crowd"] = ask(crowd, prompts, max_tokens=2 * TOKENS)
    ruled = [
        {"edits": [add(ROWS[0]), {"op": op, "when": {**PROBE, "above": bound}, "scope": GENERATED}], "return": SCORES}
        for op in ("stop", "flag")
        for bound in _bounds(found["answers"]["scores"][0], len(PROMPTS[0]))
    ]
    found["crowd with rules"] = ask(ruled, [PROMPTS[0]] * len(ruled))
    found["preemptions"] = metric(llm, "num_preemptions") - before
    found["second turns"] = {}
    for name in ("clamp", "generated"):
        turn = [*PROMPTS[0], *ask(SPECS[name], PROMPTS[:1])[0]["tokens"], 7, 8, 9]
        found["second turns"][name] = [*_ask(llm, SPECS[name], [turn]), *ask(SPECS[name], [turn])]
    engine = llm.llm_engine
    engine.add_request("leaves", {"prompt_token_ids": PROMPTS[2]}, params_of(SPECS["tensors"]))
    for _ in range(9):
        engine.step()
    engine.abort_request(["leaves"], internal=False)
    _ask(llm, None, PROMPTS[:1])
    found["left"] = llm.collective_rpc(left)
    found["guessed"] = [metric(llm, f"spec_decode_num_{word}_tokens") for word in ("draft", "accepted")]
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
