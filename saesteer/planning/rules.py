"""The rules of a request: what they watch, and the position at which each fires. Knows values by position, no device.

A rule needs nothing of its own on the device: each of its conditions is a readout that the answer does not show
(readouts.py). Values come in the order of their positions, in parts of any size; what is computed twice, behind a
preemption, counts once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from saesteer.language import rules
from saesteer.language.fields import fail
from saesteer.planning.plan import END, MOST_RULES, Catalog, Plan, Readout, Rule, Window
from saesteer.planning.readouts import measure
from saesteer.planning.reads import bounds_of, with_paths
from saesteer.planning.windows import inside

Values = Mapping[int, tuple[Sequence[int], Sequence[float]]]  # by number of the measure: positions, and values there
_NONE: tuple[Sequence[int], Sequence[float]] = ((), ())


def refuse_above(number: int, at: str) -> None:
    """Refuse a rule, by its number in the request and its path.

    Raises:
        SpecError: a request may not have so many.
    """
    if number > MOST_RULES:
        fail(at, "too_many", f"is rule {number} of this request, expected at most {MOST_RULES}")


class Rules:
    """The rules of one request as they are planned."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rules: list[Rule] = []
        self._measures: dict[object, tuple[int, Readout]] = {}  # by what is read where

    def note(self, rule: rules.Rule, windows: tuple[Window, ...], at: str) -> None:
        """Plan a rule; ``at`` is its path.

        Raises:
            SpecError: a name is unknown, a site's tensor is not kept, or the request watches too much.
        """
        refuse_above(len(self._rules) + 1, at)
        bounds = []
        for one, path in with_paths(rule.when, at):
            found = measure(one, windows, self._catalog, path)
            same = found.site, found.dictionary, found.features, found.probe, windows
            number, _ = self._measures.setdefault(same, (len(self._measures), found))
            if number == MOST_RULES:
                message = f"is condition {MOST_RULES + 1} that rules of this request watch"
                fail(
                    path,
                    "too_many",
                    f"{message}, expected at most {MOST_RULES} that differ in what is read, or in scope",
                )
            bounds.append((number, *bounds_of(one, self._catalog)))
        op: Any = rule.op
        self._rules.append(Rule(op, at, windows, tuple(bounds), rule.run, rule.scope.part))

    def add_to(self, plan: Plan) -> Plan:
        """The plan with the rules, and with what they watch."""
        if not self._rules:
            return plan
        return replace(plan, rules=tuple(self._rules), measures=tuple(one for _, one in self._measures.values()))


class Fired(NamedTuple):
    """A rule that has fired."""

    op: str
    field: str  # path of the rule in the request
    position: int


class Watch:
    """The rules of a running request.

    Args:
        rules: of its plan.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._runs = [_Run(rule) for rule in rules]

    @property
    def in_parts(self) -> bool:
        """Whether a rule watches a part of the answer."""
        return any(one.rule.part for one in self._runs)

    def look(self, values: Values, end: int, border: int = END) -> list[Fired]:
        """The rules that fire now, by position; a stop is the last of them.

        Args:
            values: of the positions that a step has computed.
            end: positions from here on do not count yet: the token that was sampled there is not known.
            border: between the parts of the answer (windows.inside).
        """
        fired = [
            (at, one.rule.op == "stop", number)
            for number, one in enumerate(self._runs)
            if not one.passes(values, end) and (at := one.look(values, end, border)) is not None
        ]
        if not fired:
            return []
        found: list[Fired] = []
        for at, ends, number in sorted(fired):
            rule = self._runs[number].rule
            found.append(Fired(rule.op, rule.field, at))
            if ends:
                break
        return found


def flags(fired: Iterable[Sequence[Any]], end: int) -> list[dict[str, Any]]:
    """The rules that have fired, as an answer has them.

    Args:
        fired: as ``Watch.look`` finds them, or as lists of the same.
        end: positions from here on are not part of the answer.
    """
    return [{"edit": field, "position": position} for _, field, position in fired if position < end]


class _Run:
    """How long the conditions of a rule have held."""

    __slots__ = ("_above", "_below", "_fired", "_first", "_length", "_next", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._first, self._above, self._below = rule.bounds[0]
        self._next = 0  # positions below have been looked at
        self._length = 0  # positions in a row, up to there
        self._fired = False

    def passes(self, values: Values, end: int) -> bool:
        """Whether ``look`` has nothing to do: of a single position, as usual, at which the first condition fails."""
        if self._fired:
            return True
        positions, found = values.get(self._first, _NONE)
        if self._length or len(found) != 1 or positions[0] >= end or self._above < found[0] < self._below:
            return False
        self._next = max(self._next, positions[0] + 1)
        return True

    def look(self, values: Values, end: int, border: int) -> int | None:
        """The position at which the rule fires; None: not now."""
        held = [values.get(number, _NONE) for number, _, _ in self.rule.bounds]
        for place, position in enumerate(held[0][0]):
            if position < self._next or position >= end:
                continue
            if position > self._next:
                self._length = 0  # positions in between are outside the scope
            self._next = position + 1
            holds = inside(self.rule.part, position, border) and all(
                above < found[place] < below
                for (_, found), (_, above, below) in zip(held, self.rule.bounds, strict=True)
            )
            self._length = self._length + 1 if holds else 0
            if self._length == self.rule.run:
                self._fired = True
                return position
        return None
