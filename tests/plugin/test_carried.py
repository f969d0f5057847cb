"""How specs travel in vLLM's parameters: as one object that nothing changes, from each form of ``LLM``'s prompts on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm import SamplingParams

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.alike import Edits
from saesteer.language.fields import Record
from saesteer.language.returns import Consumer
from saesteer.language.spec import Spec, clamp
from saesteer.plugin.door import frontend
from saesteer.plugin.door.admission import Door
from saesteer.plugin.llm import LLM
from tests.spec.catalogs import CATALOG


def held(value: Any) -> Iterator[Any]:
    """Everything that a value holds, itself included."""
    yield value
    inside = vars(value).values() if isinstance(value, Record | Consumer | Edits) else ()
    inside = value if isinstance(value, tuple) else inside
    for one in inside:
        yield from held(one)


def test_a_request_is_planned_by_its_own_spec_and_leaves_its_parameters_alone() -> None:
    """Twice the same parameters, then others that share their dict with these."""

    def original(self: Any, request_id: str, prompt: Any, params: SamplingParams) -> Any:
        assert isinstance(params.extra_args[KEY], Spec), "vLLM copies one object, not each edit"
        return SimpleNamespace(prompt_token_ids=[1, 2, 3], sampling_params=params.clone(), cache_salt=None)

    names = SimpleNamespace(hold=lambda: SimpleNamespace(catalog=CATALOG), count=lambda held, spec: None)
    processor = SimpleNamespace(saesteer_names=names, saesteer_door=Door())
    check = frontend._checking(original)
    wires = [{"edits": [clamp("gs15", n, 1.0 + n).to_json() for n in range(m, m + 4)]} for m in (0, 4)]
    params = SamplingParams(extra_args={KEY: wires[0], "own": [1]})
    others = SamplingParams(extra_args={**params.extra_args, KEY: wires[1]})
    found = [check(processor, str(n), {}, one).sampling_params for n, one in enumerate((params, others, params))]
    plans = [one.extra_args[KEY]["plan"] for one in found]
    assert plans[0] == plans[2] != plans[1] and len(plans[0]) == len(plans[1])
    assert [one.extra_args["own"] for one in found] == [[1]] * 3
    assert params.extra_args == {KEY: wires[0], "own": [1]} and others.extra_args == {KEY: wires[1], "own": [1]}


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
