"""Scopes by chat message: against a reading of the fine print position by position, by example, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.errors import SpecError
from saesteer.language.edits import Clamp, Scope
from saesteer.language.spec import Spec, clamp, flag, from_json
from saesteer.planning.messages import named, resolve
from saesteer.planning.plan import END, MOST_RULES, Catalog
from saesteer.planning.planner import plan
from saesteer.planning.windows import windows
from tests.spec.catalogs import CATALOG, Info
from tests.spec.chats import PROMPT, ROLES, spans
from tests.spec.scopes import holds
from tests.spec.strategies import chat_scopes


def scope_of(spec: Spec, place: int) -> Scope:
    edit = spec.edits[place]
    assert isinstance(edit, Clamp)
    return edit.scope


def resolved(scope: Any, catalog: Catalog = CATALOG, roles: Sequence[str] = ROLES, name: str = "gs15") -> Any:
    spec = Spec((clamp("pre16", 3, 1.0), clamp(name, 3, 1.0, scope=scope)))
    found = resolve(spec, catalog, PROMPT, roles, spans)
    assert not named(found) and found.edits[0] == spec.edits[0]
    return scope_of(found, 1).positions


EXAMPLES: dict[str, tuple[dict[str, Any], Any]] = {
    "user": ({"messages": "user"}, ((8, 14), (21, 28))),
    "list": ({"messages": [0, 2]}, ((1, 8), (14, 21))),
    "last": ({"messages": [-1]}, ((21, 28),)),
    "neighbours": ({"messages": ["assistant", 1]}, ((8, 21),)),
    "all": ({"messages": [3, 0, -2, "user", 2]}, ((1, 28),)),
    "first-position-named": ({"messages": [0], "positions": [[0, None]]}, ((0, 8),)),
    "meets-positions": ({"messages": "user", "positions": [[10, 23], [-6, -2]]}, ((10, 14), (21, 23), (26, 28))),
    "meets-skip": ({"messages": "user", "skip_first": 12}, ((12, 14), (21, 28))),
    "meets-flags": ({"messages": "assistant", "prompt": True, "generated": True}, ((14, 21),)),
}


@pytest.mark.parametrize(("scope", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_by_example(scope: dict[str, Any], expected: Any) -> None:
    assert resolved(scope) == expected


def test_developer_and_system_are_one_role_where_a_chat_has_one_of_them() -> None:
    scopes = [{"messages": role} for role in ("system", "developer")]
    for roles in (["developer", *ROLES[1:]], ["system", *ROLES[1:]]):
        assert [resolved(scope, roles=roles) for scope in scopes] == [((1, 8),)] * 2
    assert [resolved(scope, roles=["system", "developer", *ROLES[2:]]) for scope in scopes] == [((1, 8),), ((8, 14),)]


def test_what_the_format_leaves_alone_is_left_alone() -> None:
    assert resolved({"messages": [0]}, name="gs20") == ((3, 8),)
    assert resolved({"messages": [0], "positions": [[0, None]]}, name="gs20") == ((0, 8),)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "role": ({"messages": ["user", "usr"]}, "scope.messages[1]", "unknown_name"),
    "index": ({"messages": [0, 4]}, "scope.messages[1]", "out_of_range"),
    "from the end": ({"messages": [-5]}, "scope.messages[0]", "out_of_range"),
    "elsewhere": ({"messages": "system", "positions": [[20, 25]]}, "scope", "empty_scope"),
    "skipped": ({"messages": [0, 1], "skip_first": 14}, "scope", "empty_scope"),
}


@pytest.mark.parametrize(("scope", "field", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(scope: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolved(scope)
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[1].{field}", code)


def test_more_runs_than_the_server_takes_are_refused_before_any_is_looked_for() -> None:
    def never(runs: Any, at: str) -> Any:
        raise AssertionError

    catalog = replace(CATALOG, max_entries=2)
    spec = Spec((clamp("gs15", 1, 1.0, scope={"messages": "user"}),))
    with pytest.raises(SpecError, match=r"scope\.messages: names 3 separate runs") as caught:
        resolve(spec, catalog, PROMPT, ["user", "assistant"] * 3, never)
    assert caught.value.code == "too_many"


def test_rules_make_no_entries_and_may_watch_more_runs() -> None:
    watching = flag({"probe": "any", "site": "resid_post.15", "above": 0.0}, scope={"messages": [0, 2]})
    catalog = replace(CATALOG, max_entries=1)
    (found,) = resolve(Spec((watching,)), catalog, PROMPT, ROLES, spans).edits
    assert found.scope.positions == ((1, 8), (14, 21))


@pytest.mark.parametrize("where", ["request", "module"])
def test_unresolved_messages_are_refused(where: str) -> None:
    spec = Spec((clamp("gs15", 3, 1.0, scope={"messages": "user"}),))
    catalog = CATALOG
    if where == "module":
        catalog, spec = replace(CATALOG, modules={"m": spec}), from_json({"edits": [{"op": "use", "module": "m"}]})
        assert not named(spec)
    with pytest.raises(SpecError, match="names chat messages") as caught:
        plan(spec, catalog, PROMPT)
    assert caught.value.field.endswith("edits[0].scope.messages") and caught.value.code == "not_served"


@settings(max_examples=300, deadline=None)
@given(chat_scopes, st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_exactly_the_positions_of_both(scope: Scope, lengths: list[int], data: st.DataObject) -> None:
    roles = data.draw(
        st.lists(st.sampled_from(["system", "user", "tool"]), min_size=len(lengths), max_size=len(lengths))
    )
    skips, rest = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    prompt = ends[-1] + rest
    assert scope.messages is not None
    try:
        which = {n for one in scope.messages if isinstance(one, str) for n, role in enumerate(roles) if role == one}
        which |= {range(len(roles))[one] for one in scope.messages if isinstance(one, int)}
        wrong = any(isinstance(one, str) and one not in roles for one in scope.messages)
    except IndexError:
        wrong = True
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    plain = replace(scope, messages=None)
    expected = [] if wrong else [p for p, n in enumerate(owner) if n in which and holds(plain, p, prompt, skips)]
    catalog = Catalog({"d": Info(skip_first=skips)}, None, 64)
    spec = Spec((clamp("d", 1, 1.0, scope=scope),))

    def spans(runs: Any, at: str) -> Any:
        return [([0, *ends][first], ends[end - 1]) for first, end in runs]

    if not expected:
        with pytest.raises(SpecError) as caught:
            resolve(spec, catalog, prompt, roles, spans)
        assert wrong == (caught.value.code in ("unknown_name", "out_of_range"))
        return
    found = resolve(spec, catalog, prompt, roles, spans)
    kept = scope_of(found, 0)
    held = [
        p for p in range(prompt + 3) if any(lo <= p < (END if hi is None else hi) for lo, hi in kept.positions or ())
    ]
    assert held == expected
    assert windows(kept, prompt, skips) == kept.positions, "the engine reads the same"


def test_too_many_rules_are_refused_before_their_messages_are_looked_for() -> None:
    """Each may name other messages of a long conversation."""
    rules = [flag({"probe": "one", "above": 0}, scope={"messages": ["user", n]}) for n in range(MOST_RULES + 1)]
    roles, asked = ["user"] * len(rules), []

    def counted(runs: Sequence[tuple[int, int]], at: str) -> list[tuple[int, int]]:
        asked.append(at)
        return [(1, 4)]

    with pytest.raises(SpecError) as caught:
        resolve(Spec(tuple(rules)), CATALOG, PROMPT, roles, counted)
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[{MOST_RULES}]", "too_many")
    assert len(asked) == MOST_RULES
