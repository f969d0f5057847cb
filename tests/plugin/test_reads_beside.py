"""Reads beside what else goes on in an engine: prompts of other lengths in its cache, a cache that is emptied, clamps
whose site has no op of its own. All of it against Transformers, or against the same request undisturbed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from saesteer import hf
from tests.entries import tensor
from tests.plugin.read_requests import BLOCK, EVERYWHERE, OPTIONS, STEERED, ask, check, text
from tests.plugin.readings import CLOSE, check_reads, passed
from tests.plugin.rule_requests import ALWAYS, rule

pytestmark = pytest.mark.slow


@pytest.fixture
def llm(make_engine: Callable[..., Any]) -> Any:
    found = make_engine(**OPTIONS)
    assert found.reset_prefix_cache()
    return found


def test_what_is_read_of_a_longer_prompt_is_computed_though_the_cache_has_it(llm: Any, oracle: hf.Model) -> None:
    """A spec that was asked for first with a prompt that ends before what it reads: its meaning is remembered."""
    first = 70
    reads = {
        "probes": [{"probe": "probe", "scope": {"positions": [[first, None]]}}],
        "features": [{"dictionary": "topk", "scope": {"positions": [[first, first + 9]]}}],
        "activations": [{"site": "resid_post.20", "reduce": "mean", "scope": {"positions": [[first, None]]}}],
        "hidden": {"scope": {"positions": [[first, first + 2]]}},
    }
    asked = {"edits": STEERED, "return": reads}
    short, long = text("behind shorter", 80), text("behind shorter", 700)
    (before,) = ask(llm, [short], asked, 4)
    assert len(before.prompt_token_ids) < first
    check(oracle, before, reads, STEERED)
    ask(llm, [long], {"edits": STEERED}, 4)
    (output,) = ask(llm, [long], asked, 4)
    assert output.num_cached_tokens == first // BLOCK * BLOCK, "the prefix in front is still shared"
    check(oracle, output, reads, STEERED)
    ask(llm, [short], asked, 4)
    (again,) = ask(llm, [long], asked, 4)
    check(oracle, again, reads, STEERED)


def test_a_prompt_that_a_stop_ends_has_a_place_for_each_logprob(llm: Any) -> None:
    """In its first chunk: vLLM knows the logprobs of whole prompts alone."""
    asked = {"edits": [rule("stop", ALWAYS, positions=[[3, 4]])], "return": {"probes": ["probe"]}}
    (output,) = ask(llm, [text("cut off", 700)], asked, 4, prompt_logprobs=0)
    assert output.outputs[0].token_ids == [] and output.outputs[0].stop_reason == "saesteer.edits[0]"
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) > 64
    assert output.prompt_logprobs[-1] is None


TRANSCODED = [
    {"op": "clamp", "dictionary": "cross", "feature": 3, "value": 9.0},
    {"op": "clamp", "dictionary": "cross", "feature": 4, "value": 2.0, "mode": "add", "scope": {"generated": True}},
]
BEHIND: dict[str, Any] = {
    "activations": [
        {"site": "resid_post.18"},
        {"site": "resid_post.18", "at": "after"},
        {"site": "resid_post.20", "reduce": "mean"},
    ],
    "probes": [
        {"probe": "any", "site": "resid_post.18", "scope": EVERYWHERE},
        {"probe": "any", "site": "resid_post.18", "scope": EVERYWHERE, "at": "after"},
    ],
    "features": [{"dictionary": "cross", "features": [3, 4], "scope": EVERYWHERE}],
}


def test_reads_behind_a_clamp_whose_site_has_no_op_include_it(llm: Any, oracle: hf.Model) -> None:
    """The op of resid_post.18 adds what mlp_out.18 gains. Beside it runs one who reads the same and edits nothing."""
    prompts = [text(f"transcoded {n}", 500) for n in range(2)]
    asked: list[Any] = [{"edits": TRANSCODED, "return": BEHIND}, {"return": BEHIND}]
    for output, edits in zip(ask(llm, prompts, asked), (TRANSCODED, []), strict=True):
        (choice,) = output.outputs
        prompt, ids = output.prompt_token_ids, [*output.prompt_token_ids, *choice.token_ids[:-1]]
        made = passed(oracle, ids, edits, len(prompt))
        before, after, mean = choice.saesteer["activations"]
        assert before["positions"] == after["positions"] == [*range(len(ids))]
        assert before["data"] == after["data"], "of its own edits there is none"
        found, wanted = torch.from_numpy(tensor(before).copy()), made.after["resid_post.18"]
        assert ((found - wanted).abs().amax(1) < CLOSE * wanted.abs().amax(1)).all()
        one, other = choice.saesteer["probes"]
        assert one["scores"] == pytest.approx(other["scores"], rel=1e-4, abs=1e-2)
        # What the transcoder reads is in front of its clamp, and what stands behind has it.
        rest = {"features": BEHIND["features"], "activations": BEHIND["activations"][2:]}
        del choice.saesteer["probes"]
        choice.saesteer["activations"] = [mean]
        check_reads(oracle, prompt, choice, rest, edits)
        if edits:
            far = (made.after["resid_post.18"] - made.before["resid_post.18"]).abs().max()
            assert float(far) > 1.0, "the clamp does something there"
