"""Edits and rules of a request's own list that none of its tokens has; one of a module may well have none."""

from collections.abc import Mapping

from saesteer.language.edits import Part
from saesteer.language.fields import fail
from saesteer.planning.plan import END, Plan, Window
from saesteer.planning.windows import of_part

Scopes = Mapping[tuple[tuple[Window, ...], Part | None], str]


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
