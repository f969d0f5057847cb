"""How rules end and mark requests where vLLM schedules, with a scheduler of one method: which output says what."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.v1 import outputs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from saesteer.config.config import KEY
from saesteer.planning.answers import Rows
from saesteer.planning.plan import END, Direction, Rule
from saesteer.plugin.reasoning import PARSER
from saesteer.plugin.results import forms, report, rules, sending
from saesteer.plugin.results.forms import FIRED, RULES
from tests.plugin.blobs import blob, inside, readout

PROMPT = 4
STOP, FLAG = "saesteer.edits[0]", "saesteer.edits[1]"


class Scheduler:
    """Knows one request, which has so many tokens."""

    vllm_config = None

    def __init__(self, tokens: int, **runs: int) -> None:
        made = [Rule(op, [STOP, FLAG][op == "flag"], ((0, END),), ((0, 0.5, END),), run) for op, run in runs.items()]  # type: ignore[arg-type]
        params = SimpleNamespace(extra_args={KEY: {RULES: forms.sent(made), PARSER: None}})
        self.request: Any = SimpleNamespace(
            request_id="one", num_tokens=tokens, num_prompt_tokens=PROMPT, client_index=3, sampling_params=params
        )
        self.request.take_events, self.request.trace_headers, self.request.output_token_ids = list, None, []
        self.request.take_prefill_stats = lambda: PrefillStats(num_prompt_tokens=PROMPT, num_cached_tokens=2)
        self.requests = {"one": self.request}
        self.finished: list[str] = []

    def finish_requests(self, names: list[str], status: Any) -> None:
        assert status.name == "FINISHED_STOPPED"
        self.finished += names

    def step(self, first: int, *values: float, **output: Any) -> Any:
        """A step has computed positions from ``first`` on; returns the request's output of it."""
        made = [EngineCoreOutput("one", **output)] if output else []
        found = {3: EngineCoreOutputs(outputs=made)} if made else {}
        positions = [*range(first, first + len(values))]
        rules.look(self, found, [(self.request, {0: (positions, [*values])})] if values else [])
        return found[3].outputs[0] if found else None


def fired(output: Any) -> Any:
    return dict(sending.carried(output)).get(FIRED)


@pytest.mark.parametrize("position", [1, PROMPT - 1])
@pytest.mark.parametrize("sampled", [False, True], ids=["in mid-prompt", "at its end"])
def test_no_token_stands_behind_a_stop_in_the_prompt(position: int, sampled: bool) -> None:
    one = Scheduler(PROMPT + sampled, stop=1)
    values = [float(at == position) for at in range(PROMPT)]
    if not sampled and position == PROMPT - 1:
        assert one.step(0, *values) is None and not one.finished, "its token was dropped, and will be sampled again"
        one.request.num_tokens, sampled = PROMPT + 1, True
    output = one.step(0, *values, **({"new_token_ids": [7], "finish_reason": FinishReason.LENGTH} if sampled else {}))
    assert (output.new_token_ids, output.new_logprobs) == ([], None)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, STOP)
    assert fired(output) == [["stop", STOP, position]] and one.finished == ["one"]


def test_no_mask_stands_behind_a_stop() -> None:
    """With --return-sampling-mask, which newer versions of vLLM have, each token of an answer has a mask."""
    if not hasattr(outputs, "SamplingMaskLists"):
        pytest.skip("this vLLM has no sampling masks")
    masks = outputs.SamplingMaskLists(np.arange(6), np.array([0, 1, 3, 6]))
    one = Scheduler(PROMPT + 3, stop=1)
    output = one.step(PROMPT - 1, 0.0, 1.0, 0.0, new_token_ids=[7, 8, 9], new_sampling_mask=masks)
    assert output.new_token_ids == [7, 8] and output.new_sampling_mask.to_nested_list() == [[0], [1, 2]]
    one = Scheduler(PROMPT + 1, stop=1)
    output = one.step(0, 1.0, 0.0, 0.0, 0.0, new_token_ids=[7], new_sampling_mask=masks._replace(offsets=None))
    assert output.new_token_ids == [] and output.new_sampling_mask is None


