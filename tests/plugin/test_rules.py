"""Rules on the real engine: requests end, and are marked, at the position where their own read-outs say so.

Each request reads what its rules watch, so a plain loop over its scores says where the rules fire.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.plugin.conftest import preemptions
from tests.plugin.read_requests import BLOCK, OPTIONS, STEERED, ask, text
from tests.plugin.rule_requests import ALWAYS, flag, records, rule, scores, spec, threshold

pytestmark = pytest.mark.slow


@pytest.fixture
def llm(make_engine: Callable[..., Any]) -> Any:
    found = make_engine(**OPTIONS)
    assert found.reset_prefix_cache()
    return found


def fires(found: dict[int, float], above: float, run: int = 1, start: int = 0) -> int | None:
    """Where a rule fires, by a plain loop."""
    length = 0
    for at in sorted(found):
        length = length + 1 if at >= start and found[at] > above else 0
        if length == run:
            return at
    return None


def test_two_conditions_must_hold_together(llm: Any) -> None:
    """A feature and a probe at two sites, before the edits there."""
    prompt = [text("two conditions")]
    when = [{"probe": "any", "site": "resid_mid.7", "above": 0}, {"dictionary": "demo", "feature": 3497, "below": 0.5}]
    reads = {
        "probes": [{"probe": "any", "site": "resid_mid.7"}],
        "features": [{"dictionary": "demo", "features": [3497]}],
    }
    steer = {"edits": [*STEERED, {"op": "flag", "when": when, "for": 2}], "return": reads}
    (output,) = ask(llm, prompt, steer, 40)
    said = output.outputs[0].saesteer
    (rows,) = (entry["rows"] for entry in said["features"])
    both = zip(scores(output.outputs[0]).items(), rows, strict=True)
    found = {at: float(score > 0 and row["features"]["3497"] < 0.5) for (at, score), row in both}
    expected = fires(found, 0.5, 2)
    assert said["flags"] == ([] if expected is None else [flag(len(STEERED), expected)])


@pytest.mark.parametrize("place", ["first chunk", "second chunk", "last"])
def test_a_stop_in_the_prompt_answers_without_a_token(llm: Any, place: str) -> None:
    prompt = [text(f"prompt {place}", 700)]
    (plain,) = ask(llm, prompt, spec(), 2)
    length, found = len(plain.prompt_token_ids), scores(plain.outputs[0])
    assert length > 2 * 64, "three chunks"
    start = {"first chunk": 1, "second chunk": 64, "last": length - 1}[place]
    position = next(at for at in records(found, start) if at > start or place == "last")
    above = threshold(found, position, start)
    stop = rule("stop", above, positions=[[start, None]])
    late = rule("flag", ALWAYS, positions=[[position + 1, None]])
    for cached in (False, True):
        assert cached or llm.reset_prefix_cache()
        if cached:
            ask(llm, prompt, None, 2)
        both = [{"edits": [stop, late]}, None]
        output, other = ask(llm, [*prompt, text(f"beside {place} {cached}", 300)], both, 8)
        (choice,) = output.outputs
        assert (choice.token_ids, choice.text) == ([], "")
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "saesteer.edits[0]")
        assert choice.saesteer == {"applied": [], "flags": [flag(0, position)]}
        assert len(other.outputs[0].token_ids) == 8
        if cached and place != "last":
            assert (output.num_cached_tokens or 0) <= start // BLOCK * BLOCK


def test_prompts_stay_cached_where_only_generated_tokens_are_watched(llm: Any) -> None:
    prompt = [text("stays cached", 500)]
    (first,) = ask(llm, prompt, {"edits": [rule("stop", ALWAYS)]}, 8)
    (second,) = ask(llm, prompt, {"edits": [rule("flag", ALWAYS)]}, 8)
    whole = (len(first.prompt_token_ids) - 1) // BLOCK * BLOCK
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, whole)
    start = len(first.prompt_token_ids)
    assert len(first.outputs[0].token_ids) == 2 and first.outputs[0].saesteer["flags"] == [flag(0, start)]
    assert len(second.outputs[0].token_ids) == 8 and second.outputs[0].saesteer["flags"] == [flag(0, start)]


def test_a_crowd_that_preempts(llm: Any) -> None:
    """Rules over prompts and answers fire where the scores of the same run say, though much is computed twice."""
    prompts = [text(f"rules {n}", 300 + 40 * (n % 5)) for n in range(24)]  # eight at once need twice the cache
    specs = [
        spec(
            rule("flag", 5.0 * (n % 4), 1 + n % 3, positions=[[1, None]]),
            rule("stop", 30.0 + n % 12, 1, generated=True),
            edits=STEERED if n % 3 == 1 else [],
        )
        for n in range(24)
    ]
    before = preemptions(llm)
    outputs = ask(llm, prompts, specs, [70 + 9 * (n % 7) for n in range(24)])
    assert preemptions(llm) > before, "the cache was small enough to preempt"
    fired = 0
    for n, output in enumerate(outputs):
        (choice,), start, first = output.outputs, len(output.prompt_token_ids), len(STEERED) * (n % 3 == 1)
        own = scores(choice)
        flagged, stopped = fires(own, 5.0 * (n % 4), 1 + n % 3, 1), fires(own, 30.0 + n % 12, 1, start)
        marks = [flag(first, flagged)] * (flagged is not None) + [flag(first + 1, stopped)] * (stopped is not None)
        assert sorted(choice.saesteer["flags"], key=str) == sorted(marks, key=str)
        assert (choice.finish_reason == "stop") == (stopped is not None)
        if stopped is not None:
            assert len(choice.token_ids) == stopped + 2 - start
        fired += len(marks)
    assert fired > 6
