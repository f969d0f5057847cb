"""How one request of a batch that has failed on a worker ends, in the scheduler. Knows no text and no HTTP.

worker     a word for each failed request leaves with the step's counts
scheduler  finishes the request before vLLM processes the step, as if its client had disconnected, and sends an
           output with the word instead of its tokens, even if the step had none. Requests that have meanwhile taken
           one of its edited blocks from the prefix cache end with it. It may have left by then, aborted or
           preempted, so what it left in the cache is known for as long as one of its steps may run
front end  raises the error where the request's caller waits (errors.py)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from saesteer.plugin.prefix_cache import blocks_from, edited_blocks
from saesteer.plugin.results import sending
from saesteer.plugin.results.forms import COUNTED, FAILED, NON_FINITE, SHARED
from saesteer.plugin.wrap import Original, around


@around
def _leaving(original: Original, self: Any, request: Any) -> None:
    manager = self.kv_cache_manager
    edited = [manager.block_pool.blocks[one] for one in edited_blocks(manager, request)]
    if kept := [(block, block.block_hash) for block in edited if block.block_hash is not None]:
        vars(self).setdefault("saesteer_left", defaultdict(list))[request.request_id] += kept
    original(self, request)


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
    # Of each request that has left, its edited blocks, without those that others have got since, as free space.
    kept: dict[str, list[tuple[Any, Any]]] = vars(scheduler).get("saesteer_left", {})
    left = {name: {one.block_id for one, key in own if one.block_hash == key} for name, own in kept.items()}
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
        )
        sending.carry(last, FAILED, word)
        if name in counted:
            sending.carry(last, COUNTED, counted[name])
        sending.add(outputs, request.client_index, last)
