"""How one request of a batch fails on a worker, and how its caller learns of it. Knows no text and no HTTP.

    worker     a word for each failed request leaves with the step's counts (counts.py)
    scheduler  finishes the request before vLLM processes the step, as if its client had disconnected, and sends an
               output with the word instead of its tokens, even if the step had none. Requests that have meanwhile taken
               one of its edited blocks from the prefix cache end with it. It may have left by then, aborted or
               preempted, so what it left in the cache is known for as long as one of its steps may run
    front end  puts a SpecRefused into the request's queue instead of what waits there, and ends its other choices
               (n > 1). LLM has no queues: once all its prompts have ended, generate or chat raises what failed

For the rest of the batch, it is as if a client had disconnected during its answer.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from saesteer.config.config import KEY
from saesteer.errors import PromptsFailed, SpecError
from saesteer.language.fields import show
from saesteer.plugin.http.statuses import refusals
from saesteer.plugin.prefix_cache import blocks_from, edited_blocks
from saesteer.plugin.results import consuming, metrics, sending
from saesteer.plugin.wrap import Original, around

logger = logging.getLogger("vllm.saesteer")

GONE = "gone"  # a vector that the request was admitted with
DOSE = "dose"  # the dose of a token was above the limit
BROKEN = "broken"  # the worker could not make its row; after a colon, the word says what went wrong
SHARED = "shared"  # it used cached blocks of a request that failed
NON_FINITE = "non_finite"  # --fail-fast; after a colon, the word says what was not finite
COLLAPSED = "collapsed"  # --fail-fast; after a colon, the word has the period in tokens
WORDS = (GONE, DOSE, BROKEN, consuming.SPACE, SHARED, NON_FINITE, COLLAPSED)  # each also the code of its SpecError
_ACTIVATIONS = f"{KEY}.return.activations"
FAILED = f"{KEY}_failed"  # next to the counts in kv_transfer_params


class SpecRefused(SpecError, VLLMValidationError):
    """A SpecError that vLLM's front ends answer with a 400 whose ``param`` is the field."""

    def __init__(self, error: SpecError) -> None:
        VLLMValidationError.__init__(self, f"{error} [{error.code}]", parameter=error.field)
        self.field = error.field
        self.code = error.code
        refusals.append(str(self))
        metrics.refused(error.code)  # here, since every refusal becomes a SpecRefused

    def __str__(self) -> str:
        return str(self.args[0])


def reason(code: str, doses: Sequence[Mapping[str, Any]], limit: float | None) -> SpecError:
    """The error for the client of a failed request.

    Args:
        code: GONE, DOSE or SHARED, or BROKEN, NON_FINITE or COLLAPSED with a detail.
        doses: the request's doses, as saesteer.engine.doses reports them.
        limit: the server's limit for a dose.
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
        NON_FINITE: f"the {detail.strip()} held NaN or infinity, so the request was ended (--fail-fast); expected "
        "weaker edits, or a model and dictionaries whose weights are finite",
        COLLAPSED: f"the answer repeats itself (period in tokens: {detail.strip()}), so the request was ended "
        "(--fail-fast); expected weaker edits, or a sound model",
    }[code]
    return SpecError(message, field=KEY, code=code)


def unwritten(error: OSError) -> SpecError:
    """The error for the client of a request whose result could not be kept."""
    why = f"could not be kept ({error.strerror or error}), so the request was ended"
    message = f"{why}; expected room on the server's disk, or as: inline"
    return SpecError(message, field=_ACTIVATIONS, code=consuming.SPACE)


@around
def _leaving(original: Original, self: Any, request: Any) -> None:
    manager = self.kv_cache_manager
    edited = [manager.block_pool.blocks[one] for one in edited_blocks(manager, request)]
    if kept := [(block, block.block_hash) for block in edited if block.block_hash is not None]:
        vars(self).setdefault("saesteer_left", defaultdict(list))[request.request_id] += kept
    original(self, request)


def _left(scheduler: Any) -> dict[str, set[int]]:
    """The edited blocks of each request that has left, without those that others have got since, as free space."""
    left: dict[str, list[tuple[Any, Any]]] = vars(scheduler).get("saesteer_left", {})
    return {name: {one.block_id for one, key in kept if one.block_hash == key} for name, kept in left.items()}


def forget_left(scheduler: Any, scheduler_output: Any) -> None:
    """Forgets the blocks of requests that had left before a step was scheduled: all of their steps have been taken."""
    if left := vars(scheduler).get("saesteer_left"):
        for name in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            left.pop(name, None)


def end(scheduler: Any, failed: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Finishes requests and evicts their blocks from the prefix cache, also of those that have ended already.

    Args:
        scheduler: the engine's, before it processes the step.
        failed: id of a request → its word.

    Returns:
        vLLM's requests that have ended here, each with its word.
    """
    known = ((scheduler.requests.get(name), word) for name, word in failed.items())
    ended = {one.request_id: (one, word) for one, word in known if one is not None and not one.is_finished()}
    blocks = scheduler.kv_cache_manager
    # The request ran unsteered, or is refused for what it computed, while the keys of its blocks say steered. The next
    # step may already have been scheduled, with requests that found these blocks. What is not finite is seen in each
    # request that uses it, which ends for itself.
    misled = [request for request, word in ended.values() if not word.startswith(NON_FINITE)]
    left = _left(scheduler)
    gone = [left.get(name, set()) for name, word in failed.items() if not word.startswith(NON_FINITE)]
    wrong = set().union(*(edited_blocks(blocks, request) for request in misled), *gone)
    wrong = wrong.union(*(own for own in left.values() if own & wrong))
    for other in scheduler.requests.values() if wrong else ():
        if other.request_id not in ended and not other.is_finished():
            own = edited_blocks(blocks, other) | left.get(other.request_id, set())
            if own & wrong:
                ended[other.request_id] = other, SHARED
                wrong |= own
    # NaN may have come from nowhere, in any block, and nobody else shall read it.
    sick = (blocks_from(blocks, request, 0) for request, word in ended.values() if word.startswith(NON_FINITE))
    blocks.evict_blocks(wrong.union(*sick, *(left.get(name, ()) for name in failed)))
    scheduler.finish_requests(list(ended), RequestStatus.FINISHED_ERROR)
    return list(ended.values())


