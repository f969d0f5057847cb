"""A row made with what is kept of others of its form is the one that is made without."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from saesteer.engine import table
from saesteer.engine.engine import Engine
from saesteer.engine.table import Row, Rows
from saesteer.engine.wire import decode, encode
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan
from tests.small_engine import make_engine
from tests.small_world import CODERS, TOKENS, edits

NUMBERS = ("value", "scale", "strength", "min", "max")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("forms"))


def made(engine: Engine, rows: Rows, spec: Any, prompt_len: int) -> Row | None:
    """The row of a spec; None if it edits nothing."""
    found = from_json(spec)
    admitted = encode(plan(found, engine.catalog, prompt_len), engine.catalog, dose=found.returns.dose)
    if not admitted["plan"]:
        return None
    wire = decode(admitted["plan"])
    return rows.make(wire, engine.registry.find(wire.digests, admitted["vectors"]))


def said(row: Row | None) -> dict[str, Any]:
    """All of it, comparable."""
    found = {} if row is None else {field.name: getattr(row, field.name) for field in fields(row)}
    if row is not None:
        found["uses"] = [(site, arrow.digest) for site, arrow in row.uses]
    return {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in found.items()}


def halved(edit: dict[str, Any]) -> dict[str, Any]:
    """The same with other numbers, and where the dictionary has it another feature."""
    other = {name: value / 2 if name in NUMBERS and isinstance(value, float) else value for name, value in edit.items()}
    if "feature" in edit:
        other["feature"] = (edit["feature"] + 1) % CODERS[edit["dictionary"]].info.features
    return other


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(edits(), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(2, TOKENS),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_rows_are_the_same_whatever_was_asked_before(
    engine: Engine, several: list[list[Any]], prompt_len: int, dose: bool, limit: float
) -> None:
    rows = Rows(engine.places, limit)
    specs = [each for found in several for each in (found, [halved(edit) for edit in found], found[:1], found[1:])]
    for number, found in enumerate(specs):
        spec = {"edits": found} | ({"return": {"dose": True}} if dose else {})
        before = len(rows._forms)
        try:
            row = made(engine, rows, spec, prompt_len + number % 2)
        except SpecError:  # tested in tests/spec
            continue
        event("a form that was known" if len(rows._forms) == before else "a new form")
        assert said(row) == said(made(engine, Rows(engine.places, limit), spec, prompt_len + number % 2))


ADD: dict[str, Any] = {"op": "add", "site": "resid_post.1"}
CLAMP: dict[str, Any] = {"op": "clamp", "dictionary": "rect", "value": 1.0}
LATER = {"op": "add", "site": "resid_post.2", "vector": "any"}
WHEN = {"when": {"probe": "one", "above": 0.1}}
ALIKE = {
    "flags": ([{**CLAMP, "only_if_active": True}, CLAMP], [CLAMP, {**CLAMP, "only_if_active": True}]),
    "gates": ([CLAMP | WHEN, LATER], [CLAMP, LATER | WHEN]),
    "targets": (
        [ADD | {"vector": "one"}, ADD | {"vector": "any"}, ADD | {"vector": "one"}],
        [ADD | {"vector": "one"}, ADD | {"vector": "any"}, ADD | {"vector": "any"}],
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_plans_that_differ_in_little_else_have_forms_of_their_own(engine: Engine, name: str) -> None:
    rows = Rows(engine.places)
    for found in ALIKE[name]:
        spec = {"edits": [{"feature": at, **one} if one["op"] == "clamp" else one for at, one in enumerate(found)]}
        row = made(engine, rows, spec, 8)
        assert row is not None and said(row) == said(made(engine, Rows(engine.places), spec, 8))
    assert len(rows._forms) == 2 and len({head for head, _ in rows._forms}) == 1


def test_features_and_numbers_make_no_new_form(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(engine.places)

    def ask(feature: int, value: float, **more: Any) -> Row:
        edit = {"op": "clamp", "dictionary": "rect", "feature": feature, "value": value, **more}
        row = made(engine, rows, {"edits": [edit]}, 8)
        assert row is not None
        return row

    one, other = ask(1, 2.0), ask(3, -1.0)
    assert len(rows._forms) == 1 and one.kinds is other.kinds
    assert one.words.tolist() != other.words.tolist(), "and each row has words of its own"
    ask(1, 2.0, only_if_active=True)
    assert len(rows._forms) == 2
    monkeypatch.setattr(table, "_FORMS", 2)
    ask(1, 2.0)
    ask(1, 2.0, scope={"positions": [[1, 2], [3, 4]]})
    assert len(rows._forms) == 2, "the one that nobody used for longest is gone"
    kept = [*rows._forms]
    ask(2, 5.0)
    assert [*rows._forms] == [kept[1], kept[0]]
