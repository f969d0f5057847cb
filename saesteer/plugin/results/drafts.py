"""Tokens that a step has only guessed: what they count and read until it is known which of them hold. Knows no kernel.

With speculative decoding a step computes a request's next token and some guesses behind it. Behind the step the model's
own tokens tell how many guesses hold; the others are computed again by the next step, with the right tokens.

worker     in the work list each guess is a request of one token, with a row of its own that holds its request's entries
           (Engine.drafts_of), so counters and doses of each guess stay apart. Behind the step those of the guesses that
           hold are kept with the request's own, and all of them start again from zero
scheduler  knows how many tokens a request has really got, since a stop or a rule may end it in the middle of a step:
           only guesses in front of its last token are counted, read and looked at by rules
front end  drops tokens behind a stop string, with what they have counted and read
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine import doses
from saesteer.engine.engine import Engine


class Guesses(NamedTuple):
    """The guessed tokens of one request in a step."""

    position: int  # of the first one
    rows: Sequence[int]  # of the table, one for each


class Guessed(NamedTuple):
    """What they have counted."""

    position: int  # of the first one
    edits: int  # counters of edits, in front of those of doses
    counted: NDArray[np.int32]  # [guesses, counters]

    def end(self, tokens: int) -> int:
        """The first position that is no input, where the step has given its request so many tokens."""
        return self.position + max(0, tokens - 1)

    def add(self, words: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
        """Counters of the request, int32 [counters], with those of the guesses that hold; a new array."""
        return reduce(lambda one, two: doses.merge(one, two, self.edits), self.counted[: max(0, tokens - 1)], words)


def spread(
    engine: Engine,
    batch: Sequence[str],
    numbers: Sequence[int],
    starts: NDArray[Any],
    positions: NDArray[Any],
    guessed: Mapping[str, Sequence[int]],
) -> tuple[list[int], Tensor, dict[str, Guesses]]:
    """A batch in which each guessed token of a steered request is a request.

    Args:
        engine: whose rows they are.
        batch: the requests.
        numbers: the row of each; 0: it is not steered.
        starts: the first token of each in the step, then the number of tokens.
        positions: of these tokens in their requests.
        guessed: the last tokens of some requests, which are guesses.

    Returns:
        The rows; where their tokens begin, and the number of tokens, int32 on the engine's device; and the guesses.
    """
    rows: list[int] = []
    begins: list[int] = []
    found: dict[str, Guesses] = {}
    for at, (name, number) in enumerate(zip(batch, numbers, strict=True)):
        start, end = int(starts[at]), int(starts[at + 1])
        own = engine.drafts_of(number)[: len(guessed.get(name, ()))] if number else range(0)
        first = end - len(own)
        rows += [number, *own]
        begins += [start, *range(first, end)]
        if own:
            found[name] = Guesses(int(positions[at]) + first - start, own)
    return rows, torch.tensor([*begins, int(starts[len(batch)])], dtype=torch.int32).to(engine.device), found


def pieces(guesses: Guesses, tokens: int) -> list[tuple[int, int]]:
    """A request's tokens of a step, as (first, number): each guess is read alone, since it may not hold."""
    sure = tokens - len(guesses.rows)
    return [(0, sure), *((at, 1) for at in range(sure, tokens))]


def settle(kept: dict[str, list[Tensor]], guessed: Mapping[str, Guessed], output: Any) -> None:
    """Keeps what the guesses that hold have counted, behind a step on a worker.

    Args:
        kept: by request, counters int32 that it has from other rows; changed in place.
        guessed: of the step.
        output: vLLM's ModelRunnerOutput, whose tokens are on the host.
    """
    for name, one in guessed.items():
        tokens = len(output.sampled_token_ids[output.req_id_to_index[name]])
        if tokens > 1:
            words = one.add(np.zeros_like(one.counted[0]), tokens)
            for more in kept.get(name, ()):
                words = doses.merge(more.cpu().numpy(), words, one.edits)
            kept[name] = [torch.from_numpy(words)]


def by_token(counted: NDArray[np.int32], guessed: Guessed | None, tokens: int, *, each: bool) -> bytes | list[bytes]:
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
    found = dict.fromkeys(guessed, 0)
    found |= {one.request_id: len(one.new_token_ids) for one in outputs if one.request_id in found}
    return found
