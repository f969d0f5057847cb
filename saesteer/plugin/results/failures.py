"""How one request of a batch fails on a worker, and how its caller hears of it. Knows no text and no HTTP.

    worker     a word for each such request leaves with the step's counts (counts.py)
    scheduler  the request is finished before vLLM looks at the step, as one whose client has gone; an output with the
               word goes out in the place of its tokens, also where the step had none for it. With it ends each request
               that has taken one of its edited blocks from the prefix cache meanwhile
    front end  a SpecRefused takes the place of whatever waits in the request's queue, and its other choices (n > 1)
               end with it; LLM has no queues: all that it has begun ends, and its generate or chat raises

Other batchmates see what they see of a client that goes away in the middle of an answer.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.plugin import contract
from saesteer.plugin.prefix_cache import edited_blocks
from saesteer.plugin.results import metrics

logger = logging.getLogger("vllm.saesteer")

GONE = "gone"  # a vector that the request was admitted with
DOSE = "dose"  # a token's was above the limit
BROKEN = "broken"  # the worker could not make its row; what went wrong stands behind the word and a colon
SHARED = "shared"  # it has taken blocks of a request that failed
FAILED = f"{KEY}_failed"  # beside the counts in kv_transfer_params


class SpecRefused(SpecError, VLLMValidationError):
    """A SpecError that vLLM's front ends answer with 400, its field as ``param``."""

    def __init__(self, error: SpecError) -> None:
        VLLMValidationError.__init__(self, f"{error} [{error.code}]", parameter=error.field)
        self.field = error.field
        self.code = error.code
        metrics.refused(error.code)  # here, as every refusal becomes one of these

    def __str__(self) -> str:
        return str(self.args[0])


def reason(code: str, doses: Sequence[Mapping[str, Any]], limit: float | None) -> SpecError:
    """What the client of a failed request is told.

    Args:
        code: GONE, DOSE or SHARED, or BROKEN with what went wrong.
        doses: of the request, as saesteer.engine.doses reports them.
        limit: of a dose on this server.
    """
    if code == DOSE:
        worst = max(doses, key=lambda one: one["max"] or 0.0)
        found = f"the edits change a token at {worst['site']} by {worst['max']} of its length"
        message = f"{found}, expected {limit:g} at most, the limit of this server (--max-dose)"
        return SpecError(message, field=f"{KEY}.edits", code=code)
    code, _, detail = code.partition(":")
    message = {
        GONE: "names in this request were replaced or deleted, and what they stood for is gone; send it again",
        SHARED: "another request with the same edits failed while this one was reading its cache; send it again",
        BROKEN: f"the server could not apply the edits ({detail.strip()}), so the request was ended",
    }[code]
    return SpecError(message, field=KEY, code=code)


def end(scheduler: Any, failed: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Finish requests and give up what they have in the prefix cache; what has ended already stays as it is.

    Args:
        scheduler: of the engine, which has not looked at the step yet.
        failed: the word for each request by id.

    Returns:
        vLLM's requests that have ended here, each with its word.
    """
    known = ((scheduler.requests.get(name), word) for name, word in failed.items())
    ended = {one.request_id: (one, word) for one, word in known if one is not None and not one.is_finished()}
    blocks = scheduler.kv_cache_manager
    # It ran unsteered, or is refused for what it computed, under keys that say steered. The step behind this one may
    # have been scheduled already, with requests that found these blocks.
    wrong = set().union(*(edited_blocks(blocks, request) for request, _ in ended.values()))
    for other in scheduler.requests.values() if wrong else ():
        if other.request_id not in ended and not other.is_finished():
            own = edited_blocks(blocks, other)
            if own & wrong:
                ended[other.request_id] = other, SHARED
                wrong |= own
    blocks.evict_blocks(wrong)
    scheduler.finish_requests(list(ended), RequestStatus.FINISHED_ERROR)
    return list(ended.values())


def tell(outputs: dict[int, Any], ended: Iterable[tuple[Any, str]], counted: Mapping[str, bytes]) -> None:
    """Add the last output of each request that has failed to those of the step.

    Args:
        outputs: by client, as vLLM's update_from_output returns them.
        ended: as ``end`` returns it.
        counted: cached tokens and counters of some of them, by id.
    """
    for request, word in ended:
        name = request.request_id
        last = EngineCoreOutput(
            request_id=name,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            kv_transfer_params={FAILED: word} | ({KEY: counted[name]} if name in counted else {}),
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)


def raise_there(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> None:
    """Put each error where the request's caller waits; vLLM then drops what would have come behind it.

    Args:
        processor: vLLM's OutputProcessor, which has not seen the step's outputs yet.
        failed: states of requests, each with its error.
    """
    seen = set()
    for state, error in failed:
        asked = _asked(state)
        if asked in seen:
            continue
        seen.add(asked)
        refused = SpecRefused(error)
        call: list[SpecRefused] | None = getattr(processor, "saesteer_refused", None)
        if state.queue is not None:
            state.queue.put(refused)
        elif call is not None:
            call.append(refused)
        else:  # whoever calls LLMEngine.step sees finish_reason "error" alone
            logger.error("request %s was refused: %s", state.external_req_id, refused)


def end_with(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> list[str]:
    """End what belongs to requests that have failed, here: the other choices of each, or all of a call of LLM's.

    Returns:
        Ids that the engine has still to abort.
    """
    if getattr(processor, "saesteer_refused", None):
        asked = {_asked(state) for state in processor.request_states.values()}
    else:
        asked = {_asked(state) for state, _ in failed if state.queue is not None and state.parent_req is not None}
    found: list[str] = processor.abort_requests(asked, internal=True)
    return found


def _asked(state: Any) -> str:
    """Id of what was asked for, of which a state may be one choice of several."""
    found: str = state.request_id if state.parent_req is None else state.parent_req.request_id
    return found


@cache
def install_offline() -> None:
    """Let vLLM's LLM raise what its requests were refused with; safe to call again.

    Raises:
        UnsupportedError: the hook is missing or changed.
    """
    contract.check_contract(offline=True)
    contract.wrap("LLM._run_engine", _raising)


def _raising(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        processor = self.llm_engine.output_processor
        refused: list[SpecRefused] = []
        processor.saesteer_refused = refused
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            del processor.saesteer_refused
        if refused:
            raise refused[0]
        return outputs

    return _run_engine
