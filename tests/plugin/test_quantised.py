"""Quantised checkpoints, an FP8 cache, experts and adapters, at every site: as Transformers computes the same weights.

An engine that rounds its activations to 8 bits is not within a bound that could be known beforehand. So it is measured:
what unsteered answers differ by is the noise, and edits may add as much again. Where vLLM rounds weights as it loads
them, edits may also be off by what is rounded of their own effect.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import hf
from saesteer.loaders.formats import own
from saesteer.models.families import FAMILIES
from tests import tiny
from tests.plugin import quantised
from tests.plugin.conftest import CUDA, Answer, answer, engine_options, random_coder
from tests.plugin.lora import merge_adapter, write_adapter
from tests.plugin.parity import difference

PROMPTS = [[1, *(3 + (n * 7 + start) % 40 for n in range(count))] for start, count in enumerate((5, 20, 41, 70))]
TOKENS = 8
LEAST = 0.05  # of a logprob: noise that is measured may be small by luck
ROUNDED = 2.0**-3  # of an edit's effect: FP8 keeps four bits, of weights that the oracle has exactly and of activations


def sites_of(row: tiny.Tiny) -> list[str]:
    """One of each kind that the family has, and the last."""
    name = "Qwen3-MoE" if row is quantised.MOE else "Llama"
    served = next(family for family in FAMILIES if family.name == name).sites
    return [*(f"{kind}.{int(kind != 'resid_pre')}" for kind in served), f"resid_post.{quantised.LAYERS - 2}"]


def steer(sites: list[str]) -> dict[str, Any]:
    """A spec by its name: at each site a vector that is added and a feature that is set."""
    found: dict[str, Any] = {}
    for site in sites:
        push = torch.randn(width_at(site), generator=torch.Generator().manual_seed(5)).tolist()
        found[f"add at {site}"] = {"edits": [{"op": "add", "vector": push, "site": site, "scale": 2.0}]}
        clamp = {"op": "clamp", "dictionary": site, "feature": 17, "value": 12.0}
        found[f"clamp at {site}"] = {"edits": [clamp]}
    return found


def width_at(site: str) -> int:
    return quantised.Z_WIDTH if site.startswith("z.") else quantised.WIDTH


def check(folder: Path, model: Any, row: tiny.Tiny, options: dict[str, Any], adapter: Path | None = None) -> None:
    """Answers of an engine, plain and steered at each site, against a model in Transformers.

    Args:
        folder: with the checkpoint in ``model``; dictionaries go there too.
        model: the same in Transformers, with the adapter merged.
        row: what it was made of.
        options: of the engine.
        adapter: a LoRA adapter that every request uses.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from saesteer import LLM

    sites = sites_of(row)
    dictionaries = {}
    for seed, site in enumerate(sites):
        own.write(folder / f"{site}.safetensors", random_coder("relu", seed, width=width_at(site)))
        dictionaries[site] = f"{folder}/{site}.safetensors@{site}"
    oracle = hf.Model(model, dictionaries=dictionaries)
    small: dict[str, Any] = {"max_model_len": 128, "skip_tokenizer_init": True, "max_num_batched_tokens": 512}
    llm = LLM(str(folder / "model"), dictionaries=dictionaries, **engine_options(**small, **options))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    lora = None if adapter is None else LoRARequest("tiny", 1, str(adapter))

    def generate(prompts: list[list[int]], specs: Any) -> list[Answer]:
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, params, steer=specs, lora_request=lora, use_tqdm=False)
        return [answer(output.outputs[0]) for output in outputs]

    try:
        plain = generate(PROMPTS, None)
        specs = steer(sites)
        asked = [(name, number) for name in specs for number in range(len(PROMPTS))]
        answers = generate([PROMPTS[number] for _, number in asked], [specs[name] for name, _ in asked])
    finally:
        llm.llm_engine.engine_core.shutdown()
    noise = max(difference(oracle, PROMPTS[number], made, None) for number, made in enumerate(plain))
    found, changed = {}, dict.fromkeys(specs, 0.0)
    for (name, number), made in zip(asked, answers, strict=True):
        found[name, number] = difference(oracle, PROMPTS[number], made, specs[name])
        changed[name] = max(changed[name], difference(oracle, PROMPTS[number], made, None))
    bound = 2 * max(noise, LEAST)
    rounded = ROUNDED if options.get("quantization") == "fp8" else 0.0
    print(f"\nplain answers differ by {noise:.3f}, steered ones by {max(found.values()):.3f}", end=", ")
    print(f"which are {min(changed.values()):.3f} or more from what no edit gives")
    off = {one: worst for one, worst in found.items() if worst >= bound + rounded * changed[one[0]]}
    assert off == {}, "by edit and number of the prompt"
    assert {name: most for name, most in changed.items() if most < 2 * bound} == {}


GPU = pytest.mark.gpu  # vLLM's kernels of FP8 need one, or a CPU with AMX
LONG = pytest.mark.long  # half a minute each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("gptq", {}, id="GPTQ", marks=LONG),
        pytest.param("awq", {}, id="AWQ", marks=LONG),
        pytest.param("int8", {}, id="INT8", marks=LONG),
        pytest.param("fp8", {}, id="FP8", marks=GPU),
        pytest.param(None, {"quantization": "fp8"}, id="FP8 when loaded", marks=GPU),
        pytest.param(None, {"kv_cache_dtype": "fp8"}, id="FP8 cache", marks=LONG),
    ],
)
def test_a_quantised_model_is_steered_at_every_site(
    kind: str | None, options: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    model = quantised.write(tmp_path / "model", kind)
    with capsys.disabled():
        check(tmp_path, model, quantised.LLAMA, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="bfloat16", marks=LONG), pytest.param({"quantization": "fp8"}, id="FP8", marks=GPU)],
)
def test_experts_are_steered_at_every_site(options: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    names = ("_moe_C", "_moe_C_stable_libtorch")  # of its kernels, by release
    if CUDA and not any(find_spec(f"vllm.{name}") for name in names):
        pytest.skip("this vLLM is without its kernels of experts")
    model = quantised.write(tmp_path / "model", None, quantised.MOE)
    with capsys.disabled():
        check(tmp_path, model, quantised.MOE, options)


@pytest.mark.slow
@pytest.mark.long
def test_an_adapter_is_steered_at_every_site(tmp_path: Path, capsys: Any) -> None:
    model = quantised.write(tmp_path / "model", None)
    adapter = write_adapter(tmp_path / "adapter", model)
    merge_adapter(adapter, model)
    with capsys.disabled():
        check(tmp_path, model, quantised.LLAMA, {"enable_lora": True, "max_lora_rank": 8}, adapter)
