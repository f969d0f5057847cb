"""A feature's address means what its dictionary and its index mean, in every place where a feature can be named."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.engine.encode import encode
from saesteer.errors import SpecError
from saesteer.language.spec import clamp, from_json
from saesteer.planning.applied import applied
from saesteer.planning.plan import Catalog, Origin, Plan
from saesteer.planning.planner import plan
from saesteer.planning.runs import contents, runs
from tests.spec.catalogs import Info, Set
from tests.spec.plans import plan_or_code

SOURCES = {("own", None): "gemma-2-2b/20-res-16k", ("gs", 15): "gemma-2-2b/15-res", ("gs", 20): "gemma-2-2b/20-res"}
CATALOG = Catalog(
    {"own": Info("resid_post.20"), "gs@15": Info("resid_post.15"), "gs@20": Info("resid_post.20")},
    None,
    64,
    {"v": Set(digests={None: "ab" * 32})},
    sets={"gs": (15, 20)},
    addresses={
        "np:gemma-2-2b/20-res-16k": "own",
        "np:gemma-2-2b/15-res": "gs@15",
        "np:gemma-2-2b/20-res": "gs@20",
        "np:other/1-x": "own",
    },
    origin={"own": Origin("gemma-2-2b", "same"), "gs@20": Origin("gemma-2-2b", "base")}.get,
)
ADDRESS = "gemma-2-2b/20-res-16k/3"
CLAMP = {"op": "clamp", "feature": ADDRESS, "value": 2.0}

features = st.integers(0, 5)
named = st.builds(
    lambda place, feature: {"dictionary": place[0], "feature": feature} | ({"layer": place[1]} if place[1] else {}),
    st.sampled_from(sorted(SOURCES, key=str)),
    features,
)
gates = st.lists(named.map(lambda one: one | {"above": 0.5}), max_size=2)
values = st.just(2.0) | named.map(lambda one: one | {"slope": -1.0, "max": 3.0})
clamps = st.builds(
    lambda place, value, when, unit: {
        "op": "clamp",
        **place,
        "value": value,
        "mode": "add",
        "when": when,
        "unit": unit,
    },
    named,
    values,
    gates,
    st.sampled_from(["raw", "max_act"]),
)
adds = st.builds(
    lambda scale, when: {"op": "add", "vector": "v", "site": "resid_post.22", "scale": scale, "when": when},
    values,
    gates,
)
reads = st.lists(
    st.builds(
        lambda place, more: (
            {key: one for key, one in place.items() if key != "feature"}
            | {"features": sorted({place["feature"], more})}
        ),
        named,
        features,
    ),
    max_size=1,
)
specs = st.builds(
    lambda edits, wanted: {"edits": edits, "return": {"features": wanted}}, st.lists(clamps | adds, max_size=4), reads
)


def by_address(value: Any) -> Any:
    """The same request, with an address in place of each dictionary, layer and index."""
    if isinstance(value, list):
        return [by_address(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: by_address(one) for key, one in value.items() if key not in ("dictionary", "layer")}
    if "dictionary" in value:
        source = SOURCES[value["dictionary"], value.get("layer")]
        if "feature" in found:
            found["feature"] = f"{source}/{found['feature']}"
        else:
            found["features"] = [f"{source}/{one}" for one in found["features"]]
    return found


@given(specs)
def test_plan_keys_and_report_are_the_same(wire: dict[str, Any]) -> None:
    one, other = plan_or_code(wire, CATALOG), plan_or_code(by_address(wire), CATALOG)
    assert one == other
    if isinstance(one, Plan) and isinstance(other, Plan):
        assert runs(one, contents(one, CATALOG)) == runs(other, contents(other, CATALOG))
        assert applied(one, CATALOG) == applied(other, CATALOG)
        assert encode(one, CATALOG) == encode(other, CATALOG)


@given(specs)
def test_the_canonical_json_of_an_address_means_the_same(wire: dict[str, Any]) -> None:
    spec = from_json(by_address(wire))
    assert from_json(spec.to_json()) == spec


def test_an_address_stands_for_dictionary_and_index() -> None:
    [edit] = from_json({"edits": [CLAMP]}).edits
    assert edit == clamp(feature=ADDRESS, value=2.0) == clamp("np:gemma-2-2b/20-res-16k", 3, 2.0)
    assert edit == clamp(feature=f"np:{ADDRESS}", value=2.0)
    [read] = from_json({"return": {"features": [{"features": [ADDRESS], "top_k": 4}]}}).returns.features
    assert (read.dictionary, read.features) == ("np:gemma-2-2b/20-res-16k", (3,))


@pytest.mark.parametrize(
    ("change", "field", "code", "words"),
    [
        (
            {"feature": "gemma-2-2b/21-res-16k/3"},
            "feature",
            "unknown_name",
            "got 'np:gemma-2-2b/21-res-16k' (did you mean 'np:gemma-2-2b/20-res-16k'?), which no dictionary of this "
            "server has, expected one of the addresses np:gemma-2-2b/15-res, np:gemma-2-2b/20-res, "
            "np:gemma-2-2b/20-res-16k, np:other/1-x; dictionaries by name: gs, own",
        ),
        ({"feature": "gemma-2-2b/20-res-16k/100"}, "feature", "out_of_range", "expected a feature of dictionary 'own'"),
        ({"feature": "gemma-2-2b/20"}, "feature", "out_of_range", "expected the address of a feature, such as"),
        ({"feature": "gemma-2-2b/20-res-16k/x"}, "feature", "out_of_range", "expected the address of a feature"),
        ({"dictionary": "own"}, "dictionary", "conflict", "stands next to an address in feature"),
        (
            {"dictionary": "own", "feature": "34"},
            "feature",
            "wrong_type",
            "expected an integer (did you mean 34 without quotes?)",
        ),
        ({"layer": 19}, "layer", "out_of_range", "is of layer 20"),
        ({"when": {"feature": "a/b/1", "above": 0}}, "when.feature", "unknown_name", "got 'np:a/b'"),
        ({"when": {"feature": ADDRESS, "probe": "v", "above": 0}}, "when.probe", "conflict", "stands next to"),
    ],
)
def test_wrong_addresses(change: dict[str, Any], field: str, code: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan(from_json({"edits": [CLAMP | change]}), CATALOG, 12)
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[0].{field}", code)
    assert words in str(caught.value)


def test_a_read_is_of_one_dictionary() -> None:
    for features, words in (
        ([ADDRESS, "gemma-2-2b/15-res/3"], "expected a feature of gemma-2-2b/20-res-16k as before"),
        ([ADDRESS, 3], "got 3, expected the address of a feature"),
    ):
        with pytest.raises(SpecError, match=words) as caught:
            from_json({"return": {"features": [{"features": features}]}})
        assert caught.value.field == "saesteer.return.features[0].features[1]"
    with pytest.raises(SpecError, match="got 'np:a/b'") as caught:
        plan(from_json({"return": {"features": [{"dictionary": "np:a/b"}]}}), CATALOG, 12)
    assert caught.value.field == "saesteer.return.features[0].dictionary"


@pytest.mark.parametrize(("fit", "words"), [("unknown", "is not known to be gemma-2-2b"), ("other", "is not gemma")])
def test_an_address_says_the_model(fit: Any, words: str) -> None:
    """By name and number the dictionary is served all the same."""
    catalog = replace(CATALOG, origin={"own": Origin("gemma-2-2b", fit)}.get)
    with pytest.raises(SpecError, match=words) as caught:
        plan(from_json({"edits": [CLAMP]}), catalog, 12)
    assert caught.value.code == "not_served" and "--dictionaries-of gemma-2-2b" in str(caught.value)
    assert plan(from_json({"edits": [clamp("own", 3, 2.0)]}), catalog, 12).groups


@pytest.mark.parametrize(("fit", "expected"), [("same", None), ("base", "m"), ("declared", "m"), ("unknown", None)])
def test_applied_names_another_model(fit: Any, expected: str | None) -> None:
    catalog = replace(CATALOG, origin={"own": Origin("m", fit)}.get)
    [entry] = applied(plan(from_json({"edits": [clamp("own", 3, 2.0)]}), catalog, 12), catalog)
    assert entry.get("trained_on") == expected
