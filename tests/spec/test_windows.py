"""Which positions a scope holds: against a reading of the fine print position by position, and by example."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.language.edits import Scope
from saesteer.planning.plan import END
from saesteer.planning.windows import is_relative, windows
from tests.spec.scopes import holds, near_scopes
from tests.spec.strategies import scopes

N = 60  # positions that are looked at; every bound below is smaller


@settings(max_examples=500, deadline=None)
@given(near_scopes | scopes, st.integers(1, 40), st.integers(1, 40))
def test_a_scope_that_does_not_count_from_the_prompt_holds_the_same_in_any(scope: Scope, one: int, other: int) -> None:
    assert is_relative(scope) or windows(scope, one) == windows(scope, other)


def test_most_scopes_do_not_count_from_the_prompt() -> None:
    assert not is_relative(Scope()) and not is_relative(Scope(positions=((3, 9),), skip_first=4))


@settings(max_examples=500, deadline=None)
@given(near_scopes, st.integers(1, 40), st.integers(0, 5))
def test_windows_hold_exactly_the_positions_of_the_fine_print(scope: Scope, prompt_len: int, format_skips: int) -> None:
    found = windows(scope, prompt_len, format_skips)
    expected = [p for p in range(N) if holds(scope, p, prompt_len, format_skips)]
    assert [p for p in range(N) if any(lo <= p < hi for lo, hi in found)] == expected


@settings(max_examples=500, deadline=None)
@given(scopes, st.integers(0, 2**20), st.integers(0, 5))
def test_windows_are_disjoint_ascending_and_not_empty(scope: Scope, prompt_len: int, format_skips: int) -> None:
    found = windows(scope, prompt_len, format_skips)
    assert all(0 <= lo < hi <= END for lo, hi in found)
    assert all(one[1] < two[0] for one, two in pairwise(found)), "windows that touch are one"


P = 10
EXAMPLES = {
    "default": (Scope(), ((1, END),)),
    "prompt": (Scope(prompt=True), ((1, P),)),
    "not-prompt": (Scope(prompt=False), ((P, END),)),
    "generated": (Scope(generated=True), ((P, END),)),
    "not-generated": (Scope(generated=False), ((1, P),)),
    "both": (Scope(prompt=True, generated=True), ((1, END),)),
    "first-token-named": (Scope(positions=((0, 1),)), ((0, 1),)),
    "everything-named": (Scope(positions=((0, None),)), ((0, END),)),
    "last-prompt-token": (Scope(positions=((-1, None),)), ((P - 1, P),)),
    "last-three-but-one": (Scope(positions=((-3, -1),)), ((7, 9),)),
    "from-prompt-into-answer": (Scope(positions=((-2, 14),)), ((8, 14),)),
    "from-start-to-before-end": (Scope(positions=((3, -2),)), ((3, 8),)),
    "before-the-start": (Scope(positions=((-99, 2),)), ((0, 2),)),
    "half-open": (Scope(positions=((3, 5), (7, 8))), ((3, 5), (7, 8))),
    "touching": (Scope(positions=((5, 8), (3, 5))), ((3, 8),)),
    "overlapping": (Scope(positions=((3, 6), (4, 5), (5, 9))), ((3, 9),)),
    "positions-meet-flags": (Scope(positions=((3, 15),), generated=True), ((P, 15),)),
    "last-prompt-token-is-not-generated": (Scope(positions=((-1, None),), generated=True), ()),
    "skip": (Scope(skip_first=4), ((4, END),)),
    "skip-none": (Scope(skip_first=0), ((1, END),)),
    "skip-what-is-named": (Scope(skip_first=4, positions=((0, 6),)), ((4, 6),)),
    "skip-into-answer": (Scope(skip_first=12, generated=True), ((12, END),)),
    "skip-all": (Scope(skip_first=10, prompt=True), ()),
}


@pytest.mark.parametrize(("scope", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_windows_by_example(scope: Scope, expected: tuple[tuple[int, int], ...]) -> None:
    assert windows(scope, P) == expected


def test_what_the_format_leaves_alone_may_be_named() -> None:
    assert windows(Scope(), P, skip_first=4) == ((4, END),)
    assert windows(Scope(generated=True), 2, skip_first=4) == ((4, END),)
    assert windows(Scope(skip_first=2), P, skip_first=4) == ((4, END),)
    assert windows(Scope(positions=((2, 6),)), P, skip_first=4) == ((2, 6),)
    assert windows(Scope(), P, skip_first=0) == ((1, END),), "position 0 is left alone whatever the format says"


def test_a_prompt_of_one_token_is_only_position_0() -> None:
    assert windows(Scope(prompt=True), 1) == ()
    assert windows(Scope(positions=((-1, None),)), 1) == ((0, 1),)
    assert windows(Scope(), 1) == ((1, END),)
