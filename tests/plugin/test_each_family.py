"""Each model family in a real engine: what Transformers makes of the same edits, on a tiny random model in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import hf
from saesteer.loaders.formats import own
from saesteer.models.families import FAMILIES
from tests import tiny
from tests.plugin.conftest import CUDA, engine_options, generate, random_coder
from tests.plugin.parity import difference

IN_CI = ("GPT-2",)  # whose stream is one tensor in vLLM; the embedded model is a Llama, of which it is two

# Of a logprob. A GPU's products of float32 are rounded to tf32; bfloat16 rounds everything to 8 bits.
TOLERANCES = {"float32": 5e-2 if CUDA else 1e-4, "bfloat16": 0.15}
PROMPTS = [[1, *(3 + n * 7 % 40 for n in range(count))] for count in (5, 70)]
TOKENS = 6


def test_each_family_has_a_row() -> None:
    assert {tiny.family_of(row).name for row in tiny.ROWS} == {family.name for family in FAMILIES}


def sites_of(row: str) -> list[str]:
    """One of each kind, and the last: behind it comes no layer."""
    served = tiny.family_of(row).sites
    return [*(f"{kind}.{int(kind != 'resid_pre')}" for kind in served), f"resid_post.{tiny.LAYERS - 1}"]


def edits(row: str, sites: list[str]) -> dict[str, Any]:
    """A spec by its name: at each site a vector that is added and a feature that is set."""
    found: dict[str, Any] = {}
    for site in sites:
        push = torch.randn(tiny.width_at(row, site), generator=torch.Generator().manual_seed(5)).tolist()
        found[f"add at {site}"] = {"op": "add", "vector": push, "site": site, "scale": 0.7}
        found[f"clamp at {site}"] = {"op": "clamp", "dictionary": site, "feature": 17, "value": 4.0}
    return {name: {"edits": [edit]} for name, edit in found.items()}


def marks_of(row: str) -> list[pytest.MarkDecorator]:
    """Whether it is long, and needs torchvision."""
    return [pytest.mark.long] * (row not in IN_CI) + [pytest.mark.vision] * tiny.ROWS[row].torchvision


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, marks=marks_of(row)) for row in tiny.ROWS])
def test_a_family_agrees_with_transformers_at_each_site(row: str, tmp_path: Path, capsys: Any) -> None:
    from saesteer import LLM

    if tiny.ROWS[row].torchvision:
        pytest.importorskip("torchvision", reason="vLLM's file of this family imports it; make test-long has it")
    model = tiny.made(row)
    model.save_pretrained(tmp_path / "model")
    sites = sites_of(row)
    dictionaries = {}
    for seed, site in enumerate(sites):
        own.write(tmp_path / f"{site}.safetensors", random_coder("relu", seed, width=tiny.width_at(row, site)))
        dictionaries[site] = f"{tmp_path}/{site}.safetensors@{site}"
    oracle = hf.Model(model, dictionaries=dictionaries)
    dtype = tiny.ROWS[row].dtype
    tolerance = TOLERANCES[dtype] * tiny.ROWS[row].loose
    options = engine_options(dtype=dtype, max_model_len=128, skip_tokenizer_init=True, max_num_batched_tokens=512)
    if tiny.ROWS[row].vision is not None:
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    llm = LLM(str(tmp_path / "model"), dictionaries=dictionaries, **options)
    try:
        nothing = {
            "edits": [{"op": "clamp", "dictionary": s, "feature": 3, "mode": "scale", "value": 1.0} for s in sites]
        }
        plain, same = (generate(llm, PROMPTS, spec, tokens=TOKENS) for spec in (None, nothing))
        steered = edits(row, sites)
        asked = [(name, prompt) for name in steered for prompt in range(len(PROMPTS))]
        answers = generate(
            llm, [PROMPTS[prompt] for _, prompt in asked], [steered[name] for name, _ in asked], tokens=TOKENS
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
    found = {f"plain, prompt {n}": difference(oracle, PROMPTS[n], one, None) for n, one in enumerate(plain)}
    changed = {}
    for (name, prompt), made in zip(asked, answers, strict=True):
        found[f"{name}, prompt {prompt}"] = difference(oracle, PROMPTS[prompt], made, steered[name])
        changed[f"{name}, prompt {prompt}"] = difference(oracle, PROMPTS[prompt], made, None)
    with capsys.disabled():
        print(f"\n{row}: {len(found)} answers differ by at most {max(found.values()):.2g} from Transformers", end=", ")
        print(f"the steered ones by at least {min(changed.values()):.2g} from what no edit gives")
    assert not {name: worst for name, worst in found.items() if worst >= tolerance}
    assert min(changed.values()) > 3 * tolerance
    for before, after in zip(plain, same, strict=True):
        assert [token for token, _ in before] == [token for token, _ in after]
        assert max(abs(a - b) for (_, a), (_, b) in zip(before, after, strict=True)) < TOLERANCES[dtype] / 10
