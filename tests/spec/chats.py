"""A chat of four messages: whose they are, and where each of them ends in the prompt."""

from collections.abc import Sequence

ROLES = ["system", "user", "assistant", "user"]
ENDS = [8, 14, 21, 28]  # of the messages in the prompt
PROMPT = 32  # tokens


def spans(runs: Sequence[tuple[int, int]], at: str) -> list[tuple[int, int]]:
    """The positions of some runs of messages, first and behind the last."""
    return [([0, *ENDS][first], ENDS[end - 1]) for first, end in runs]