@pytest.mark.parametrize(("position", "tokens"), [(PROMPT - 1, 0), (PROMPT, 2), (PROMPT + 1, 3)])
def test_no_row_of_experts_stands_behind_a_stop(position: int, tokens: int) -> None:
    """With enable_return_routed_experts, an answer has a row for each token but its last; the first have the prompt."""
    rows = np.arange(PROMPT + 2)[:, None, None]
    one = Scheduler(PROMPT + 3, stop=1)
    values = [float(at == position) for at in range(PROMPT + 2)]
    output = one.step(0, *values, new_token_ids=[7, 8, 9], routed_experts=rows)
    assert len(output.new_token_ids) == tokens
    assert np.array_equal(output.routed_experts, rows[: PROMPT + tokens - 1])


@pytest.mark.parametrize("known", [1, 6], ids=["a chunk", "all"])
def test_a_prompt_that_a_stop_has_ended_can_be_echoed_with_its_logprobs(known: int) -> None:
    """vLLM has those of whole prompts alone, and looks for that of the last token."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    made: list[Any] = [None, *({7: Logprob(-1.0, 1, "x")} for _ in range(5))]
    state: Any = SimpleNamespace(prompt_len=6, logprobs_processor=SimpleNamespace(prompt_logprobs=made[:known]))
    state.saesteer = report.Report(list, watches=True, fired=[["stop", STOP, 2]]).of_choice()
    state.detokenizer = SimpleNamespace(num_output_tokens=lambda: 0)
    report._telling(lambda *_: SimpleNamespace())(state, [], FinishReason.STOP)
    serving: Any = SimpleNamespace(return_tokens_as_token_ids=False, _get_decoded_token=lambda *_, **__: "x")
    tokenizer = SimpleNamespace(decode=str)
    found = OpenAIServingCompletion._create_completion_logprobs(
        serving, [7] * 6, state.logprobs_processor.prompt_logprobs, 0, tokenizer
    )
    assert found.token_logprobs == [None, *[-1.0] * (known - 1), *[None] * (6 - known)]


@pytest.mark.parametrize("computed", [9, 5])
def test_an_answer_that_a_rule_ends_in_its_prompt_has_what_was_read_of_it(computed: int) -> None:
    """All of a prompt of 9 tokens, or a chunk of it: each token was an input, and nothing was sampled."""
    fields: dict[str, Any] = {}
    found = [
        readout("probe", [(0, END)], probe=Direction("p", 3)),
        readout("activation", [(8, 9)], reduce="mean"),
        readout("hidden", (), last=True),
    ]
    rows = Rows(found, fields)
    spans = [[(0, computed)], inside([(8, 9)], 0, computed)]
    rows.add([blob(number, found[number].readout, asked) for number, asked in enumerate(spans) if asked])
    rows.add([blob(2, found[2].readout, [(computed - 1, computed)])])
    rows.tell(9, 0, final=True)
    [scores], [mean], [hidden] = fields["probes"], fields["activations"], fields["hidden"]
    assert scores["positions"] == [*range(computed)]
    assert mean["tokens"] == int(computed == 9)
    assert (hidden["positions"], hidden["shape"]) == ([], [0, 0])


def test_a_dropped_token_is_sampled_again() -> None:
    """The run goes on where the token is known, whatever was computed behind it before."""
    one = Scheduler(PROMPT + 2, stop=3)
    assert one.step(PROMPT - 1, 1.0, 1.0, new_token_ids=[7]).finish_reason is None
    assert one.step(PROMPT + 1, 1.0) is None and not one.finished, "preempted: the token of this step was dropped"
    one.request.num_tokens += 1
    output = one.step(PROMPT - 1, 1.0, 1.0, 1.0, new_token_ids=[8])
    assert fired(output) == [["stop", STOP, PROMPT + 1]]
