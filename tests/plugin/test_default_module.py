"""A module that steers all traffic: every request but those that opt out, told in its answer, and never beam search."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from saesteer import LLM, hf
from saesteer.errors import SpecError
from tests.plugin.conftest import BRIDGE, MODULES, OCEAN, PROMPTS, Dictionaries, engine_options, generate
from tests.plugin.parity import TOLERANCE, compare

pytestmark = pytest.mark.slow


# The edits of "bridge", and behind them a stop that no short answer reaches, and an edit that none does.
STOP = {"op": "stop", "when": {"probe": "probe", "above": -1e9}, "for": 2, "scope": {"positions": [[60, None]]}}
LATE = {**OCEAN, "scope": {"positions": [[900, None]]}}
WATCHED: dict[str, Any] = {"edits": [*MODULES["bridge"]["edits"], STOP, LATE]}


@pytest.fixture(scope="module")
def llm(served_dir: str, dictionaries: Dictionaries) -> Iterator[Any]:
    options = {**dictionaries.options, "modules": {**MODULES, "watched": WATCHED}}
    made: Any = LLM(served_dir, **options, default_module="watched", **engine_options(dtype="float32"))
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def test_all_traffic_is_steered_but_for_requests_that_opt_out(llm: Any, oracle: hf.Model) -> None:
    specs = [None, {"edits": [OCEAN]}, {"edits": [OCEAN], "defaults": False}, {"defaults": False}]
    same: list[Any] = [{"edits": [{"op": "use", "module": "bridge"}]}]
    same += [{"edits": [{"op": "use", "module": "bridge"}, OCEAN]}, {"edits": [OCEAN]}, {"edits": []}]
    for _ in range(2):  # the second time from the prefix cache
        for prompt in PROMPTS[:2]:
            made = generate(llm, [prompt] * len(specs), specs, tokens=12)
            for one, spec in zip(made, same, strict=True):
                assert compare(oracle, prompt, one, spec)[0] < TOLERANCE
    params = SamplingParams(temperature=0, max_tokens=4)
    (plain,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    *entries, late = plain.saesteer["applied"]
    many = len(MODULES["bridge"]["edits"])
    assert {entry["edit"] for entry in entries} == {f"saesteer.defaults.edits[{n}]" for n in range(many)}
    assert all(entry["tokens_edited"] and "warning" not in entry for entry in entries)
    assert (late["edit"], late["tokens_edited"]) == (f"saesteer.defaults.edits[{many + 1}]", 0)
    assert late["warning"] == "its scope holds no token of this request"
    assert MODULES["bridge"]["edits"][0] == BRIDGE
    assert plain.saesteer["flags"] == []
    with pytest.raises(SpecError, match="beam search cannot be steered"):
        llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_stop_of_the_default_module_ends_all_traffic_but_requests_that_opt_out(llm: Any) -> None:
    """At the second position that is watched, whatever the request asks for by itself."""
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    specs = [None, {"edits": [OCEAN]}, {"edits": [OCEAN], "defaults": False}]
    outputs = llm.generate(PROMPTS[:1] * 3, params, steer=specs, use_tqdm=False)
    field, start = f"saesteer.defaults.edits[{len(MODULES['bridge']['edits'])}]", len(outputs[0].prompt_token_ids)
    for output in outputs[:2]:
        (choice,) = output.outputs
        assert (choice.finish_reason, choice.stop_reason) == ("stop", field)
        assert choice.saesteer["flags"] == [{"edit": field, "position": 61}]
        assert len(choice.token_ids) == 61 + 2 - start
    (free,) = outputs[2].outputs
    assert (free.finish_reason, len(free.token_ids)) == ("length", 80)
    assert "flags" not in free.saesteer
