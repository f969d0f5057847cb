"""Neighbouring clamps that are alike mean what each would mean alone: the same plan, entries, keys and errors."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from saesteer.engine.encode import encode
from saesteer.errors import SpecError
from saesteer.language import alike, spec
from saesteer.language.alike import Alike, Edits
from saesteer.language.edits import Clamp
from saesteer.language.spec import Spec, from_json
from saesteer.planning.applied import applied
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from saesteer.planning.runs import contents, runs
from tests.spec.kinds import INFOS, SITES, VECTORS
from tests.spec.plans import refusal_of

FEW = 12  # entries that a request may have
NUMBERS = st.sampled_from([0, 1, 1.0, -0.0, 2.5, True, "3", None, float("nan"), 1e39])
SCOPES = st.sampled_from(
    [{"generated": True}, {"positions": [[2, 4], [6, 8]]}, {"skip_first": 1}, {"skip_first": True}]
)
FIRST = {"op": "clamp", "dictionary": "gs15", "feature": 0, "value": 1.0}
ADDRESS = {"op": "clamp", "feature": "gemma-2-2b/20-x/3124", "value": 1.0}


@st.composite
def neighbours(draw: st.DrawFn) -> list[Any]:
    """Clamps, most of which differ from the one before in a feature, a value, or one thing more."""
    found: list[Any] = []
    values_first = {key: FIRST[key] for key in reversed(FIRST)}
    usual, rare = st.integers(0, 20), st.sampled_from([99, 100, -1, 2.0, True, None, ADDRESS["feature"]])
    for _ in range(draw(st.integers(1, 10))):
        one = deepcopy(found[-1] if found else draw(st.sampled_from([FIRST, values_first, ADDRESS])))
        one["feature"] = draw(st.one_of(usual, usual, usual, rare))
        key, values = draw(st.sampled_from([*CHANGES.items(), *2 * [("value", st.floats(-9, 9))]]))
        if draw(st.booleans()):
            one[key] = draw(values)
        elif draw(st.integers(0, 9)) == 0:
            one.pop(key, None)
        found.append(one)
    return found


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "value": NUMBERS,
    "mode": st.sampled_from(["set", "add", "scale", "min", "max"]),
    "scope": SCOPES,
    "only_if_active": st.sampled_from([True, False, 1]),
    "dictionary": st.sampled_from(["gs15", "gs20", "nobody", None]),
    "when": st.just({"dictionary": "gs15", "feature": 3, "above": 1.0}),
    "layer": st.sampled_from([15, 20, None]),
    "op": st.sampled_from(["reconstruct", "clamp"]),
}


def outcome(work: Callable[[], object]) -> object:
    """What it gives, or the words of its refusal."""
    try:
        return work()
    except SpecError as error:
        return error.field, error.code, str(error)


@settings(max_examples=200, deadline=None)
@given(neighbours())
@example([FIRST, {"op": "clamp", "dictionary": "gs15", "value": float("nan"), "feature": -1}])
@example([ADDRESS, {"op": "clamp", "feature": 5, "value": 2}])
@example([{**ADDRESS, "dictionary": None}, {"op": "clamp", "dictionary": None, "feature": 5, "value": 2}])
def test_edits_are_read_as_if_each_stood_alone(found: list[Any]) -> None:
    together = outcome(lambda: from_json({"edits": found}).edits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "with_following", lambda edit, *rest: Alike.alone(edit))
        assert repr(outcome(lambda: from_json({"edits": found}).edits)) == repr(together)


@settings(max_examples=200, deadline=None)
@given(neighbours(), st.booleans())
@example([{"op": "clamp", "dictionary": "gs15", "feature": n % 7, "value": n} for n in range(9)], False)
@example([{"op": "clamp", "dictionary": "gs15", "feature": n, "value": n} for n in range(FEW + 1)], True)
def test_a_plan_is_the_plan_of_each_by_itself(found: list[Any], in_module: bool) -> None:
    if isinstance(outcome(lambda: from_json({"edits": found})), tuple):
        return

    def everything() -> object:
        catalog = Catalog(INFOS, SITES, FEW, VECTORS, {"m": from_json({"edits": found})}, 4)
        asked = from_json({"edits": [{"op": "use", "module": "m", "scale": 2.0}] if in_module else found})
        made = plan(asked, catalog, 10)
        return made, encode(made, catalog), runs(made, contents(made, catalog)), applied(made, catalog)

    together = outcome(everything)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "_kind", lambda one: object())
        patch.setattr(spec, "with_following", lambda edit, *rest: Alike.alone(edit))
        assert outcome(everything) == together


def refusal(edits: list[Any]) -> tuple[str, str, str]:
    return refusal_of(lambda: from_json({"edits": edits}))


@settings(max_examples=200, deadline=None)
@given(neighbours(), st.data())
def test_edits_are_a_sequence_of_records_and_equal_however_they_came(found: list[Any], data: st.DataObject) -> None:
    read = outcome(lambda: from_json({"edits": found}))
    if not isinstance(read, Spec):
        return
    edits = [*read.edits]
    made = Spec(edits)
    assert isinstance(read.edits, Edits) and made == read and hash(made) == hash(read)
    assert made.to_json() == read.to_json() and from_json(made.to_json()) == read
    assert len(read.edits) == len(edits) == len(found) and repr(read) == repr(made)
    assert edits == [from_json({"edits": [one]}).edits[0] for one in found]
    assert [one for part in read.edits.parts for one in part.each()] == edits
    at = data.draw(st.integers(0, len(edits) - 1))
    assert read.edits[at] == edits[at] and [*read.edits[at:]] == edits[at:]
    other = edits[at]
    if isinstance(other, Clamp):
        edits[at] = replace(other, only_if_active=not other.only_if_active)
        assert Spec(edits) != read and replace(read, edits=edits) != read
    for part in read.edits.parts:
        start = data.draw(st.integers(0, part.size - 1))
        end = data.draw(st.integers(start + 1, part.size))
        assert [*part.part(start, end).each()] == [*part.each()][start:end]
