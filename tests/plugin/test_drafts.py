"""Guessed tokens on their way, without an engine: rows of their own, and only those that hold are counted and read."""

from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from saesteer.engine.brought import Brought, Made, Part
from saesteer.engine.readouts import Reading
from saesteer.kernels import layout
from saesteer.planning.answers import Reported, Rows
from saesteer.planning.plan import END, Readout, Rule
from saesteer.plugin.reasoning import PARSER
from saesteer.plugin.results import drafts, rules
from saesteer.plugin.results.counts import Report
from saesteer.plugin.results.drafts import Guessed, Guesses
from saesteer.plugin.results.health import Health
from saesteer.plugin.results.rules import FIRED, RULES

ENGINE: Any = SimpleNamespace(
    device=torch.device("cpu"), drafts_of=lambda row: range(10 * row, 10 * row + 3), max_rows=4
)


def test_each_guess_of_a_steered_request_is_a_request() -> None:
    rows, starts, found = drafts.spread(
        ENGINE,
        ["a", "plain", "b", "c"],
        [2, 0, 1, 3],
        np.array([0, 4, 7, 12, 13, 99]),
        np.array([20, 30, 0, 5]),
        {"a": [7, 7, 7], "plain": [8, 8], "b": [9, 9]},
    )
    assert rows == [2, 20, 21, 22, 0, 1, 10, 11, 3]
    assert starts.tolist() == [0, 1, 2, 3, 4, 7, 10, 11, 12, 13], "b computes three sure tokens in front of two guesses"
    assert starts.dtype == torch.int32
    assert found == {"a": Guesses(21, range(20, 23)), "b": Guesses(3, range(10, 12))}
    assert drafts.pieces(found["b"], 5) == [(0, 3), (3, 1), (4, 1)]


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
    assert drafts.by_token(words, None, 1, each=True) == words.tobytes()
    whole = drafts.by_token(words, GUESSED, 3, each=False)
    several = drafts.by_token(words, GUESSED, 3, each=True)
    assert isinstance(several, list)
    assert [np.frombuffer(one, np.int32)[1] for one in several] == [4, 5, 6] and several[-1] == whole
    assert drafts.by_token(words, GUESSED, 0, each=True) == words.tobytes(), "it has failed"
    report = Report([])
    report.keep(several, 10)
    for tokens, held in ((13, 2), (12, 1), (11, 0), (10, 0)):
        report.cut(tokens)
        assert np.frombuffer(report.counted, np.int32)[1] == 4 + held
    report.keep(words.tobytes(), 13)
    report.cut(13)
    assert report.counted == words.tobytes()


def test_the_row_of_the_last_token_is_in_front_of_what_is_dropped() -> None:
    about = Readout("hidden", "saesteer.return.hidden", None, None, False, ((0, END),), last=True)
    found: dict[str, Any] = {}
    rows = Rows([Reported(about, {}, "float32")], found)
    row = np.ones(2, np.float32)
    for positions in ([3], [4, 5, 6], [7, 8, 9]):
        rows.add([[0, [(at, at + 1)], (at * row).tobytes()] for at in positions])
    rows.tell(4, 5, final=True)  # of three tokens vLLM has kept one: that which was sampled at position 7
    [entry] = found["hidden"]
    assert entry["positions"] == [7] and np.frombuffer(b64decode(entry["data"]), np.float32).tolist() == [7.0, 7.0]


def test_a_worker_keeps_what_holds_beside_what_it_had() -> None:
    output = SimpleNamespace(sampled_token_ids=[[1], [2, 3, 4]], req_id_to_index={"none": 0, "two": 1})
    kept = {"two": [torch.tensor(counters(5, 1.0), dtype=torch.int32)]}
    for _ in range(2):
        drafts.settle(kept, {"none": GUESSED, "two": GUESSED}, output)
    assert kept.keys() == {"two"} and len(kept["two"]) == 1
    assert kept["two"][0][0] == 5 + 2 + 2


def test_the_scheduler_knows_how_many_tokens_a_request_has_got() -> None:
    outputs = [EngineCoreOutput("a", [1, 2]), EngineCoreOutput("other", [1])]
    assert drafts.tokens_of(outputs, {"a": GUESSED, "aborted": GUESSED}) == {"a": 2, "aborted": 0}


def read(at: int, value: float, *, last: bool = False, watched: tuple[int, ...] | None = None) -> Any:
    reading = Reading("hidden", (), False, ((0, END),), last, "none", None, 0, (), (), watched)
    return Made([Part("a", 0, reading)], [[(at, at + 1)]], [1], (torch.tensor([[value]]),))


def test_what_wrong_guesses_have_read_is_dropped() -> None:
    brought = Brought([read(at, float(at), last=True) for at in (50, 51, 52)])
    assert [blob[1] for blob in brought.blobs({"a"}, {"a": 52})["a"]] == [[(50, 51)], [(51, 52)]]
    assert len(brought.blobs({"a"})["a"]) == 3 and not brought.blobs(()), "rows of an end that is none"


def test_rules_see_each_guess_at_its_position() -> None:
    brought = Brought([read(at, float(at), watched=(0,)) for at in (50, 51, 52)])
    assert brought.watched() == {"a": {0: ([50, 51, 52], [50.0, 51.0, 52.0])}}


PROMPT, STOP = 4, "saesteer.edits[0]"


def stopped(first: int, values: list[float], tokens: list[int], **output: Any) -> Any:
    """The output of a step that computed positions from ``first`` on and gave these tokens, under a stop above 0.5."""
    sent = rules.sent([Rule("stop", STOP, ((0, END),), ((0, 0.5, END),), 1)])
    params = SimpleNamespace(extra_args={RULES: sent, PARSER: None})
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
    assert made.kv_transfer_params == {FIRED: [["stop", STOP, 10 + at]]}


def test_a_rule_does_not_fire_at_a_wrong_guess() -> None:
    made = stopped(10, [0.0, 0.0, 1.0, 1.0], [7, 8])
    assert (made.new_token_ids, made.finish_reason, made.kv_transfer_params) == ([7, 8], None, None)


def test_a_model_that_ends_where_the_rule_fires_has_ended() -> None:
    made = stopped(10, [0.0, 1.0, 1.0, 1.0], [7, 8], finish_reason=FinishReason.STOP, stop_reason=8)
    assert (made.new_token_ids, made.stop_reason) == ([7, 8], 8)


def test_a_wrong_guess_that_is_not_finite_fails_nobody() -> None:
    health = Health()
    health.begin(["a", "b"], [3, 1])
    hidden = torch.zeros(4, 2)
    hidden[2] = float("nan")  # the second guess
    health.see(hidden, torch.zeros(4, 5))
    look = health.take()
    assert look is not None
    for tokens, failed in ((1, set()), (2, set()), (3, {"a"})):
        output = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[7] * tokens, [7]])
        assert look.held(output).failed.keys() == failed
