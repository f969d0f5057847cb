"""Requests of two LoRA adapters in one batch, each with its own edits, on one rank and on two; then some without one.

Each engine runs in a process of its own; this file is both the tests and that process. What is right is what
Transformers say of a model with the adapter in its weights.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import hf
from tests.apart import hear, tell
from tests.plugin.asked import CLAMP, FEATURES, HEADS, KINDS, ROWS, WIDTH, add, tiny_llama
from tests.plugin.conftest import CUDA
from tests.plugin.lora import merge_adapter, write_adapter
from tests.plugin.said import plain, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # two engines; test_ways.py has one adapter
    pytest.mark.skipif(CUDA, reason="vLLM's kernels for adapters take 16 bits alone there"),
]

CLOSE = 1e-3  # of a logprob: an adapter's product is rounded in another order than weights that hold it
MODELS = ("base", "one", "two")  # by the adapter
LONG = [3 + (7 * n) % 500 for n in range(70)]  # two blocks of the cache, and some
TOKENS = 10
EVERYWHERE = {"positions": [[0, None]]}
SPECS: dict[str, Any] = {
    "nothing": None,
    "clamp": {"edits": [CLAMP]},
    "every kind": {"edits": [add(HEADS if site == "z.2" else ROWS[1], site) for site in KINDS]},
    "reads": {
        "edits": [{**CLAMP, "scope": {"generated": True}}],
        "return": {
            "features": [{"dictionary": "random", "top_k": 4, "scope": EVERYWHERE}],
            "activations": [{"site": "z.2"}, {"site": "mlp_out.1", "reduce": "mean"}],
            "hidden": True,
        },
    },
}
WAYS = {"one rank": 1, "two ranks": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model and both adapters."""
    found = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(MODELS[1:]):
        write_adapter(found / name, _loaded(found), seed)
    return found


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    words = "-m", "tests.plugin.test_adapters", str(folder)
    return {
        way: hear(*words, str(ranks), environment=environment, timeout=500, fork=True) for way, ranks in WAYS.items()
    }


@pytest.fixture(scope="module")
def oracles(folder: Path) -> dict[str, hf.Model]:
    """Transformers, with each adapter in the weights."""
    found = {}
    for name in MODELS:
        model = _loaded(folder)
        if name != "base":
            merge_adapter(folder / name, model)
        found[name] = hf.Model(model, **_options(folder))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_each_request_of_a_mixed_batch_has_its_adapter_and_its_edits(
    runs: dict[str, Any], oracles: dict[str, hf.Model], spec: str, way: str
) -> None:
    found = runs[way]["mixed"]
    for name, oracle in oracles.items():
        (answer,) = [one for one in found if (one["model"], one["spec"]) == (name, spec)]
        tokens = answer["tokens"]
        edits = {"edits": (SPECS[spec] or {}).get("edits", [])}
        logits = oracle.logits(LONG + tokens[:-1], steer=edits, prompt_len=len(LONG)).log_softmax(-1)
        wanted = [float(logits[len(LONG) - 1 + n, token]) for n, token in enumerate(tokens)]
        assert answer["logprobs"] == pytest.approx(wanted, abs=CLOSE)
        if spec == "reads":
            read = oracle.read(LONG + tokens[:-1], steer=SPECS[spec], prompt_len=len(LONG))
            said = {word: answer["said"][word] for word in read}
            same(said, plain(read), 10 * CLOSE, name)
    assert len({str(one["tokens"]) + str(one["logprobs"]) for one in found}) == len(found), "no two are the same"


@pytest.mark.parametrize("way", WAYS)
def test_the_cache_keeps_adapters_and_edits_apart(runs: dict[str, Any], way: str) -> None:
    """What was cached by the mixed batch serves the same request alone, and nobody else."""
    for first, again in zip(runs[way]["mixed"], runs[way]["again"], strict=True):
        assert (first["model"], first["spec"]) == (again["model"], again["spec"])
        assert again["tokens"] == first["tokens"]
        assert again["logprobs"] == pytest.approx(first["logprobs"], abs=CLOSE)
        assert again["cached"] == (0 if first["spec"] == "reads" else 64)


def test_two_ranks_say_what_one_says(runs: dict[str, Any]) -> None:
    for one, two in zip(*(runs[way]["mixed"] for way in WAYS), strict=True):
        assert one["tokens"] == two["tokens"]
        same(two["said"], one["said"], CLOSE, str((one["model"], one["spec"])))


def _loaded(folder: Path) -> Any:
    """Transformers' model, which has no tokenizer."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama(folder), dtype=torch.float32)


def _options(folder: Path) -> dict[str, Any]:
    from bench.dummy import dictionary_file

    dictionaries = {"random": f"{dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"}
    return {"dictionaries": dictionaries, "sites": [*KINDS], "reads": [*KINDS]}


def main(folder: Path, ranks: int) -> None:
    """Start an engine, ask it everything at once, then one by one, and say what it said."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from saesteer import LLM

    adapters = {name: LoRARequest(name, at, str(folder / name)) for at, name in enumerate(MODELS[1:], 1)}
    llm = LLM(
        tiny_llama(folder),
        **_options(folder),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        tensor_parallel_size=ranks,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )
    # On a CPU vLLM takes the last adapter for a request that has none, in a batch where others have one.
    adapted = [(name, spec) for spec in SPECS for name in adapters]
    base = [("base", spec) for spec in SPECS]

    def ask(several: list[tuple[str, str]]) -> list[dict[str, Any]]:
        outputs = llm.generate(
            [{"prompt_token_ids": LONG}] * len(several),
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False),
            steer=[SPECS[spec] for _, spec in several],
            lora_request=[adapters.get(name) for name, _ in several],
            use_tqdm=False,
        )
        found = []
        for (name, spec), output in zip(several, outputs, strict=True):
            made = output.outputs[0]
            logprobs = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
            told = {"model": name, "spec": spec, "tokens": list(made.token_ids), "logprobs": logprobs}
            found.append(told | {"cached": output.num_cached_tokens, "said": plain(getattr(made, "saesteer", {}))})
        return found

    mixed = ask(adapted) + ask(base)
    tell({"mixed": mixed, "again": [answer for one in (*adapted, *base) for answer in ask([one])]})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