def add_outputs(outputs: dict[int, Any], ended: Iterable[tuple[Any, str]], counted: Mapping[str, Any]) -> None:
    """Adds a last output for each failed request to the outputs of the step.

    Args:
        outputs: by client, as vLLM's update_from_output returns them.
        ended: as ``end`` returns it.
        counted: the cached tokens and counters of some of these requests, by id.
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
        sending.add(outputs, request.client_index, last)


def raise_there(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> None:
    """Puts each error where the request's caller waits; vLLM drops what comes after it.

    Args:
        processor: vLLM's OutputProcessor, before it has the step's outputs.
        failed: states of requests, each with its error.
    """
    first: dict[str, tuple[Any, SpecError]] = {}  # several choices of one request may have failed
    for state, error in failed:
        first.setdefault(_asked(state), (state, error))
    for state, error in first.values():
        refused = SpecRefused(error)
        call: dict[str, SpecRefused] | None = getattr(processor, "saesteer_refused", None)
        if state.queue is not None:
            state.queue.put(refused)
        elif call is not None:
            call[consuming.request_of(state)] = refused
        else:  # callers of LLMEngine.step see only finish_reason "error"
            logger.error("request %s was refused: %s", show(state.external_req_id), refused)


def end_with(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> list[str]:
    """Ends the other choices of failed requests, unless their caller steps the engine by hand.

    Returns:
        Ids that the engine still has to abort.
    """
    called = getattr(processor, "saesteer_refused", None) is not None
    several = (state for state, _ in failed if state.parent_req is not None)
    asked = {_asked(state) for state in several if called or state.queue is not None}
    return [*processor.abort_requests(asked, internal=True)]


def _asked(state: Any) -> str:
    """The id of the whole request, of which a state may be one choice."""
    return str(state.request_id if state.parent_req is None else state.parent_req.request_id)


@around
def _raising(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    processor = self.llm_engine.output_processor
    asked = dict.fromkeys(map(consuming.request_of, processor.request_states.values()))  # in the order of the prompts
    refused: dict[str, SpecError] = {}
    processor.saesteer_refused = refused
    try:
        outputs = original(self, *args, **kwargs)
    finally:
        del processor.saesteer_refused
    answers = {output.request_id: output for output in outputs if output.request_id not in refused}
    late = set[str]()
    for name, output in answers.items():
        try:
            consuming.settle(output, late)
        except SpecError as error:
            refused[name] = SpecRefused(error)
    if refused:
        errors = {index: refused[name] for index, name in enumerate(asked) if name in refused}
        raise PromptsFailed(errors, [None if name in refused else answers[name] for name in asked])
    return outputs
