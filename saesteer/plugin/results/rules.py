"""Rules of running requests: each step's values are looked at where vLLM schedules. Knows no tensor and no HTTP.

worker     what rules watch travels with the other read-outs of each step (reads.py)
scheduler  looks at it behind the step (planning/rules.py), ends the requests whose stops have fired, and lets the next
           output of a request carry what has fired
front end  the last output's text is whole, and the answer has ``flags``

Tokens that a later step has computed meanwhile are dropped by vLLM, as if a client had disconnected.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from saesteer.engine.brought import Brought
from saesteer.planning.plan import END, Rule
from saesteer.planning.rules import Fired, Values, Watch
from saesteer.plugin.reasoning import PARSER, border_of
from saesteer.plugin.results import sending
from saesteer.plugin.results.forms import FIRED, RULES


def watched(scheduler: Any, brought: Brought) -> list[tuple[Any, Values]]:
    """vLLM's running requests with rules, each with what a step has brought for them.

    Args:
        scheduler: the engine's, before it processes the step, since it forgets requests that end with it.
        brought: what was read of the step.
    """
    found = ((scheduler.requests.get(name), values) for name, values in brought.watched().items())
    return [(request, values) for request, values in found if request is not None and not request.is_finished()]


def look(scheduler: Any, outputs: dict[int, Any], watching: Sequence[tuple[Any, Values]]) -> None:
    """Lets rules fire, and ends the requests that they stop.

    Args:
        scheduler: the engine's, once it has processed the step; it keeps what waits for a request's next output.
        outputs: of the step, by client; a request that ends without a token gets one.
        watching: as ``watched`` found it.
    """
    waiting: dict[str, list[list[Any]]] = scheduler.__dict__.setdefault("saesteer_fired", {})
    if not watching and not waiting:
        return
    made = {one.request_id: one for one in sending.of(outputs)}
    for request, values in watching:
        state = request.__dict__.get("saesteer_watch")
        if state is None:
            state = request.saesteer_watch = _Watching(request, scheduler.vllm_config)
        border = END if state.border is None else state.border.find(request.output_token_ids)
        # vLLM may have dropped the token that this step sampled, behind a preemption, and samples another one later.
        fired = state.watch.look(values, request.num_tokens - 1, border)
        if fired:
            waiting.setdefault(request.request_id, []).extend(map(list, fired))
        if fired and fired[-1].op == "stop":
            output = made.get(request.request_id)
            made[request.request_id] = _stop(scheduler, outputs, request, output, fired[-1])
    for name in [*waiting]:
        if name in made:
            sending.carry(made[name], FIRED, waiting.pop(name))
        elif name not in scheduler.requests:  # it has ended, or was aborted
            del waiting[name]


class _Watching:
    """What the scheduler keeps on a request with rules."""

    def __init__(self, request: Any, vllm_config: Any) -> None:
        sent = sending.sent(request.sampling_params)
        self.watch = Watch([Rule(*words) for words in sent[RULES]])
        self.border = None
        if self.watch.in_parts:
            self.border = border_of(vllm_config, sent[PARSER], request.prompt_token_ids)


def _stop(scheduler: Any, outputs: dict[int, Any], request: Any, output: Any, fired: Fired) -> Any:
    """End a request, and make the step's output its last one."""
    in_prompt = fired.position < request.num_prompt_tokens
    # Several tokens at once, if guesses held; those behind the one that was sampled there are none of the answer's.
    held = 0 if output is None else len(output.new_token_ids)
    wanted = fired.position + 2 - (request.num_tokens - held)
    if output is None:
        output = EngineCoreOutput(request.request_id, [], events=request.take_events())
        output.trace_headers, output.prefill_stats = request.trace_headers, request.take_prefill_stats()
        sending.add(outputs, request.client_index, output)
    elif in_prompt or wanted < held:
        _cut(output, 0 if in_prompt else wanted)
    if in_prompt or wanted < held or output.finish_reason != FinishReason.STOP:  # else the model itself has ended there
        output.finish_reason, output.stop_reason = FinishReason.STOP, fired.field
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_STOPPED)
    return output


def _cut(output: Any, tokens: int) -> None:
    """Keep the first tokens of an output, with what vLLM says of each."""
    if (routed := output.routed_experts) is not None:  # a row for each token but the last, those of a prompt included
        output.routed_experts = routed[: len(routed) - len(output.new_token_ids[tokens:])]
    output.new_token_ids = output.new_token_ids[:tokens]
    for name in ("new_logprobs", "new_sampling_mask"):  # the second from 0.29 on
        if (each := getattr(output, name, None)) is not None:
            setattr(output, name, each.slice_request(0, tokens) if tokens else None)
