"""Doses that a real engine tells are the Hugging Face backend's, and what an operator's limit leaves of an edit."""

from typing import Any

import pytest

from saesteer import hf
from tests.plugin.conftest import BRIDGE, CUDA, LONG_PROMPT, OCEAN, PROMPTS, WIDTH, generate

pytestmark = pytest.mark.slow

# Both sides round to 4 digits, which is 5e-4 of a number each, and are two float32 implementations of the same layers;
# a GPU's products of float32 are rounded to tf32.
TOLERANCE = 1e-2 if CUDA else 1.1e-3
# Of a logprob, as in parity.py.
LOGPROB = 5e-2 if CUDA else 1e-4

ASKED = {"dose": True}
MATCHED = {"op": "add", "vector": "any", "norm": "match"}

SPECS: dict[str, Any] = {
    "a clamp": [BRIDGE],
    "generated only": [{**OCEAN, "scope": {"generated": True}}],
    "several at one site": [
        BRIDGE,
        {"op": "clamp", "dictionary": "second", "feature": 5, "value": 20.0},
        {"op": "ablate", "vector": "any", "site": "resid_post.15", "strength": 2.0},
    ],
    "every kind of site": [
        {"op": "clamp", "dictionary": "last", "feature": 1, "value": 10.0},
        {"op": "clamp", "dictionary": "mid", "feature": 2, "value": 10.0},
        {"op": "clamp", "dictionary": "embed", "feature": 3, "value": 4.0},
        {"op": "add", "vector": "each", "site": "resid_post", "scale": 0.5},
    ],
    "modules": [{"op": "use", "module": "outer", "scale": 0.5}],
    "a whole dictionary": [{"op": "reconstruct", "dictionary": "second"}],
    "ranks": [{"op": "clamp", "dictionary": "topk", "feature": 17, "value": 4.0}],
    "a few positions": [{**MATCHED, "site": "resid_mid.7", "scale": 0.3, "scope": {"positions": [[1, 2], [-1, None]]}}],
    "what nothing reaches": [{"op": "cap", "vector": "any", "site": "resid_mid.7", "max": 1e6}],
    "what a gate keeps shut": [{**OCEAN, "when": {"dictionary": "demo", "feature": 6511, "above": 1e9}}],
}


def ask(llm: Any, prompts: list[str], steer: Any, tokens: int = 9) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs: list[Any] = llm.generate(prompts, params, steer=steer, use_tqdm=False)
    return outputs


def same(one: list[tuple[int, float]], two: list[tuple[int, float]]) -> None:
    """Two greedy answers are one."""
    assert [token for token, _ in one] == [token for token, _ in two]
    assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in two], abs=LOGPROB)


def told(site: str, dose: float, tokens: int, limited: int | None = None) -> dict[str, Any]:
    """What is said of edits whose dose is the same at every token."""
    said = {"site": site, "max": pytest.approx(dose, abs=1e-4), "mean": pytest.approx(dose, abs=1e-4), "tokens": tokens}
    return said if limited is None else {**said, "tokens_limited": limited}


