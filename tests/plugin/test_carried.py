"""A parsed spec travels in vLLM's parameters as one object: nobody changes it, and none reaches another request."""

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.renderers.inputs.preprocess import prompt_to_seq

from saesteer.language.alike import Edits
from saesteer.language.fields import Record
from saesteer.language.returns import Consumer
from saesteer.language.spec import Spec, as_spec, clamp, from_json
from saesteer.plugin import llm
from saesteer.plugin.door import frontend
from saesteer.plugin.door.admission import Door
from tests.spec.catalogs import CATALOG
from tests.spec.strategies import copied, specs

KEY = "saesteer"
thorough = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def held(value: Any) -> Iterator[Any]:
    """Everything that a value holds, itself included."""
    yield value
    inside = vars(value).values() if isinstance(value, Record | Consumer | Edits) else ()
    inside = value if isinstance(value, tuple) else inside
    for one in inside:
        yield from held(one)


def spoil(value: Any) -> None:
    """Change all of a JSON value that can change."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoil(one)
    if isinstance(value, dict | list):
        value.clear()


@thorough
@given(specs)
def test_a_spec_is_its_own_copy_as_nothing_in_it_can_change(spec: Spec) -> None:
    fixed = (Record, Consumer, Edits, tuple, str, int, float, bytes, type(None))
    assert {type(one) for one in held(spec) if not isinstance(one, fixed)} == set()
    assert copy.deepcopy(spec) is spec and copy.deepcopy([spec])[0] is spec
    with pytest.raises(AttributeError):
        spec.edits = ()  # type: ignore[misc]  # it is frozen


@thorough
@given(specs)
def test_what_a_client_does_to_its_json_later_changes_no_spec(spec: Spec) -> None:
    document = copied(spec.to_json())
    parsed = from_json(document)
    spoil(document)
    assert parsed == spec and parsed.to_json() == spec.to_json()


@thorough
@given(specs, specs, st.booleans())
def test_parameters_that_carry_a_spec_leave_those_of_others_alone(one: Spec, other: Spec, skip_clone: bool) -> None:
    wire = one.to_json()
    text = json.dumps(wire)
    given_ = SamplingParams(max_tokens=3, stop=["a"], extra_args={KEY: wire, "own": [1]}, skip_clone=skip_clone)
    first, second = frontend.with_spec(given_, one), frontend.with_spec(given_, other)
    first.max_tokens = 4
    taken = first.clone()  # as vLLM does
    taken.extra_args = {**taken.extra_args, KEY: "planned"}
    assert first.extra_args[KEY] is one and second.extra_args[KEY] is other
    assert given_.extra_args == {KEY: wire, "own": [1]} and json.dumps(wire) == text
    assert (given_.max_tokens, first.max_tokens, second.max_tokens) == (3, 4, 3)
    assert frontend.with_spec(given_, None) is given_
    assert frontend.spec_of(first) is one, "nothing is parsed again"


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


def test_one_spec_for_all_prompts_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(wraps=as_spec)
    monkeypatch.setattr(llm, "as_spec", parse)
    steered: Any = llm.LLM._steered
    engine = SimpleNamespace(get_default_sampling_params=SamplingParams)
    one, other = ({"edits": [clamp("gs15", n, 1.0).to_json()]} for n in (1, 2))
    found = steered(engine, None, one, 64)
    assert parse.call_count == 1 and len({id(each) for each in found}) == 64, "each prompt has parameters of its own"
    assert {id(each.extra_args[KEY]) for each in found} == {id(found[0].extra_args[KEY])}
    mixed = steered(engine, SamplingParams(max_tokens=7), [one, None, other], 3)
    assert [(each.extra_args or {}).get(KEY) for each in mixed] == [from_json(one), None, from_json(other)]
    assert all(each.max_tokens == 7 for each in mixed)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [([5, 6, 7], 1), ([5], 1), ([[5, 6], [7]], 2), (["a", "b"], 2), ("a", 1), ({"prompt_token_ids": [5, 6]}, 1)],
)
def test_a_list_of_token_ids_is_one_prompt(prompts: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has it, which wants as many parameters as prompts."""
    generate = Mock(return_value=[])
    monkeypatch.setattr(vllm.LLM, "generate", generate)
    engine = object.__new__(llm.LLM)
    engine.generate(prompts, SamplingParams(), steer=[clamp("gs15", 1, 1.0)])
    given, params = generate.call_args.args
    assert given is prompts and len(prompt_to_seq(prompts)) == count
    assert (len(params) if isinstance(params, list) else 1) == count
