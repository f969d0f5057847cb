"""Reads beside what else goes on in an engine: prompts of other lengths in its cache, a cache that is emptied, clamps
whose site has no op of its own. All of it against Transformers, or against the same request undisturbed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from saesteer import hf
from saesteer.errors import SpecError
from saesteer.plugin.results.kept import Results
from tests.entries import tensor
from tests.plugin.conftest import BRIDGE
from tests.plugin.read_requests import BLOCK, EVERYWHERE, OPTIONS, READS, STEERED, ask, check, text
from tests.plugin.readings import CLOSE, check_reads, passed
from tests.plugin.rule_requests import ALWAYS, flag, records, rule, scores, spec, threshold

pytestmark = pytest.mark.slow


@pytest.fixture
def llm(make_engine: Callable[..., Any]) -> Any:
    found = make_engine(**OPTIONS)
    assert found.reset_prefix_cache()
    return found


@pytest.mark.parametrize("edits", [[], STEERED], ids=["plain", "steered"])
def test_what_is_read_of_a_longer_prompt_is_computed_though_the_cache_has_it(
    llm: Any, oracle: hf.Model, edits: Any
) -> None:
    """A spec that was asked for first with a prompt that ends before what it reads: its meaning is remembered."""
    first = 70
    reads = {
        "probes": [{"probe": "probe", "scope": {"positions": [[first, None]]}}],
        "features": [{"dictionary": "topk", "scope": {"positions": [[first, first + 9]]}}],
        "activations": [{"site": "resid_post.20", "reduce": "mean", "scope": {"positions": [[first, None]]}}],
        "hidden": {"scope": {"positions": [[first, first + 2]]}},
    }
    asked = {"edits": edits, "return": reads}
    short, long = text(f"behind shorter {len(edits)}", 80), text(f"behind shorter {len(edits)}", 700)
    (before,) = ask(llm, [short], asked, 4)
    assert len(before.prompt_token_ids) < first
    check(oracle, before, reads, edits)
    ask(llm, [long], {"edits": edits}, 4)
    (output,) = ask(llm, [long], asked, 4)
    assert output.num_cached_tokens == first // BLOCK * BLOCK, "the prefix in front is still shared"
    check(oracle, output, reads, edits)
    ask(llm, [short], asked, 4)
    (again,) = ask(llm, [long], asked, 4)
    check(oracle, again, reads, edits)


def test_a_stop_in_a_longer_prompt_fires_though_the_cache_has_it(llm: Any) -> None:
    """The same for a rule, next to a read of the whole prompt and next to none."""
    prompt = text("stop behind shorter", 700)
    (plain,) = ask(llm, [prompt], spec(), 2)
    length, found = len(plain.prompt_token_ids), scores(plain.outputs[0])
    position = next(at for at in records(found, 100) if at > 100)
    assert position < length
    stop = rule("stop", threshold(found, position, 100), positions=[[100, None]])
    for asked in ({"edits": [stop]}, {"edits": [*STEERED[:1], stop]}, spec(stop)):
        others = {**asked, "edits": asked["edits"][:-1]}  # the stop has no token of so short a request
        (short,) = ask(llm, [text("stop behind shorter", 60)], others, 4)
        assert len(short.prompt_token_ids) < 100 and len(short.outputs[0].token_ids) == 4
        if len(asked["edits"]) == 1:
            ask(llm, [prompt], None, 2)
        (output,) = ask(llm, [prompt], asked, 4)
        (choice,) = output.outputs
        if len(asked["edits"]) == 2:  # other scores, which an empty cache tells
            assert llm.reset_prefix_cache()
            (cold,) = ask(llm, [prompt], asked, 4)
            assert choice.saesteer["flags"] == cold.outputs[0].saesteer["flags"]
            assert choice.token_ids == cold.outputs[0].token_ids
            continue
        assert (choice.token_ids, choice.stop_reason) == ([], "saesteer.edits[0]")
        assert choice.saesteer["flags"] == [flag(0, position)]
        assert (output.num_cached_tokens or 0) <= 100 // BLOCK * BLOCK
        if "return" in asked:
            told = scores(choice)
            assert [*told] == [*range(len(told))] and position < len(told) <= length
            assert told == pytest.approx({at: found[at] for at in told}, rel=1e-3, abs=1e-2)


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


def test_a_rule_behind_such_a_clamp_compares_what_is_read_there(llm: Any) -> None:
    reads = {"probes": BEHIND["probes"][:1]}
    (plain,) = ask(llm, [text("ruled")], {"edits": TRANSCODED, "return": reads}, 8)
    found = dict(enumerate(plain.outputs[0].saesteer["probes"][0]["scores"]))
    position = records(found, 1)[-1]
    flagged = {"op": "flag", "when": {"probe": "any", "site": "resid_post.18", "above": threshold(found, position, 1)}}
    flagged["scope"] = {"positions": [[1, None]]}
    (output,) = ask(llm, [text("ruled")], {"edits": [*TRANSCODED, flagged]}, 8)
    assert output.outputs[0].saesteer["flags"] == [flag(2, position)]
    own = {"op": "add", "vector": "any", "site": "resid_post.18"}
    for wrong in ({"edits": [*TRANSCODED, own], "return": reads}, {"edits": [own, *TRANSCODED, flagged]}):
        with pytest.raises(SpecError, match=r"resid_post.18 before edits of .* and after those of mlp_out.18"):
            ask(llm, [text("refused")], wrong, 2)
    late = {"probes": BEHIND["probes"][1:]}
    (both,) = ask(llm, [text("ruled")], {"edits": [*TRANSCODED, own], "return": late}, 8)
    (alone,) = ask(llm, [text("ruled")], {"edits": TRANSCODED, "return": late}, 8)
    assert both.saesteer["probes"][0]["scores"][:3] != alone.saesteer["probes"][0]["scores"][:3]


def test_a_cache_that_is_emptied_takes_nothing_from_who_reads(llm: Any, oracle: hf.Model) -> None:
    """vLLM begins all running requests anew: in mid-prompt, in mid-answer, one that keeps, one that a rule watches."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    results: Results = engine.input_processor.saesteer_door.results
    handled = {"activations": [{"site": "resid_post.20", "as": "handle"}, READS["activations"]["activations"][1]]}
    asked: dict[str, tuple[Any, Any, int]] = {
        "all": ([], READS["all"], 30),
        "steered": (STEERED, READS["all"], 30),
        "handles": ([BRIDGE], handled, 26),
        "rules": ([rule("flag", ALWAYS, 3, positions=[[1, None]])], READS["generated"], 22),
        "long": ([], READS["generated"], 9),
    }
    ids = {name: llm.get_tokenizer()(text(f"emptied {name}", 100)).input_ids for name in asked}
    ids["long"] = llm.get_tokenizer()(text("emptied long", 1500)).input_ids  # several steps' prompt
    for name, (edits, returns, tokens) in asked.items():
        extra = {"saesteer": {"edits": edits, "return": returns}}
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, extra_args=extra)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(name, {"prompt_token_ids": ids[name]}, params)
    ended: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps in (3, 4, 9, 20):
            assert engine.reset_prefix_cache(reset_running_requests=True)
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended.keys() == asked.keys()
    for name, (edits, returns, tokens) in asked.items():
        (choice,) = ended[name].outputs
        assert len(choice.token_ids) == tokens
        if name == "handles":
            entry, whole = choice.saesteer["activations"]
            assert len(results.sweep()) == 1, "nothing of what was begun anew"
            kept = entry["handle"].numbers()
            entry["handle"].delete()
            made = passed(oracle, [*ids[name], *choice.token_ids[:-1]], edits, len(ids[name]))
            assert entry["positions"] == [*range(len(kept))]
            off = np.abs(kept - made.before["resid_post.20"].numpy()).max(1)
            assert (off < CLOSE * made.before["resid_post.20"].abs().amax(1).numpy()).all()
            assert (whole["tokens"], whole["positions"]) == (len(kept), [0, len(kept)])
        else:
            check_reads(oracle, ids[name], choice, returns, [] if name == "rules" else edits)
    assert ended["rules"].outputs[0].saesteer["flags"] == [flag(0, 3)]
