"""--fail-fast on the scheduler: ends a request whose answer has collapsed, behind the step.

An answer has collapsed once each of its last N tokens (--fail-fast-after) is the token that stands p before it, for
one period p of up to 16 tokens; N counts as p where it is less, so that a period stands there twice at least. What is
not finite is seen on the worker (worker/health.py), and fails before its token counts (failures.py).
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from saesteer.plugin.results import sending
from saesteer.plugin.results.forms import COLLAPSED, FAILED

PERIODS = 16  # tokens of the longest period


def lengths(scheduler: Any, scheduler_output: Any) -> list[tuple[Any, int]]:
    """Return vLLM's requests of a step and the lengths of their answers, before the scheduler takes the step."""
    known = map(scheduler.requests.get, scheduler_output.num_scheduled_tokens)
    return [(one, one.num_output_tokens) for one in known if one is not None]


def end(scheduler: Any, outputs: dict[int, Any], before: Sequence[tuple[Any, int]], after: int) -> None:
    """End the requests whose answers have collapsed in this step: their output of it carries the word.

    Args:
        scheduler: the engine's, once it has taken the step.
        outputs: of the step, by client.
        before: as ``lengths`` returned it.
        after: as of ``collapse``.
    """
    periods = {one.request_id: of for one, start in before if (of := collapse(one.output_token_ids, start, after))}
    if not periods:
        return
    running = [one.request_id for one, _ in before if one.request_id in periods and not one.is_finished()]
    scheduler.finish_requests(running, RequestStatus.FINISHED_ERROR)
    for output in [one for one in sending.of(outputs) if one.request_id in periods]:
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason, output.stop_reason = FinishReason.ERROR, None
        sending.carry(output, FAILED, f"{COLLAPSED}: {periods[output.request_id]}")


def collapse(ids: Any, start: int, after: int) -> int:
    """Return the shortest period with which an answer has collapsed at one of its last tokens; 0: it has not.

    For most tokens this is one look at the 16 before it, since a token that is not among them repeats nothing.

    Args:
        ids: the answer's tokens, a list or vLLM's ConstantList.
        start: the index of the first token to look at.
        after: tokens of repetition, --fail-fast-after.
    """
    for stop in range(max(start, after) + 1, len(ids) + 1):
        near = ids[max(0, stop - 1 - PERIODS) : stop]
        if (token := near.pop()) in near:
            for period, one in enumerate(reversed(near), 1):
                begin = stop - max(after, period)
                if one == token and begin >= period and ids[begin:stop] == ids[begin - period : stop - period]:
                    return period
    return 0
