"""What ``saesteer.LLM`` hands to vLLM's for each form of prompts. Starts no engine."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.plugin.llm import LLM

SPEC: dict[str, Any] = {"edits": [{"op": "add", "vector": "v", "site": "resid_post.1"}]}


@pytest.mark.parametrize(
    ("prompts", "number"),
    [
        ("text", None),
        ([5, 6, 7], None),
        ({"prompt_token_ids": [5, 6]}, None),
        (["one", "two"], 2),
        ([[5, 6], [7]], 2),
        ([], 0),
    ],
    ids=str,
)
def test_a_spec_goes_with_each_prompt(prompts: Any, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes a list of token ids for one prompt."""
    handed: list[Any] = []

    def generate(_: Any, __: Any, params: Any) -> list[Any]:
        handed.append(params)
        return []

    monkeypatch.setattr(vllm.LLM, "generate", generate)
    llm: Any = LLM.__new__(LLM)
    llm.generate(prompts, vllm.SamplingParams(), steer=SPEC)
    [params] = handed
    assert (len(params) if isinstance(params, list) else None) == number
    for one in params if isinstance(params, list) else [params]:
        assert one.extra_args[KEY] is not None


@pytest.mark.parametrize("several", [False, True])
def test_a_spec_beside_one_in_the_parameters_is_a_conflict(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.LLM, "generate", lambda _, __, params: params)
    llm: Any = LLM.__new__(LLM)
    params = vllm.SamplingParams(extra_args={KEY: SPEC})
    with pytest.raises(SpecError, match=r"^steer: stands beside 'saesteer' in sampling_params\.extra_args") as told:
        llm.generate(["a", "b"] if several else "a", [vllm.SamplingParams(), params] if several else params, steer=SPEC)
    assert told.value.code == "conflict"
    assert llm.generate("a", params) is params
    [_, second] = llm.generate(["a", "b"], [vllm.SamplingParams(), params], steer=[SPEC, None])
    assert second is params, "a prompt without one keeps its own"
