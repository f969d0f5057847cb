"""Scopes by chat message → scopes by position, for one conversation whose messages have known windows of tokens.

Knows roles and windows, no text, no template and no tokenizer: where a message stands in a prompt the caller is asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from saesteer.checks import closest, fail, listing, show
from saesteer.edits import MAX_POSITIONS, Edit, Message, Scope
from saesteer.planned import END, Catalog, Window
from saesteer.scopes import windows
from saesteer.spec import Spec

Spans = Callable[[Sequence[tuple[int, int]], str], Sequence[Window]]


def named(spec: Spec) -> bool:
    """Whether a scope of the spec names messages."""
    return any(_scope(edit).messages is not None for edit in spec.edits)


def resolve(spec: Spec, catalog: Catalog, prompt_len: int, roles: Sequence[str], spans: Spans) -> Spec:
    """The same spec with positions in the place of messages.

    A message's tokens are those that the chat template adds to the prompt with it, its header and its end among them;
    what stands before the first message, such as a default system prompt, comes with the first, and what invites the
    answer belongs to none. The other fields of the scope meet with them; positions that are left alone by default,
    such as position 0, are left alone here, too, unless ``positions`` name them.

    Args:
        spec: of the request.
        catalog: of the server, for the first positions that a dictionary's format leaves alone.
        prompt_len: in tokens.
        roles: of the messages, in their order.
        spans: runs of messages, each [first, end), and the path of the field → their windows of tokens.

    Raises:
        SpecError: a role or an index that the conversation does not have, or a scope without a token.
    """
    total = 0
    edits: list[Edit] = []
    for i, edit in enumerate(spec.edits):
        scope, at = _scope(edit), f"saesteer.edits[{i}].scope"
        if scope.messages is not None:
            runs = _runs(scope.messages, roles, f"{at}.messages")
            if len(runs) > catalog.max_entries:
                expected = f"at most {catalog.max_entries}, as many entries as the server takes"
                fail(f"{at}.messages", "too_many", f"names {len(runs)} separate runs of messages, expected {expected}")
            info = catalog.dictionaries.get(getattr(edit, "dictionary", ""))
            whole = windows(replace(scope, messages=None), prompt_len, info.skip_first if info else 1)
            found = _meet(whole, spans(runs, f"{at}.messages"))
            total += len(found)
            if not found:
                fail(at, "empty_scope", "holds no token of these messages, expected at least one")
            if total > MAX_POSITIONS:
                expected = f"at most {MAX_POSITIONS}"
                fail(f"{at}.messages", "too_many", f"makes {total} intervals up to here, expected {expected}")
            changed: Any = edit  # every edit but `use` has a scope
            edit = replace(changed, scope=Scope(positions=found))
        edits.append(edit)
    return replace(spec, edits=tuple(edits))


def _scope(edit: Edit) -> Scope:
    found: Scope = getattr(edit, "scope", Scope())
    return found


def _runs(wanted: Sequence[Message], roles: Sequence[str], at: str) -> list[tuple[int, int]]:
    """The messages that are named, as runs [first, end) of neighbours, ascending."""
    places: set[int] = set()
    for i, one in enumerate(wanted):
        if isinstance(one, str):
            having = [place for place, role in enumerate(roles) if role == one]
            if not having:
                known = f"one of: {listing(set(roles))}"
                fail(
                    f"{at}[{i}]",
                    "unknown_name",
                    f"got the role {show(one)}{closest(one, set(roles))}, expected {known}",
                )
            places.update(having)
        elif -len(roles) <= one < len(roles):
            places.add(one % len(roles))
        else:
            expected = f"an index from {-len(roles)} to {len(roles) - 1}: the prompt has {len(roles)} messages"
            fail(f"{at}[{i}]", "out_of_range", f"got {one}, expected {expected}")
    runs: list[tuple[int, int]] = []
    for place in sorted(places):
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _meet(one: Sequence[Window], other: Sequence[Window]) -> tuple[Window, ...]:
    """The positions that both hold; each is disjoint and ascending."""
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
