"""What --fail-fast finds, from rows of lm_head to the requests that a scheduler ends. Starts no engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.utils import ConstantList

from saesteer.plugin.results import forms, sending
from saesteer.plugin.results.collapse import PERIODS, collapse, end, lengths
from saesteer.plugin.worker.health import Health, attach, look

INF, NAN = float("inf"), float("nan")
ROW = st.lists(st.sampled_from([0.0, 1.0, -3.5, 6e4]), min_size=3, max_size=3)


@given(
    st.lists(st.tuples(ROW, ROW, st.sampled_from([None, NAN, INF, -INF]), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 2),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_exactly_the_rows_that_are_not_finite_fail(rows: Any, place: int, dtype: torch.dtype) -> None:
    hidden = torch.tensor([read for read, *_ in rows], dtype=dtype)
    logits = torch.tensor([made for _, made, *_ in rows], dtype=dtype)
    expected = {}
    for number, (_, _, wrong, in_hidden) in enumerate(rows):
        if wrong is None:
            continue
        (hidden if in_hidden else logits)[number, place] = wrong
        if in_hidden or wrong != -INF:  # −∞ forbids a token
            expected[str(number)] = f"non_finite: {'hidden states' if in_hidden else 'logits'}"
    names = [str(number) for number in range(len(rows))]
    assert look(names, hidden, logits).failed == expected


def model(seen: Health, **options: Any) -> Any:
    """A runner's model, whose lm_head makes the logits that it is asked for."""
    found = nn.Module()
    found.compute_logits = lambda hidden: None if hidden is None else hidden * 2  # type: ignore[assignment]
    attach(SimpleNamespace(get_model=lambda: found, parallel_config=SimpleNamespace(**options)), seen)
    return found


def collapsed(ids: list[int], after: int) -> int:
    """The shortest period of tokens that each repeat what stands a period before them, to the end; the definition."""
    for period in range(1, PERIODS + 1):
        repeated = 0
        while repeated + period < len(ids) and ids[-1 - repeated] == ids[-1 - repeated - period]:
            repeated += 1
        if repeated >= after and repeated >= period:
            return period
    return 0


@st.composite
def answers(draw: Any) -> list[int]:
    """Tokens with stretches that repeat, of a period near the longest and of short ones, whole or broken off."""
    ids: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        ids += draw(st.lists(st.integers(0, 3), max_size=6))
        period = draw(st.lists(st.integers(0, 40), min_size=1, max_size=18) | st.lists(st.integers(0, 2), min_size=1))
        ids += (period * 30)[: draw(st.integers(0, 60))]
    return ids


@settings(max_examples=300)
@given(answers(), st.integers(4, 40), st.data())
def test_a_collapse_is_found_at_its_first_token_however_they_come(ids: list[int], after: int, data: Any) -> None:
    expected = next(((stop, of) for stop in range(len(ids) + 1) if (of := collapsed(ids[:stop], after))), None)
    start = 0
    while start < len(ids):
        stop = data.draw(st.integers(start + 1, min(len(ids), start + 6)))
        if period := collapse(ConstantList(ids[:stop]), start, after):
            assert expected is not None and start < expected[0] <= stop and period == expected[1]
            return
        start = stop
    assert expected is None


@given(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(0, 40), st.integers(4, 20))
def test_the_step_that_reaches_the_count_ends_it(token: int, steps: list[int], other_at: int, after: int) -> None:
    """However many tokens a step brings; once, or not at all."""
    request: Any = SimpleNamespace(request_id="a", output_token_ids=[], done=False)
    request.is_finished = lambda: request.done
    ended: list[str] = []

    def finish_requests(names: list[str], status: Any) -> None:
        assert "ERROR" in status.name
        request.done = True
        ended.extend(names)

    scheduler = SimpleNamespace(requests={"a": request}, finish_requests=finish_requests)
    for several in steps:
        if request.done:
            break
        request.num_output_tokens = len(request.output_token_ids)
        before = lengths(scheduler, SimpleNamespace(num_scheduled_tokens={"a": several, "gone": 1}))
        start = len(request.output_token_ids)
        request.output_token_ids += [9 if at == other_at else token for at in range(start, start + several)]
        outputs = {0: EngineCoreOutputs(outputs=[EngineCoreOutput("a", [token] * several, stop_reason=3)])}
        end(scheduler, outputs, before, after)
        (output,) = outputs[0].outputs
        if request.done:
            assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ERROR)
            assert sending.carried(output) == [(forms.FAILED, "collapsed: 1")]
        else:
            assert output.new_token_ids and output.finish_reason is None
    made = request.output_token_ids
    assert ended == (["a"] if any(collapsed(made[:stop], after) for stop in range(len(made) + 1)) else [])
