"""Sets: a dictionary and a layer name what a dictionary of its own would, wherever a request may name one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.errors import SpecError
from saesteer.language.spec import clamp, from_json, reconstruct
from saesteer.planning.applied import applied
from saesteer.planning.plan import Catalog, member
from saesteer.planning.planner import plan
from saesteer.planning.runs import contents, runs
from tests.spec.catalogs import Info
from tests.spec.plans import plan_or_code
from tests.spec.sets import apart

LAYERS = (7, 15, 20)
SITES = {
    7: Info("mlp_out.7", site_in="mlp_in.7", skip_first=4),
    15: Info("resid_post.15", activation="topk", k=3),
    20: Info("resid_post.20"),
}
ALONE = {"own": Info("resid_post.15"), "gs@3": Info("resid_post.20")}
SET = Catalog({member("gs", n): info for n, info in SITES.items()} | ALONE, None, 4096, sets={"gs": LAYERS})
APART = Catalog({f"gs-{n}": info for n, info in SITES.items()} | ALONE, None, 4096)

features = st.integers(0, 5)
named = st.builds(lambda n, f: {"dictionary": "gs", "layer": n, "feature": f}, st.sampled_from(LAYERS), features)
sources = named | st.builds(lambda f: {"dictionary": "own", "feature": f}, features)
conditions = st.lists(sources.map(lambda one: one | {"above": 0.5}), max_size=2)
values = st.just(2.0) | sources.map(lambda one: one | {"slope": -1.0})


@st.composite
def edits(draw: st.DrawFn) -> dict[str, Any]:
    """A clamp with what it reads, or a reconstruction; of a set or not."""
    where, gates = draw(sources), draw(conditions)
    if draw(st.integers(0, 4)) == 0:
        del where["feature"]
        return {"op": "reconstruct", **where, "error": draw(st.sampled_from(["keep", "drop"])), "when": gates}
    return {"op": "clamp", **where, "value": draw(values), "mode": "add", "when": gates}


@given(st.lists(edits(), max_size=5))
def test_a_layer_of_a_set_is_a_dictionary(found: list[Any]) -> None:
    spec = {"edits": found}
    one, other = plan_or_code(spec, SET), plan_or_code(apart(spec), APART)
    if isinstance(other, str) or isinstance(one, str):
        assert one == other
        return
    assert repr(one).replace("gs@", "gs-") == repr(other).replace("gs-3", "gs@3")
    digests = [runs(found, contents(found, catalog)) for found, catalog in ((one, SET), (other, APART))]
    assert [run[:2] for run in digests[0]] == [run[:2] for run in digests[1]]


def test_applied_says_dictionary_and_layer() -> None:
    wire = {"edits": [{"op": "clamp", "dictionary": "gs", "layer": 20, "feature": 3, "value": 1.0}]}
    [entry] = applied(plan(from_json(wire), SET, 9), SET)
    assert {key: entry[key] for key in ("dictionary", "layer", "feature", "site")} == {
        "dictionary": "gs",
        "layer": 20,
        "feature": 3,
        "site": "resid_post.20",
    }
    [whole] = applied(plan(from_json({"edits": [reconstruct("gs", layer=20)]}), SET, 9), SET)
    assert (whole["dictionary"], whole["layer"]) == ("gs", 20)
    for name in ("own", "gs@3"):  # a name that looks like a member of the set, and is none
        [entry] = applied(plan(from_json({"edits": [clamp(name, 3, 1.0)]}), SET, 9), SET)
        assert entry["dictionary"] == name and "layer" not in entry


def test_block_keys_differ_by_layer() -> None:
    alike = Catalog(
        {member("gs", n): Info("resid_post.15") for n in (15, 20)}, None, 64, sets={"gs": (15, 20)}
    )  # equal in all but the layer
    found = [plan(from_json({"edits": [clamp("gs", 3, 1.0, layer=n)]}), alike, 9) for n in (15, 20)]
    [[[one]], [[other]]] = [contents(one, alike) for one in found]
    assert one != other


GATE = {"dictionary": "gs", "feature": 1, "above": 0}
CLAMP = {"op": "clamp", "dictionary": "gs", "feature": 3, "value": 1.0}


@pytest.mark.parametrize(
    ("edit", "field", "code", "words"),
    [
        (CLAMP, "layer", "missing_field", "is missing: 'gs' has a dictionary for each of several layers, expected one"),
        (CLAMP | {"layer": 8}, "layer", "out_of_range", "got 8, expected a layer of 'gs': 7, 15, 20"),
        (CLAMP | {"layer": "7"}, "layer", "wrong_type", "got '7', expected an integer"),
        (CLAMP | {"layer": -1}, "layer", "out_of_range", "got -1, expected an integer from 0"),
        (CLAMP | {"layer": True}, "layer", "wrong_type", "got true, expected an integer"),
        (CLAMP | {"dictionary": "gs@7"}, "dictionary", "unknown_name", "expected one of: gs, gs@3, own"),
        (CLAMP | {"dictionary": "gs@7", "layer": 7}, "dictionary", "unknown_name", "did you mean"),
        (CLAMP | {"dictionary": "own", "layer": 20}, "layer", "out_of_range", "'own' is of layer 15, expected that or"),
        (CLAMP | {"layer": 7, "feature": 100}, "feature", "out_of_range", "a feature of dictionary 'gs@7', 0 to 99"),
        (CLAMP | {"layer": 7, "when": GATE}, "when.layer", "missing_field", "7"),
        (
            CLAMP | {"layer": 7, "mode": "add", "value": {"dictionary": "gs", "layer": 9, "feature": 1}},
            "value.layer",
            "out_of_range",
            "got 9, expected a layer of 'gs'",
        ),
        (CLAMP | {"layer": 7, "when": {"probe": "p", "layer": 7, "above": 0}}, "when.probe", "conflict", "stands next"),
        ({"op": "reconstruct", "dictionary": "gs"}, "layer", "missing_field", "7, 15, 20"),
        ({"op": "add", "vector": [1.0], "site": "resid_post.7", "layer": 7}, "layer", "unknown_field", ""),
    ],
)  # fmt: skip
def test_refusals(edit: dict[str, Any], field: str, code: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan(from_json({"edits": [edit]}), SET, 9)
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[0].{field}", code)
    assert words in str(caught.value)
