"""Which positions a scope holds, for a prompt of a known length, and which hold none. Knows no site and no tokens.

The positions are decided once, at admission, so chunked prefill, preemption and recomputation edit the same tokens.
The lengths of the answer and of the context are unknown: positions that are never reached have no effect.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from saesteer.language.edits import Part, Scope
from saesteer.language.fields import fail
from saesteer.planning.plan import END, Plan, Window

Scopes = Mapping[tuple[tuple[Window, ...], Part | None], str]


def windows(scope: Scope, prompt_len: int, skip_first: int = 1) -> tuple[Window, ...]:
    """The positions of a scope, as disjoint ascending windows; empty when it holds none.

    ``prompt`` stands for the positions below ``prompt_len``, ``generated`` for all later ones. A missing flag is the
    negation of the given one; without both, all positions count. The token at position p is edited while it is
    computed, and the token sampled from it stands at p + 1. So ``generated`` does not change the first generated token,
    which is sampled from the last prompt token, at ``prompt_len − 1``; the first token that it changes is the second
    generated one. ``response`` stands for the last prompt token and all generated ones, and so changes the first.

    ``positions`` is intersected with the flags. A negative position counts from the end of the prompt, as in a slice: a
    position before the start of the prompt means its start. A null end is open after a start that is not negative, and
    means the end of the prompt after a negative start: ``[-1, null]`` is the last prompt token, whatever follows.

    A ``part`` stands for all generated positions here: where it begins or ends is only known once they are generated.

    Without ``positions``, the edit leaves alone the first ``skip_first`` positions of the dictionary's format, and
    always position 0; ``positions`` may name them. The scope's own ``skip_first`` also applies to ``positions``.

    Args:
        scope: the scope of the edit.
        prompt_len: the length of the prompt, in tokens.
        skip_first: how many first positions the dictionary's format leaves alone.
    """
    if scope.positions is None:
        spans: Iterable[Window] = [(max(1, skip_first), END)]
    else:
        spans = [_resolve(start, end, prompt_len) for start, end in scope.positions]
    prompt = scope.prompt if scope.prompt is not None else not (scope.generated or scope.part)
    generated = scope.generated if scope.generated is not None else not scope.prompt
    low = max(scope.skip_first or 0, prompt_len - 1 if scope.response else 0 if prompt else prompt_len)
    high = END if generated else prompt_len
    merged: list[Window] = []
    for start, end in sorted((max(start, low), min(end, high)) for start, end in spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def windows_of_read(scope: Scope, prompt_len: int) -> tuple[Window, ...]:
    """The positions that a read holds: like ``windows``, but only the scope's own ``skip_first`` leaves any alone."""
    return windows(scope if scope.positions else replace(scope, positions=((0, None),)), prompt_len)


def rank(windows: Sequence[Window], position: int) -> int:
    """How many positions of disjoint ascending windows are below a position."""
    return sum(min(high, position) - low for low, high in windows if low < position)


def inside(part: Part | None, position: int, border: int) -> bool:
    """Whether a generated token is in a part of the answer.

    Args:
        part: the part; None: the whole answer.
        position: of the token.
        border: position of the token that ends the reasoning, the last one of it; END: it is not there yet.
    """
    return part is None or (position <= border) == (part == "reasoning")


def of_part(part: Part | None, border: int) -> Window:
    """The positions of a part, of which only generated ones count; arguments as of ``inside``."""
    return (0 if part != "answer" else border + 1, END if part != "reasoning" else min(border, END - 1) + 1)


def is_relative(scope: Scope) -> bool:
    """Whether the windows of a scope depend on the length of the prompt."""
    flags = scope.prompt is not None or scope.generated is not None or scope.part is not None or scope.response
    return flags or any(start < 0 or (end is not None and end < 0) for start, end in scope.positions or ())


def _resolve(start: int, end: int | None, prompt_len: int) -> Window:
    """Absolute positions; positions before the prompt are below 0, and the flags cut them off."""
    if end is None:
        end = prompt_len if start < 0 else END
    elif end < 0:
        end += prompt_len
    return start + prompt_len if start < 0 else start, end


def is_own(at: str) -> bool:
    """Return whether a path is that of an edit in the request's own list, not in a module."""
    return at.count(".") == 1


def scopes_of(plan: Plan) -> Scopes:
    """Collect the different scopes of the request's own edits and rules, each with the path of one that has it."""
    return {(one.windows, one.part): one.field for one in (*plan.rules, *plan.parts) if is_own(one.field)}


def refuse_unmet(scopes: Scopes, prompt_len: int, end: int, border: int = END) -> None:
    """Refuse a scope without a token that the request computes if it runs to its length.

    Args:
        scopes: as ``scopes_of`` finds them.
        prompt_len: the length of the prompt, in tokens.
        end: positions from here on are no inputs: the last token that is sampled is none.
        border: where the prompt ends the reasoning (windows.inside); END: it does not.

    Raises:
        SpecError: there is one.
    """
    for (windows, part), at in scopes.items():
        # The first generated token may end the reasoning.
        first, last = of_part(part, prompt_len if part == "answer" and border == END else border)
        if all(min(hi, last, end) <= max(lo, first) for lo, hi in windows):
            message = f"holds none of the {end} tokens that this request computes, with {prompt_len} of its prompt"
            fail(f"{at}.scope", "empty_scope", f"{message}; expected at least one")
