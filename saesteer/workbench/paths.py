"""The first token by three paths, side by side, and the rule that says where a fault lies. Starts no engine.

A  Transformers, in float32: the reference
B  vLLM with saesteer, as it is served: compiled and in CUDA graphs on a GPU
C  stock vLLM, eager: neither saesteer nor compilation
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from saesteer.workbench.written import rounded

TOP = 5  # tokens of each path

# The distance between neighbouring numbers at 1.
_EPSILON = {"float32": 2**-23, "float16": 2**-10}
_BFLOAT16 = 2**-7


class Candidate(NamedTuple):
    """A token that may come first."""

    token: int
    text: str
    logprob: float


Top = Sequence[Candidate]  # the likeliest first tokens of one prompt, in descending order


class Paths(NamedTuple):
    """What each path found, prompt by prompt; empty for B if its request was ended as not sound."""

    a: Sequence[Top]
    b: Sequence[Top]
    c: Sequence[Top]


def tolerance(dtype: str, largest: float) -> float:
    """By how many nats the logprobs of sound paths may differ.

    vLLM rounds the last stream, lm_head's result, and what comes before them to the model's dtype; each moves a logit
    by about half a step of that dtype at the logit's size. We allow four steps at the largest logit: in bfloat16 0.5 at
    16, while a wrong layer or weight moves logprobs by whole nats. 0.02 more are for float32, where kernels add up in
    another order or use TF32.

    Args:
        dtype: of the engine; anything but float32 and float16 counts as bfloat16.
        largest: the largest logit among the candidates.
    """
    return 0.02 + 4 * _EPSILON.get(dtype, _BFLOAT16) * abs(largest)


def agree(one: Top, other: Top, allowed: float) -> bool:
    """Whether two paths give like logprobs to the candidates of both.

    A candidate that the other path does not list is there as likely as its last one at most. NaN agrees with nothing.
    """
    for mine, theirs in ((one, other), (other, one)):
        there = {candidate.token: candidate.logprob for candidate in theirs}
        last = min(there.values(), default=-math.inf)
        for candidate in mine:
            found = there.get(candidate.token, min(last, candidate.logprob))
            if not abs(candidate.logprob - found) <= allowed:
                return False
    return bool(one and other)


def verdict(paths: Paths, allowed: float) -> tuple[bool, str]:
    """Whether all is well, and where the fault lies otherwise."""
    broken = [not all(math.isfinite(one.logprob) for top in path for one in top) for path in paths]
    if broken[0]:
        return False, "A is not finite: the model or its weights"
    ab, ac, bc = (
        len(one) == len(other) and all(agree(*tops, allowed) for tops in zip(one, other, strict=True))
        for one, other in ((paths.a, paths.b), (paths.a, paths.c), (paths.b, paths.c))
    )
    if ab and ac:
        return True, f"A = B = C within {allowed:.2f} nats"
    if ac:
        return False, "A = C and B differs: saesteer, or vLLM's compilation if `unsteered = stock` is ok"
    if ab:
        return False, "A = B and C differs: vLLM's eager mode"
    if bc:
        return False, "A differs from both: the model or its weights, as vLLM or Transformers loads them"
    return False, "no two agree: the model or its weights first"


def table(prompts: Sequence[str], paths: Paths, how: str) -> Table:
    """The candidates of all paths, side by side.

    Args:
        prompts: as they were asked.
        paths: what was found.
        how: how B's engine runs.
    """
    heads = "A: Transformers, float32", f"B: vLLM with saesteer, {how}", "C: stock vLLM, eager"
    made = rounded("first token of", *heads, show_lines=True, title="Logprobs of the first token")
    for number, prompt in enumerate(prompts):
        cells = (path[number] if number < len(path) else () for path in paths)
        made.add_row(escape(prompt), *("\n".join(map(_line, cell)) or "ended" for cell in cells))
    return made


def _line(one: Candidate) -> str:
    return f"{escape(repr(one.text))} {one.logprob:.3f}"
