"""Steered and plain requests never share KV blocks, in either order; equal specs do."""

from typing import Any

import pytest

from tests.plugin.conftest import BRIDGE, LONG_PROMPT, OCEAN, generate

pytestmark = pytest.mark.slow

STEERED = {"edits": [BRIDGE]}


def fresh(tag: str) -> str:
    """A prompt of several blocks that no other test has used."""
    return f"Notes number {tag}. {LONG_PROMPT}"


def cold(llm: Any, prompt: str, spec: Any) -> Any:
    assert llm.reset_prefix_cache()
    made = generate(llm, [prompt], spec)
    assert llm.reset_prefix_cache()
    return made


@pytest.mark.parametrize("first", [None, STEERED], ids=["plain first", "steered first"])
def test_both_orders_equal_cold_runs(make_engine: Any, first: Any) -> None:
    llm = make_engine()
    prompt = fresh("order")
    second = STEERED if first is None else None
    expected = [cold(llm, prompt, first), cold(llm, prompt, second)]
    assert expected[0] != expected[1]
    assert [generate(llm, [prompt], first), generate(llm, [prompt], second)] == expected


def cached_tokens(llm: Any, prompt: str, spec: Any) -> int:
    from vllm import SamplingParams

    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), steer=spec, use_tqdm=False)
    return int(output.num_cached_tokens)


def test_equal_specs_share_the_cache_and_others_do_not(make_engine: Any) -> None:
    llm = make_engine()
    prompt = fresh("sharing")
    assert cached_tokens(llm, prompt, None) == 0
    assert cached_tokens(llm, prompt, None) > 100
    assert cached_tokens(llm, prompt, STEERED) == 0
    assert cached_tokens(llm, prompt, STEERED) > 100
    assert cached_tokens(llm, prompt, {"edits": [OCEAN]}) == 0
    assert cached_tokens(llm, prompt, {"edits": []}) > 100


def test_the_second_turn_after_a_steered_answer_is_cold(make_engine: Any) -> None:
    """Generated blocks are cached too: an unsteered second turn must not find those of a steered first."""
    llm = make_engine()
    prompt = fresh("turns")
    generated = {"edits": [{**BRIDGE, "scope": {"generated": True}}]}
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    (output,) = llm.generate([prompt], params, steer=generated, use_tqdm=False)
    second_turn = prompt + output.outputs[0].text + " And then?"
    warm = generate(llm, [second_turn])
    assert warm == cold(llm, second_turn, None)
