"""A module that steers all traffic: every request but those that opt out, told in its answer, and never beam search."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from saesteer import LLM, hf
from saesteer.errors import SpecError
from tests.plugin.conftest import BRIDGE, MODULES, OCEAN, PROMPTS, Dictionaries, engine_options, generate
from tests.plugin.test_parity import TOLERANCE, compare

pytestmark = pytest.mark.slow


def test_all_traffic_is_steered_but_for_requests_that_opt_out(
    model_dir: str, dictionaries: Dictionaries, oracle: hf.Model
) -> None:
    llm: Any = LLM(model_dir, **dictionaries.options, default_module="bridge", **engine_options(dtype="float32"))
    try:
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
        fields = {entry["edit"] for entry in plain.saesteer["applied"]}
        assert fields == {f"saesteer.defaults.edits[{n}]" for n in range(len(MODULES["bridge"]["edits"]))}
        assert MODULES["bridge"]["edits"][0] == BRIDGE
        with pytest.raises(SpecError, match="beam search cannot be steered"):
            llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=2))
    finally:
        llm.llm_engine.engine_core.shutdown()
