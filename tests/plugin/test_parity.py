"""Steered answers agree with the Hugging Face backend under the same spec, teacher-forced, in float32."""

import json
from typing import Any

import pytest

from saesteer import hf
from saesteer.language.spec import OPS
from tests.plugin.conftest import BRIDGE, CUDA, LONG_PROMPT, OCEAN, PROMPTS, generate
from tests.plugin.parity import TOLERANCE, compare, same
from tests.plugin.random_edits import drawn

pytestmark = pytest.mark.slow


SPECS: dict[str, Any] = {
    "bridge": {"edits": [BRIDGE]},
    "two features": {"edits": [BRIDGE, OCEAN]},
    "generated only": {"edits": [{**OCEAN, "scope": {"generated": True}}]},
    "prompt only": {"edits": [{**OCEAN, "scope": {"prompt": True}}]},
    "last prompt token": {"edits": [{**BRIDGE, "scope": {"positions": [[-1, None]]}}]},
    "position zero": {"edits": [{**OCEAN, "scope": {"positions": [[0, 3]]}}]},
    "band": {
        "edits": [
            {**OCEAN, "mode": "min", "value": 5.0, "unit": "raw"},
            {**OCEAN, "mode": "max", "value": 9.0, "unit": "raw"},
        ]
    },
    "add": {"edits": [{**BRIDGE, "mode": "add", "value": 12.0, "unit": "raw"}]},
    "scale if active": {  # two features that fire on many tokens of the prompts
        "edits": [
            {**OCEAN, "feature": n, "mode": "scale", "value": 3.0, "unit": "raw", "only_if_active": True}
            for n in (2526, 5501)
        ]
    },
    "two dictionaries at one site": {
        "edits": [OCEAN, {"op": "clamp", "dictionary": "second", "feature": 5, "value": 20.0}, BRIDGE]
    },
    "exact topk": {
        "edits": [
            {"op": "clamp", "dictionary": "topk", "feature": n, "value": 4.0, "mode": "scale", "only_if_active": True}
            for n in (17, 18)
        ]
    },
    "resid_mid": {"edits": [{"op": "clamp", "dictionary": "mid", "feature": 17, "value": 30.0}]},
    "reconstruction by a transcoder": {
        "edits": [
            {"op": "clamp", "dictionary": "skip", "feature": 3, "value": 9.0},
            {"op": "reconstruct", "dictionary": "skip"},
        ]
    },
    "transcoder": {
        "edits": [{"op": "clamp", "dictionary": "cross", "feature": n, "value": 20.0, "mode": "add"} for n in (3, 4)]
    },
    "part of the stream": {
        "edits": [
            {"op": "clamp", "dictionary": "mlp", "feature": 17, "value": 20.0},
            {"op": "clamp", "dictionary": "attn", "feature": 18, "value": 10.0},
            {"op": "add", "vector": "any", "site": ["mlp_out.18", "attn_out.9", "mlp_in.18", "mlp_out.15"]},
        ]
    },
    "a set": {
        "edits": [
            {"op": "clamp", "dictionary": "deep", "layer": 15, "feature": 17, "value": 20.0},
            {"op": "clamp", "dictionary": "deep", "layer": 20, "feature": 17, "value": 5.0}
            | {"when": {"dictionary": "deep", "layer": 15, "feature": 3, "above": 0.2}},
            {"op": "add", "vector": "any", "site": "resid_post.20"}
            | {"scale": {"dictionary": "deep", "layer": 20, "feature": 4, "max": 2.0}},
        ]
    },
    "embedding": {"edits": [{"op": "clamp", "dictionary": "embed", "feature": 3, "value": 4.0}]},
    "last layer": {"edits": [{"op": "clamp", "dictionary": "last", "feature": 17, "value": 40.0}]},
    "several sites": {
        "edits": [
            {"op": "clamp", "dictionary": "last", "feature": 1, "value": 10.0},
            {"op": "clamp", "dictionary": "mid", "feature": 2, "value": 10.0},
            BRIDGE,
        ]
    },
}


def test_random_specs_of_every_kind_agree_with_the_oracle(make_engine: Any, oracle: hf.Model, capsys: Any) -> None:
    """Forty requests in one batch, each steered in its own way."""
    specs = drawn(oracle, 40)
    assert {edit["op"] for spec in specs for edit in spec["edits"]} == set(OPS)
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(len(specs))]
    made = generate(make_engine(dtype="float32"), prompts, specs, tokens=8)
    compared, worst = 0, []
    for n, (prompt, one, spec) in enumerate(zip(prompts, made, specs, strict=True)):
        difference, skipped = compare(oracle, prompt, one, spec)
        compared += len(one) - skipped
        worst.append((difference, n))
    with capsys.disabled():
        print(f"\n{compared} of {8 * len(specs)} tokens compared, largest difference {max(worst)[0]:.2g}")
    wrong = [json.dumps([difference, specs[n]]) for difference, n in worst if difference >= TOLERANCE]
    assert not wrong, "\n".join(wrong)
    assert compared > 4 * len(specs), "most tokens were compared"


@pytest.mark.parametrize("name", SPECS)
def test_float32_agrees_with_the_oracle(make_engine: Any, oracle: hf.Model, name: str) -> None:
    llm = make_engine(dtype="float32")
    prompts = [PROMPTS[0], LONG_PROMPT[:240]]
    made = generate(llm, prompts, SPECS[name], tokens=16)
    plain = generate(llm, prompts, tokens=8)
    assert [one[:8] for one in made] != plain, "the spec does something"
    left_out = 0
    for prompt, one in zip(prompts, made, strict=True):
        difference, skipped = compare(oracle, prompt, one, SPECS[name])
        left_out += skipped
        assert difference < TOLERANCE
    # Where a GPU rounds to tf32, one of the 8 strongest of 96 random features is near its rank on most tokens, or all.
    assert left_out < 24 or (CUDA and ("transcoder" in name or name == "a set")), "most tokens were compared"


def test_plain_float32_agrees_with_the_oracle(make_engine: Any, oracle: hf.Model) -> None:
    made = generate(make_engine(dtype="float32"), PROMPTS, tokens=16)
    for prompt, one in zip(PROMPTS, made, strict=True):
        assert compare(oracle, prompt, one, {"edits": []})[0] < TOLERANCE


def test_a_dictionary_in_its_file_does_what_it_does_in_memory(make_engine: Any) -> None:
    llm = make_engine(dtype="float32")
    edits = [{"op": "clamp", "dictionary": name, "feature": 17, "value": 30.0} for name in ("mid", "stored")]
    whole, by_rows, plain = generate(llm, PROMPTS[:1] * 3, [*({"edits": [one]} for one in edits), None])
    assert same(whole, by_rows) and not same(whole, plain)


@pytest.mark.long  # it reports, and asserts little
def test_bfloat16_difference_is_reported(make_engine: Any, oracle: hf.Model, capsys: Any) -> None:
    spec = SPECS["bridge"]
    made = generate(make_engine(), PROMPTS, spec, tokens=32)
    differences = [compare(oracle, prompt, one, spec)[0] for prompt, one in zip(PROMPTS, made, strict=True)]
    with capsys.disabled():
        shown = ", ".join(f"{one:.2g}" for one in differences)
        print(f"\nbf16 engine against float32 oracle, largest logprob difference per prompt: {shown}")
    assert max(differences) < 1.0  # reported, not judged: bf16 rounds at every one of 30 layers
