"""Scopes by chat message → scopes by position, for one conversation whose messages have known windows of tokens.

Knows roles and windows, no text, no template and no tokenizer: it asks the caller where a message stands in a prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from saesteer.language.edits import MAX_POSITIONS, Clamp, Edit, Message, Reconstruct, Scope, TokenEdit
from saesteer.language.fields import closest, fail, listing, show
from saesteer.language.spec import Spec
from saesteer.planning.lookup import dictionary_of
from saesteer.planning.plan import END, Catalog, Window
from saesteer.planning.windows import windows

Spans = Callable[[Sequence[tuple[int, int]], str], Sequence[Window]]


def named(spec: Spec) -> bool:
    """Whether a scope of the spec names messages."""
    return any(edit.scope.messages is not None for edit in spec.edits)


def resolve(spec: Spec, catalog: Catalog, prompt_len: int, roles: Sequence[str], spans: Spans) -> Spec:
    """The same spec with positions in place of messages.

    A message's tokens are the tokens that the chat template adds to the prompt for it, including its header and its
    end. Whatever precedes the first message, such as a default system prompt, belongs to the first message; the tokens
    that open the answer belong to none. The result is intersected with the other fields of the scope. Positions that
    are left alone by default, such as position 0, are left alone here, too, unless ``positions`` names them.

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
    total, most = 0, min(MAX_POSITIONS, 3 * catalog.max_entries)
    places: dict[str, list[int]] = {}
    for place, role in enumerate(roles):
        places.setdefault(role, []).append(place)
    known: dict[tuple[Message, ...], list[tuple[int, int]]] = {}
    edits: list[Edit] = []
    for i, edit in enumerate(spec.edits):
        scope, at = edit.scope, f"saesteer.edits[{i}].scope"
        if scope.messages is not None:
            runs = known.get(scope.messages)
            if runs is None:
                runs = known[scope.messages] = _runs(scope.messages, places, len(roles), f"{at}.messages")
            if len(runs) > catalog.max_entries:
                expected = f"at most {catalog.max_entries}, the server's limit on entries"
                fail(f"{at}.messages", "too_many", f"names {len(runs)} separate runs of messages, expected {expected}")
            info = None  # an unknown name is refused later
            if (
                isinstance(edit, Clamp | Reconstruct)
                and catalog.key(edit.dictionary, edit.layer) in catalog.dictionaries
            ):
                _, info = dictionary_of(catalog, edit.dictionary, edit.layer, f"saesteer.edits[{i}]")
            whole = windows(replace(scope, messages=None), prompt_len, info.skip_first if info else 1)
            found = _meet(whole, spans(runs, f"{at}.messages"))
            total += len(found)
            if not found:
                fail(at, "empty_scope", "holds no token of these messages, expected at least one")
            if total > most:
                message = f"makes {total} intervals up to here, expected at most {most}"
                fail(f"{at}.messages", "too_many", message)
            assert isinstance(edit, TokenEdit), "`use` has no scope"
            edit = replace(edit, scope=Scope(positions=found))
        edits.append(edit)
    return replace(spec, edits=tuple(edits))


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
