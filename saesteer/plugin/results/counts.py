"""Counts and doses on their way through the scheduler, into a request's last output. Knows no text and no HTTP.

They travel with vLLM's own outputs, since a question to a worker would wait for its engine between two steps:
    device     a step's last op writes the counters of all rows into host memory (ops.publish_)
    worker     sample_tokens: a snapshot of the steered requests' counters leaves with the step's output
    scheduler  update_from_output: a request's last output carries its counters, in kv_transfer_params
    front end  OutputProcessor: moves them into ``saesteer`` of the request's CompletionOutput (report.py)

Each request that has failed on the worker sends a word along (failures.py). Outputs of other requests do not change.
Of guessed tokens only those in front of a request's last token are counted, read and looked at by rules, since a stop
or a rule may end it in the middle of a step; the front end drops tokens behind a stop string, with what they counted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from saesteer.config.config import KEY
from saesteer.plugin.results import collapse, failures, reads, rules, sending
from saesteer.plugin.results.forms import COUNTED, Counters, Guessed, Table
from saesteer.plugin.wrap import Original, around

_NOTHING = Table([], np.empty((0, 1), np.int32), {}, frozenset())


@around
def _sending(
    original: Original, self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any
) -> Any:
    # Also where the step has none of ours: a request may have been aborted for which something was kept.
    found: Table = getattr(model_runner_output, KEY, None) or _NOTHING
    failures.forget_left(self, scheduler_output)
    failed, stops = found.failed, found.stops
    ended = failures.end(self, failed) if failed else []
    watching = rules.watched(self, found.read) if found.read is not None else []
    before = collapse.lengths(self, scheduler_output) if found.watched else []
    outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
    rules.look(self, outputs, watching)
    collapse.end(self, outputs, before, found.watched)
    guessed = found.guessed
    tokens = tokens_of(sending.of(outputs), guessed) if guessed else {}
    ends = {name: guessed[name].end(count) for name, count in tokens.items()}
    owed = reads.send(self, outputs, found.read, stops, ends)
    if self.finished_req_ids or stops:  # most steps have none
        last = [one for one in sending.of(outputs) if one.finish_reason is not None or one.request_id in stops]
        ending = {one.request_id for one in last} | {request.request_id for request, _ in ended}
        counted = found.counted
        brought = {
            name: by_token(counted[number], guessed.get(name), tokens.get(name, 0), each=name in stops)
            for number, name in enumerate(found.names)
            if name in ending
        }
        for one in last:
            if one.request_id in brought:
                sending.carry(one, COUNTED, brought[one.request_id])
        failures.add_outputs(outputs, ended, brought)
    reads.hold(self, outputs, owed)
    return outputs


def by_token(counted: Counters, guessed: Guessed | None, tokens: int, *, each: bool) -> bytes | list[bytes]:
    """What an output carries: a request's counters, with those of the guesses that hold.

    Args:
        counted: int32, its cached tokens, then its counters; without guesses.
        guessed: of the step.
        tokens: that the step has given it.
        each: the front end may drop the last ones, so it gets the counters as they were at each of several tokens.
    """
    if guessed is None:
        return counted.tobytes()
    found = []
    for count in range(1 if each else max(1, tokens), max(1, tokens) + 1):
        words = counted.copy()
        own = words[1 : 1 + guessed.counted.shape[1]]
        own[:] = guessed.add(own, count)
        found.append(words.tobytes())
    return found if len(found) > 1 else found[0]


def tokens_of(outputs: Iterable[Any], guessed: Mapping[str, Guessed]) -> dict[str, int]:
    """How many tokens each request that had guesses has got from the step; 0 where it has no output."""
    got = {one.request_id: len(one.new_token_ids) for one in outputs if one.request_id in guessed}
    return dict.fromkeys(guessed, 0) | got
