"""Which edits and rules have a token that a request computes: its own must, those of modules need not."""

from collections.abc import Mapping, Sequence
from typing import Any

from saesteer.language.edits import Part
from saesteer.language.fields import fail
from saesteer.planning.immutable import immutable
from saesteer.planning.plan import END, Plan, Window
from saesteer.planning.windows import of_part

Scoped = tuple[tuple[Window, ...], Part | None, str]  # positions, and the path of an edit or a rule


@immutable
class Reach:
    """The positions that a request computes if it runs to its length."""

    prompt_len: int
    end: int  # positions from here on are no inputs: the last token that is sampled is none
    border: int = END  # where the prompt ends the reasoning (windows.inside); END: it does not

    def meets(self, windows: Sequence[Window], part: Part | None) -> bool:
        """Whether a scope holds one of them."""
        # The first generated token may end the reasoning.
        border = self.prompt_len if part == "answer" and self.border == END else self.border
        first, last = of_part(part, border)
        return any(max(lo, first) < min(hi, last, self.end) for lo, hi in windows)

    def reported(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of ``applied``, with a warning if its edit has no token."""
        windows = [(lo, END if hi is None else hi) for lo, hi in entry["positions"]]
        met = self.meets(windows, entry.get("part"))
        return {**entry} if met else {**entry, "warning": "its scope holds no token of this request"}


def is_own(at: str) -> bool:
    """Whether a path is that of an edit in the request's own list, not in a module."""
    return at.count(".") == 1


def scopes_of(plan: Plan) -> tuple[Scoped, ...]:
    """The different scopes of a plan's edits and rules, each with the path of the first that has it."""
    found: dict[object, Scoped] = {}
    for one in (*(part for group in plan.groups for part in group.parts), *plan.rules):
        found.setdefault((one.windows, one.part, is_own(one.field)), (one.windows, one.part, one.field))
    return (*found.values(),)


def refuse_unmet(scopes: Sequence[Scoped], reach: Reach) -> bool:
    """Refuse an edit or a rule of the request's own list that has no token; return whether one of a module has none.

    Raises:
        SpecError: names the edit or rule.
    """
    unmet = [at for windows, part, at in scopes if not reach.meets(windows, part)]
    for at in filter(is_own, unmet):
        message = f"holds no token of this request, whose last input is at position {reach.end - 1}"
        ended = ", and whose prompt ends the reasoning" if reach.border < END else ""
        expected = f"at least one, with a prompt of {reach.prompt_len} tokens"
        fail(f"{at}.scope", "empty_scope", f"{message}{ended}; expected {expected}")
    return bool(unmet)