def agree(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Two reports are one."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {**one, "max": 0, "mean": 0} == {**other, "max": 0, "mean": 0}
        for key in ("max", "mean"):
            assert one[key] == (other[key] and pytest.approx(other[key], rel=TOLERANCE)), (one, other)


def test_doses_are_those_of_the_oracle(make_engine: Any, oracle: hf.Model) -> None:
    llm = make_engine(dtype="float32")
    prompts = [PROMPTS[n % 4] for n in range(len(SPECS))]
    outputs = ask(llm, prompts, [{"edits": edits, "return": ASKED} for edits in SPECS.values()])
    for edits, output in zip(SPECS.values(), outputs, strict=True):
        prompt = list(output.prompt_token_ids)
        # The last token of an answer is never an input.
        ids = prompt + list(output.outputs[0].token_ids)[:-1]
        agree(output.saesteer["dose"], oracle.doses(ids, steer=edits, prompt_len=len(prompt)))
        assert {one["site"] for one in output.saesteer["dose"]} == {one["site"] for one in output.saesteer["applied"]}
    # Position 1 and the prompt's last one; then what changes nothing.
    assert [output.saesteer["dose"][0]["tokens"] for output in outputs[-3:]] == [2, 0, 0]


def test_asking_shares_the_prefix_cache_and_measures_what_is_computed(make_engine: Any) -> None:
    llm = make_engine(dtype="float32")
    edit = {**MATCHED, "site": "resid_post.15", "scale": 0.125, "scope": {"positions": [[3, None]]}}
    [first] = ask(llm, [LONG_PROMPT], {"edits": [edit]})
    [second] = ask(llm, [LONG_PROMPT], {"edits": [edit], "return": ASKED})
    assert "dose" not in first.saesteer
    assert second.num_cached_tokens >= 96
    tokens = len(second.prompt_token_ids) - second.num_cached_tokens + 8
    assert second.saesteer["dose"] == [told("resid_post.15", 0.125, tokens)]
    assert second.saesteer["applied"][0]["tokens_edited"] == tokens


def test_a_limit_makes_a_strong_edit_one_of_its_own_size(make_engine: Any) -> None:
    """In one batch: above the limit, below it, on two sites of which one is above, and unsteered."""
    limit = 0.2
    free = make_engine(dtype="float32")
    limited = make_engine(dtype="float32", max_dose=limit)

    def edits(*scales: float) -> dict[str, Any]:
        places = zip(("resid_mid.7", "resid_post.15"), scales, strict=False)
        return {"edits": [{**MATCHED, "site": site, "scale": scale} for site, scale in places]}

    asked = [edits(0.9), edits(0.1), edits(0.1, 3.0), None, edits(-0.5)]
    allowed = [edits(limit), edits(0.1), edits(0.1, limit), None, edits(-limit)]
    prompts = [PROMPTS[n % 4] for n in range(len(asked))]
    for one, two in zip(generate(limited, prompts, asked), generate(free, prompts, allowed), strict=True):
        same(one, two)
    outputs = ask(limited, prompts, asked)
    every = [len(output.prompt_token_ids) - 1 + 8 for output in outputs]
    # Nobody asked: on a server with a limit all are measured, and told what they would have had.
    assert [getattr(output, "saesteer", {}).get("dose") for output in outputs] == [
        [told("resid_mid.7", 0.9, every[0], every[0])],
        [told("resid_mid.7", 0.1, every[1], 0)],
        [told("resid_mid.7", 0.1, every[2], 0), told("resid_post.15", 3.0, every[2], every[2])],
        None,
        [told("resid_mid.7", 0.5, every[4], every[4])],
    ]


def test_a_limited_clamp_is_what_the_oracle_makes_of_it(make_engine: Any, model_dir: str, dictionaries: Any) -> None:
    """Here each token has a dose of its own, so some are above the limit and some are not."""
    limited = make_engine(dtype="float32", max_dose=0.2)
    reference = hf.Model(model_dir, **dictionaries.options, max_dose=0.2)
    steer = {"edits": [{**OCEAN, "value": 0.6}, {"op": "add", "vector": [0.5] * WIDTH, "site": "resid_post.20"}]}
    [output] = ask(limited, PROMPTS[:1], steer)
    prompt = list(output.prompt_token_ids)
    ids = prompt + list(output.outputs[0].token_ids)[:-1]
    found = output.saesteer["dose"]
    assert 0 < found[0]["tokens_limited"] < found[0]["tokens"], "expected tokens on both sides of the limit"
    agree(found, reference.doses(ids, steer=steer, prompt_len=len(prompt)))
    [answer] = generate(limited, PROMPTS[:1], steer, tokens=9)
    logits = reference.logits(prompt + [token for token, _ in answer][:-1], steer=steer, prompt_len=len(prompt))
    chosen = logits[len(prompt) - 1 :].log_softmax(-1)
    expected = [float(chosen[place, token]) for place, (token, _) in enumerate(answer)]
    assert [logprob for _, logprob in answer] == pytest.approx(expected, abs=LOGPROB)
