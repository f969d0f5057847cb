"""What the worker, the scheduler and the front end pass to each other. Knows no process and no vLLM."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine import doses
from saesteer.engine.brought import Brought
from saesteer.planning.plan import Rule

# Why a request fails on the worker or the scheduler; each is also the code of its SpecError.
GONE = "gone"  # a vector that the request was admitted with
DOSE = "dose"  # the dose of a token was above the limit
BROKEN = "broken"  # the worker could not make its row; after a colon, the word says what went wrong
SHARED = "shared"  # it used cached blocks of a request that failed
NON_FINITE = "non_finite"  # --fail-fast; after a colon, the word says what was not finite
COLLAPSED = "collapsed"  # --fail-fast; after a colon, the word has the period in tokens
# Kinds of the records that an output carries.
COUNTED, READ, FIRED = "counted", "read", "fired"
FAILED = "failed"  # the word of a failed request
# Sent with a request (sending.py):
WHOLE = "whole"  # its rows may wait for its end
RULES = "rules"

Counters = NDArray[np.int32]


class Guessed(NamedTuple):
    """Counts of one request's guessed tokens in a step."""

    position: int  # of the first one
    edits: int  # counters of edits, in front of those of doses
    counted: Counters  # [guesses, counters]

    def end(self, tokens: int) -> int:
        """The first position that is no input, where the step has given its request so many tokens."""
        return self.position + max(0, tokens - 1)

    def add(self, words: Counters, tokens: int) -> Counters:
        """Counters of the request, int32 [counters], with those of the guesses that hold; a new array."""
        return reduce(lambda one, two: doses.merge(one, two, self.edits), self.counted[: max(0, tokens - 1)], words)


class Table(NamedTuple):
    """What leaves with a step's output, in the form that is sent between processes."""

    names: list[str]  # the steered requests
    counted: Counters  # [requests, 1 + counters]: each request's cached tokens, then its counters
    failed: Mapping[str, str]  # failed request → word
    stops: frozenset[str]  # requests with stop strings: the front end finds these, so any output may be the last
    read: Brought | None = None  # what requests have read of this step
    guessed: Mapping[str, Guessed] = {}  # what requests' guessed tokens have counted, beside that
    watched: int = 0  # tokens of repetition after which --fail-fast ends an answer; 0: it is off


def sent(rules: Sequence[Rule]) -> list[list[Any]]:
    """Rules as they travel to the scheduler."""
    return [[one.op, one.field, one.windows, one.bounds, one.run, one.part] for one in rules]
