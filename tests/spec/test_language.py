"""Properties of the request language: spec → JSON → spec is the identity, and nothing wrong slips through."""

import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from saesteer.errors import SpecError
from saesteer.language.fields import CODES, FLOAT32_MAX
from saesteer.language.spec import Edit, Spec, as_spec, from_json
from tests.spec.strategies import at, copied, edits, mutations, places, specs

PATH = re.compile(r"saesteer(\.[A-Za-z_]\w{0,63}|\[\d+\]|\['.*'\]|\[\".*\"\])*", re.DOTALL)
thorough = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def refused(document: Any) -> SpecError | None:
    """The error for a document, held to what every error keeps; None when it is accepted."""
    error = error_of(document)
    if error is not None:
        assert PATH.fullmatch(error.field), error.field
        assert error.code in CODES
        assert str(error).startswith(f"{error.field}: ")
        assert len(str(error)) < 900
        str(error).encode()  # what cannot be encoded would be a 500
    return error


def error_of(document: Any) -> SpecError | None:
    try:
        from_json(document)
    except SpecError as error:
        return error
    return None


@thorough
@given(specs)
def test_spec_to_json_to_spec_is_the_identity(spec: Spec) -> None:
    document = spec.to_json()
    text = json.dumps(document, allow_nan=False)
    for again in (from_json(document), from_json(text), from_json(json.loads(text)), pickle.loads(pickle.dumps(spec))):
        assert again == spec
        assert hash(again) == hash(spec)
        assert json.dumps(again.to_json()) == text


@thorough
@given(edits)
def test_edits_made_in_python_equal_those_from_json(edit: Edit) -> None:
    (again,) = from_json({"edits": [edit.to_json()]}).edits
    assert again == edit
    assert type(again) is type(edit)
    assert as_spec(edit) == as_spec([edit]) == as_spec(edit.to_json()) == Spec(edits=(edit,))


@thorough
@given(specs, st.data())
def test_a_broken_spec_is_refused_or_means_what_its_round_trip_means(spec: Spec, data: st.DataObject) -> None:
    _, _, broken = data.draw(mutations(spec.to_json()))
    if refused(broken) is None:
        found = from_json(broken)
        again = from_json(json.dumps(found.to_json(), allow_nan=False))
        assert again == found
        assert json.dumps(again.to_json()) == json.dumps(found.to_json())


@thorough
@given(specs, st.data())
def test_nothing_is_ignored(spec: Spec, data: st.DataObject) -> None:
    """Every value of the canonical JSON counts: with another one the spec is refused, or it is another spec."""
    document = spec.to_json()
    kind, path, changed = data.draw(mutations(document))
    if kind == "insert" and at(changed, path) in (None, [], {}):
        return  # null and empty ones stand for absent
    if refused(changed) is None and not same_json(document, changed):
        found = from_json(changed)
        assert found != spec or defaults_aside(changed) == defaults_aside(document)


def same_json(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


DEFAULTS: dict[str, list[Any]] = {
    "version": [1], "unit": ["raw"], "mode": ["set"], "only_if_active": [False], "norm": ["none"], "error": ["drop"],
    "scale": [1], "strength": [1], "at": ["before"], "cached": ["recompute"], "reduce": ["none"], "as": ["inline"],
}  # fmt: skip


def defaults_aside(document: Any) -> Any:
    """An independent reading of what may be written in two ways: defaults, null, a list of one."""
    if isinstance(document, list):
        return [defaults_aside(item) for item in document]
    if not isinstance(document, dict):
        return document
    found = {}
    for key, value in document.items():
        value = defaults_aside(value)
        if value in (None, [], {}) or (value in DEFAULTS.get(key, []) and type(value) is not bool) or value is False:
            continue
        found[key] = value[0] if key in ("when", "site") and isinstance(value, list) and len(value) == 1 else value
    return found


@thorough
@given(specs, st.data())
def test_an_unknown_field_is_refused_wherever_it_stands(spec: Spec, data: st.DataObject) -> None:
    document = copied(spec.to_json())
    objects = [one for one in places(document) if isinstance(at(document, one), dict)]
    path = data.draw(st.sampled_from([one for one in objects if "consumers" not in one]))  # which only they can read
    key = data.draw(st.sampled_from(["featur", "Op", "comment", "vectors", "temperature"]) | st.text(max_size=200))
    if key in ("edits", "return", "version", "op", "scope", "when", "dictionary", "min", "max", "site", "scale"):
        return
    at(document, path)[key] = 1
    error = refused(document)
    assert error is not None
    assert error.code == "unknown_field"
    above = "saesteer" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path)
    assert error.field.startswith(above)
    assert "expected only" in str(error)


@thorough
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
    )
)
@example({"0" * 129: 1})
def test_any_json_at_all_is_accepted_or_refused(document: Any) -> None:
    refused(document)
    refused(json.dumps(document))
    refused({"edits": document})
    refused({"edits": [document], "return": document})


@given(st.text())
def test_any_text_at_all_is_accepted_or_refused(text: str) -> None:
    refused(text)


@given(st.floats() | st.integers())
def test_values_are_finite_and_fit_float32(value: float) -> None:
    error = refused({"edits": [{"op": "clamp", "dictionary": "a", "feature": 1, "value": value}]})
    assert (error is None) == (abs(value) <= FLOAT32_MAX)


CLAMP = {"op": "clamp", "dictionary": "a", "feature": 1, "value": 1.0}


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            CLAMP | {"value": {"probe": "p"}},
            "value: got a strength that is read, which needs mode add; with mode set expected a number",
        ),
        (
            CLAMP | {"feature": "ocean"},
            "feature: got 'ocean', expected an integer, or an address such as gemma-2-2b/20-gemmascope-res-16k/3124",
        ),
        (
            {"op": "clamp", "feature": 1, "value": 1.0},
            "dictionary: is missing, expected a dictionary's name, or an address in feature",
        ),
        ({"op": "add", "site": "resid_post.1"}, "vector: is missing, expected next to op, site"),
        (CLAMP | {"scope": "generated"}, "scope: got 'generated', expected an object such as {\"generated\": true}"),
    ],
)
def test_messages_say_what_to_write(edit: dict[str, Any], told: str) -> None:
    assert str(refused({"edits": [edit]})).startswith(f"saesteer.edits[0].{told}")
