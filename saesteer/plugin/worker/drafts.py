"""Guessed tokens of a step on the worker, each with counters of its own.

In the work list each guess is a request of one token, with a row of its own that holds its request's entries
(Engine.drafts_of), so counters and doses of each guess stay apart. Behind the step those of the guesses that hold are
kept with the request's own, and all of them start again from zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine import doses
from saesteer.engine.engine import Engine
from saesteer.plugin.results.forms import Guessed


class Guesses(NamedTuple):
    """The guessed tokens of one request in a step."""

    position: int  # of the first one
    rows: Sequence[int]  # of the table, one for each


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
