"""What an offline answer says of its edits, with the tokens that the engine counted."""

from typing import Any

import pytest

from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders import load
from tests.plugin.conftest import BRIDGE, LONG_PROMPT, OCEAN, PROMPTS

pytestmark = pytest.mark.slow

MAX_ACT = float(load(DEMO_SAE).max_act[BRIDGE["feature"]])  # type: ignore[index]


def test_an_answer_says_what_was_applied(make_engine: Any) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    inline = {"op": "add", "vector": [1.0] * 576, "site": "resid_mid.7", "scope": {"positions": [[1, 3]]}}
    specs: list[Any] = [
        {"edits": [BRIDGE, {**OCEAN, "scope": {"generated": True}}]},
        None,
        {"edits": [inline, {"op": "add", "vector": "each", "site": "resid_post"}]},
        {"edits": []},
        {
            "edits": [
                {"op": "use", "module": "outer"},
                {"op": "cap", "vector": "any", "site": "resid_mid.7", "max": 1e6},
            ]
        },
    ]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = [PROMPTS[n % 4] for n in range(len(specs))]
    outputs = llm.generate(prompts, params, steer=specs, use_tqdm=False)
    assert not hasattr(outputs[1], "saesteer")
    lengths = [len(output.prompt_token_ids) for output in outputs]
    said: list[Any] = [getattr(output, "saesteer", {}).get("applied") for output in outputs]
    bridge, ocean = said[0]
    assert len(bridge.pop("version")) == 16
    # The last token that was generated is never an input.
    assert bridge == {
        "edit": "saesteer.edits[0]", "op": "clamp", "site": "resid_post.15", "dictionary": "demo", "feature": 3497,
        "mode": "set", "value": 2.0, "unit": "max_act", "times_max_act": 2.0, "max_act": MAX_ACT, "max_act_by": "file",
        "positions": [[1, None]], "tokens_edited": lengths[0] - 1 + 8, "tokens_cached": 0,
    }  # fmt: skip
    assert (ocean["positions"], ocean["tokens_edited"]) == ([[lengths[0], None]], 8)
    assert [(one["site"], one.get("vector"), one.get("layer"), one["tokens_edited"]) for one in said[2]] == [
        ("resid_mid.7", None, None, 2),
        *((f"resid_post.{layer}", "each", layer, lengths[2] - 1 + 8) for layer in (7, 15, 20)),
    ]
    assert said[3] == []
    assert [one["edit"] for one in said[4]][-1] == "saesteer.edits[1]"
    assert said[4][0]["edit"] == "saesteer.edits[0].module.edits[0].module.edits[0]"
    assert said[4][-1]["tokens_edited"] == 0, "a cap that nothing reaches"


def test_cached_tokens_stand_apart_and_add_up(make_engine: Any) -> None:
    """What the prefix cache had is counted by whoever computed it; a gate that never fires is 0 in both answers."""
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    quiet = {**OCEAN, "when": {"dictionary": "demo", "feature": 6511, "above": 1e9}}
    spec = {"edits": [{**BRIDGE, "scope": {"positions": [[3, 40], [50, None]]}}, quiet]}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = [llm.generate([LONG_PROMPT], params, steer=spec, use_tqdm=False)[0] for _ in range(2)]
    length, cached = len(answers[1].prompt_token_ids), answers[1].num_cached_tokens
    assert cached and cached % 32 == 0 and cached >= 96
    told = [[(one["tokens_edited"], one["tokens_cached"]) for one in made.saesteer["applied"]] for made in answers]
    whole, before = 37 + length + 5 - 50, 37 + cached - 50
    assert told == [[(whole, 0), (0, 0)], [(whole - before, before), (0, cached - 1)]]
