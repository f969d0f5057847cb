"""Scopes by chat message → scopes by position, for one conversation whose messages have known windows of tokens.

Knows roles and windows, no text, no template and no tokenizer: it asks the caller where a message stands in a prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from saesteer.language.alike import parts_of
from saesteer.language.edits import MAX_POSITIONS, Clamp, Edit, Message, Reconstruct, Scope, TokenEdit
from saesteer.language.fields import closest, fail, listing, show
from saesteer.language.returns import Return
from saesteer.language.rules import Rule
from saesteer.language.spec import Spec
from saesteer.planning.lookup import dictionary_of
from saesteer.planning.plan import END, Catalog, Window
from saesteer.planning.reductions import is_by_message
from saesteer.planning.rules import refuse_above
from saesteer.planning.windows import windows, windows_of_read

Spans = Callable[[Sequence[tuple[int, int]], str], Sequence[Window]]


def named(spec: Spec) -> bool:
    """Whether a scope of the spec names messages."""
    edits = (part.first.scope for part in parts_of(spec.edits))
    return any(scope.messages is not None for scope in chain(edits, (scope for _, scope in spec.returns.scopes())))


def by_message(returns: Return) -> str | None:
    """The path of the first read that is reduced to a row for each message; None: there is none."""
    for n, one in enumerate(returns.activations):
        if is_by_message(one.reduce):
            return f"saesteer.return.activations[{n}].reduce"
    return None


def resolve(spec: Spec, catalog: Catalog, prompt_len: int, roles: Sequence[str], spans: Spans) -> Spec:
    """The same spec with positions in place of messages.

    A message's tokens are the tokens that the chat template adds to the prompt for it, including its header and its
    end. Whatever precedes the first message, such as a default system prompt, belongs to the first message; the tokens
    that open the answer belong to none. The result is intersected with the other fields of the scope. Positions that
    are left alone by default, such as position 0, are left alone here, too, unless ``positions`` names them or the
    scope is that of a read.

    Args:
        spec: the spec of the request.
        catalog: the server's catalog, which has the first positions that a dictionary's format leaves alone.
        prompt_len: the length of the prompt, in tokens.
        roles: the roles of the messages, in order.
        spans: a function: runs of messages, each [first, end), and the path of the field → their windows of tokens.

    Raises:
        SpecError: the conversation does not have a role or an index, or a scope holds no token.
    """
    # At most three edits make one entry: a min, a max and the reconstruction that takes them.
    found = _Conversation(roles, spans, min(MAX_POSITIONS, 3 * catalog.max_entries), catalog.max_entries)
    reading = _Conversation(roles, spans, MAX_POSITIONS, None)  # reads and rules make no entries
    edits: list[Edit] = []
    rules = 0
    for i, edit in enumerate(spec.edits):
        at = f"saesteer.edits[{i}]"
        rules += isinstance(edit, Rule)
        refuse_above(rules, at)  # here as well, as each may name other messages of a long conversation
        if edit.scope.messages is not None:
            info = None  # an unknown name is refused later
            if (
                isinstance(edit, Clamp | Reconstruct)
                and catalog.key(edit.dictionary, edit.layer) in catalog.dictionaries
            ):
                address = "dictionary" if isinstance(edit, Reconstruct) else "feature"
                _, info = dictionary_of(catalog, edit.dictionary, edit.layer, at, address=address)
            whole = windows(replace(edit.scope, messages=None), prompt_len, info.skip_first if info else 1)
            assert isinstance(edit, TokenEdit), "`use` has no scope"
            within = reading if isinstance(edit, Rule) else found
            edit = replace(edit, scope=within.scope(edit.scope.messages, whole, f"{at}.scope"))
        edits.append(edit)

    def positions(path: str, scope: Scope) -> Scope:
        if scope.messages is None:
            return scope
        whole = windows_of_read(replace(scope, messages=None), prompt_len)
        return reading.scope(scope.messages, whole, f"saesteer.return.{path}.scope")

    return replace(spec, edits=tuple(edits), returns=spec.returns.with_scopes(positions))


class _Conversation:
    """Where the messages of a conversation stand, for scopes that are resolved one after another.

    Args:
        roles: the roles of the messages, in order.
        spans: as ``resolve`` has it.
        most: intervals that all scopes may make together.
        most_runs: separate runs of messages that one scope may name; None: any number.
    """

    def __init__(self, roles: Sequence[str], spans: Spans, most: int, most_runs: int | None) -> None:
        self._spans, self._most, self._most_runs = spans, most, most_runs
        self._count = len(roles)
        self._places: dict[str, list[int]] = {}
        for place, role in enumerate(roles):
            self._places.setdefault(role, []).append(place)
        for one, other in pairwise(("system", "developer", "system")):  # two names of one role, which clients mix
            if one in self._places:
                self._places.setdefault(other, self._places[one])
        self._known: dict[tuple[Message, ...], list[tuple[int, int]]] = {}
        self._total = 0

    def scope(self, messages: tuple[Message, ...], whole: Sequence[Window], at: str) -> Scope:
        """The positions of a scope with messages.

        Args:
            messages: the messages that it names.
            whole: the positions that the rest of the scope holds.
            at: its path.

        Raises:
            SpecError: there is no such message, or they hold no token of the rest, or make too many intervals.
        """
        runs = self._known.get(messages)
        if runs is None:
            runs = self._known[messages] = _runs(messages, self._places, self._count, f"{at}.messages")
        if self._most_runs is not None and len(runs) > self._most_runs:
            expected = f"at most {self._most_runs}, the server's limit on entries"
            fail(f"{at}.messages", "too_many", f"names {len(runs)} separate runs of messages, expected {expected}")
        found = _meet(whole, self._spans(runs, f"{at}.messages"))
        self._total += len(found)
        if not found:
            fail(at, "empty_scope", "holds no token of these messages, expected at least one")
        if self._total > self._most:
            message = f"makes {self._total} intervals up to here, expected at most {self._most}"
            fail(f"{at}.messages", "too_many", message)
        return Scope(positions=found)


def _runs(wanted: Sequence[Message], places: Mapping[str, list[int]], count: int, at: str) -> list[tuple[int, int]]:
    """The named messages as ascending runs [first, end) of neighbours.

    Args:
        wanted: roles and indices.
        places: the places of the messages with each role, by role.
        count: the number of messages.
        at: the path of the field.
    """
    found: set[int] = set()
    fresh = dict(places)  # a role that is named again adds nothing
    for i, one in enumerate(wanted):
        if isinstance(one, str):
            if one not in places:
                expected = f"one of: {listing(places)}"
                fail(
                    f"{at}[{i}]", "unknown_name", f"got the role {show(one)}{closest(one, places)}, expected {expected}"
                )
            found.update(fresh.pop(one, ()))
        elif -count <= one < count:
            found.add(one % count)
        else:
            expected = f"an index from {-count} to {count - 1}: the prompt has {count} messages"
            fail(f"{at}[{i}]", "out_of_range", f"got {one}, expected {expected}")
    runs: list[tuple[int, int]] = []
    for place in sorted(found):
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _meet(one: Sequence[Window], other: Sequence[Window]) -> tuple[Window, ...]:
    """The positions that both arguments hold; the windows of each are disjoint and ascending."""
    found: list[Window] = []
    i = j = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low < high:
            assert high < END, "messages end with the prompt"
            touching = bool(found) and found[-1][1] == low  # a message between them may have no tokens
            found[-1:] = [(found[-1][0], high)] if touching else [*found[-1:], (low, high)]
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)
