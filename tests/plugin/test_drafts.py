"""Guessed tokens on their way, without an engine: rows of their own, and only those that hold are counted and read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from saesteer.config.config import KEY
from saesteer.engine.brought import Made, Part
from saesteer.engine.readouts import Reading
from saesteer.kernels import layout
from saesteer.planning.plan import END, Rule
from saesteer.plugin.reasoning import PARSER
from saesteer.plugin.results import counts, forms, rules, sending
from saesteer.plugin.results.forms import FIRED, RULES, Guessed
from saesteer.plugin.results.report import Report
from saesteer.plugin.worker.health import Health


def counters(tokens: int, dose: float) -> list[int]:
    """Of one edit and the doses of one site."""
    words = np.zeros(layout.DOSE_WORDS, dtype=np.int32)
    words[layout.DOSE_TOKENS] = tokens
    words.view(np.float32)[[layout.DOSE_MAX, layout.DOSE_SUM]] = dose
    return [tokens, *words.tolist()]


GUESSED = Guessed(50, 1, np.array([counters(1, 0.5), counters(1, 2.0), counters(1, 9.0)], dtype=np.int32))


@pytest.mark.parametrize(
    ("tokens", "held", "worst"), [(0, 0, 0.25), (1, 0, 0.25), (2, 1, 0.5), (3, 2, 2.0), (4, 3, 9.0)]
)
def test_only_guesses_that_hold_count(tokens: int, held: int, worst: float) -> None:
    """A step that gives n tokens has confirmed n - 1 guesses; without a token it was not this request's."""
    words = GUESSED.add(np.array(counters(4, 0.25), dtype=np.int32), tokens)
    assert words[0] == 4 + held and GUESSED.end(tokens) == 50 + held
    assert words[1:].view(np.float32)[layout.DOSE_MAX] == worst


def test_counters_at_each_token_where_the_front_end_may_drop_some() -> None:
    """vLLM drops the tokens of a step that stand behind a stop string."""
    words = np.array([3, *counters(4, 0.25), 0, 0], dtype=np.int32)
    assert counts.by_token(words, None, 1, each=True) == words.tobytes()
    whole = counts.by_token(words, GUESSED, 3, each=False)
    several = counts.by_token(words, GUESSED, 3, each=True)
    assert isinstance(several, list)
    assert [np.frombuffer(one, np.int32)[1] for one in several] == [4, 5, 6] and several[-1] == whole
    assert counts.by_token(words, GUESSED, 0, each=True) == words.tobytes(), "it has failed"
    report = Report(list)
    report.keep(several, 10)
    for tokens, held in ((13, 2), (12, 1), (11, 0), (10, 0)):
        report.cut(tokens)
        assert np.frombuffer(report.counted, np.int32)[1] == 4 + held
    report.keep(words.tobytes(), 13)
    report.cut(13)
    assert report.counted == words.tobytes()


def read(at: int, value: float, *, last: bool = False, watched: tuple[int, ...] | None = None) -> Any:
    reading = Reading("hidden", (), False, ((0, END),), last, "none", None, 0, (), (), watched)
    return Made([Part("a", 0, reading)], [[(at, at + 1)]], [1], (torch.tensor([[value]]),))


PROMPT, STOP = 4, "saesteer.edits[0]"


def stopped(first: int, values: list[float], tokens: list[int], **output: Any) -> Any:
    """The output of a step that computed positions from ``first`` on and gave these tokens, under a stop above 0.5."""
    sent = forms.sent([Rule("stop", STOP, ((0, END),), ((0, 0.5, END),), 1)])
    params = SimpleNamespace(extra_args={KEY: {RULES: sent, PARSER: None}})
    request: Any = SimpleNamespace(request_id="a", num_prompt_tokens=PROMPT, client_index=0, sampling_params=params)
    request.num_tokens, request.output_token_ids = first + 1 + len(tokens), []
    ended: list[str] = []
    scheduler = SimpleNamespace(vllm_config=None, finish_requests=lambda names, _: ended.extend(names))
    numbers = np.arange(len(tokens))[:, None]
    made = EngineCoreOutput("a", [*tokens], LogprobsLists(numbers, numbers, numbers[:, 0]), **output)
    positions = [*range(first, first + len(values))]
    rules.look(scheduler, {0: EngineCoreOutputs(outputs=[made])}, [(request, {0: (positions, values)})])
    assert ended or made.stop_reason != STOP
    return made


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH])
def test_a_stop_drops_the_tokens_behind_it(at: int, reason: Any) -> None:
    """Three guesses held. The token that was sampled where the rule fires is the last, whatever came behind it."""
    values = [float(number >= at) for number in range(4)]
    made = stopped(10, values, [7, 8, 9, 6], finish_reason=reason, stop_reason=6 if reason else None)
    assert made.new_token_ids == [7, 8, 9, 6][: at + 1]
    assert made.new_logprobs.logprobs[:, 0].tolist() == [*range(at + 1)]
    assert (made.finish_reason, made.stop_reason) == (FinishReason.STOP, STOP)
    assert sending.carried(made) == [(FIRED, [["stop", STOP, 10 + at]])]


def test_a_wrong_guess_that_is_not_finite_fails_nobody() -> None:
    health = Health()
    health.begin(["a", "b"], [3, 1])
    hidden = torch.zeros(4, 2)
    hidden[2] = float("nan")  # the second guess
    health.see(hidden, torch.zeros(4, 5))
    look = health.seen
    assert look is not None
    for tokens, failed in ((1, set()), (2, set()), (3, {"a"})):
        output = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[7] * tokens, [7]])
        assert look.held(output).failed.keys() == failed
