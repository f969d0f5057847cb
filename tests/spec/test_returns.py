"""Reads in the request language: their defaults, their other words, and each way in which they are refused."""

from typing import Any

import pytest

from saesteer.errors import SpecError
from saesteer.language.edits import MAX_POSITIONS
from saesteer.language.returns import MAX_CONSUMERS, MAX_NAMED, MAX_NESTED, MAX_PARAMETERS, MAX_READS
from saesteer.language.spec import (
    ActivationRead,
    Consumer,
    Return,
    Scope,
    from_json,
)

CLAMP = {"op": "clamp", "dictionary": "gs20", "feature": 34, "value": 8.0}
# The design's example.
WHOLE: dict[str, Any] = {
    "features": [
        {"dictionary": "gs20", "top_k": 8, "features": [34, 99], "scope": {"generated": True}, "at": "before",
         "cached": "recompute"}
    ],
    "probes": ["sentiment", {"probe": "risk", "scope": {"messages": ["user"]}}],
    "activations": [
        {"site": "resid_post.20", "scope": {"positions": [[-1, None]]}, "reduce": "none", "at": "before",
         "as": "inline"}
    ],
    "hidden": True,
    "consumers": {"filesystem": {"tag": "run7"}},
    "dose": True,
}  # fmt: skip


def read(**wanted: Any) -> Return:
    return from_json({"return": wanted}).returns


def test_defaults() -> None:
    found = read(features=[{"dictionary": "a"}], probes=["p"], activations=[{"site": "resid_post.1"}])
    [features], [probe], [tensor] = found.features, found.probes, found.activations
    assert features.scope == probe.scope == Scope(generated=True)
    assert tensor.scope == Scope()
    for one in (features, probe, tensor):
        assert (one.at, one.cached) == ("before", "recompute")
    assert (tensor.reduce, tensor.transport) == ("none", "inline")
    assert Return().hidden is False and not Return().consumers


@pytest.mark.parametrize(
    ("given_", "count"),
    [({}, 8), ({"top_k": 3}, 3), ({"features": [1]}, 0), ({"features": [1], "top_k": 8}, 8), ({"features": []}, 8)],
)
def test_how_many_of_the_strongest_features(given_: dict[str, Any], count: int) -> None:
    assert read(features=[{"dictionary": "a", **given_}]).features[0].strongest == count


@pytest.mark.parametrize(
    ("positions", "scope"),
    [
        ("all", Scope()),
        ("prompt", Scope(prompt=True)),
        ("generated", Scope(generated=True)),
        ([[0, 3], [-1, None]], Scope(positions=((0, 3), (-1, None)))),
    ],
)
def test_positions_are_another_word_for_a_scope(positions: Any, scope: Scope) -> None:
    found = read(activations=[{"site": "resid_post.1", "positions": positions}])
    assert found == read(activations=[{"site": "resid_post.1", "scope": scope.to_json()}])
    assert found.activations[0].scope == scope
    assert found.activations == (ActivationRead(("resid_post.1",), positions=positions),)


DEEP: Any = []
for _ in range(MAX_NESTED - 1):  # in an object, which counts as well
    DEEP = [DEEP]
HALF = {"x": "a" * (MAX_PARAMETERS // 2 - len('{"x":""}'))}


def test_consumers_made_in_python_are_checked_as_well() -> None:
    one, other = Consumer("b", '{"y": 1, "x": 2}'), Consumer("a", "{}")
    assert Return(consumers=(one, other)) == read(consumers={"a": {}, "b": {"x": 2, "y": 1}})
    for wrong, code in [
        ((one, one), "duplicate"),
        ((Consumer("a", "{"),), "bad_json"),
        ((Consumer("a", "[]"),), "wrong_type"),
        ((Consumer("", "{}"),), "out_of_range"),
    ]:
        with pytest.raises(SpecError) as caught:
            Return(consumers=wrong)
        assert caught.value.code == code


def features(**more: Any) -> dict[str, Any]:
    return {"features": [{"dictionary": "a", **more}]}


def tensor(**more: Any) -> dict[str, Any]:
    return {"activations": [{"site": "resid_post.3", **more}]}


WRONG: list[tuple[str, str, str, Any]] = [
    # id, field below saesteer.return, code, return
    ("features-object", "features", "wrong_type", {"features": {"dictionary": "a"}}),
    ("features-name", "features[0]", "wrong_type", {"features": ["a"]}),
    ("features-nothing", "features[0].dictionary", "missing_field", {"features": [{"top_k": 3}]}),
    ("features-many", "features", "too_many", {"features": [{"dictionary": str(n)} for n in range(MAX_READS + 1)]}),
    ("features-twice", "features[1]", "duplicate", {"features": [{"dictionary": "a"}] * 2}),
    ("features-twice-after", "features[1]", "duplicate", {"features": [{"dictionary": "a", "at": "after"}] * 2}),
    ("top_k-high", "features[0].top_k", "out_of_range", features(top_k=1025)),
    ("top_k-none", "features[0].top_k", "out_of_range", features(top_k=0, features=[1])),
    ("top_k-bool", "features[0].top_k", "wrong_type", features(top_k=True)),
    ("named-twice", "features[0].features[1]", "duplicate", features(features=[3, 3])),
    ("named-negative", "features[0].features[1]", "out_of_range", features(features=[3, -3])),
    ("named-many", "features[0].features", "too_many", features(features=[*range(MAX_NAMED + 1)])),
    ("at", "features[0].at", "unknown_name", features(at="behind")),
    ("cached", "features[0].cached", "unknown_name", features(cached="keep")),
    ("scope", "features[0].scope", "wrong_type", features(scope="generated")),
    ("scope-empty", "features[0].scope.positions[0]", "empty_scope", features(scope={"positions": [[3, 3]]})),
    ("probe-number", "probes[0]", "wrong_type", {"probes": [3]}),
    ("probe-empty", "probes[0]", "out_of_range", {"probes": [""]}),
    ("probe-nothing", "probes[0].probe", "missing_field", {"probes": [{"site": "resid_post.3"}]}),
    ("probe-site", "probes[0].site", "unknown_name", {"probes": [{"probe": "p", "site": "resid_post.all"}]}),
    ("probe-twice", "probes[1]", "duplicate", {"probes": ["p", {"probe": "p"}]}),
    ("probe-one-place", "probes[1]", "duplicate",
     {"probes": [{"probe": "p", "site": "resid_pre.4"}, {"probe": "p", "site": "resid_post.3"}]}),
    ("site-nothing", "activations[0].site", "missing_field", {"activations": [{}]}),
    ("site-list", "activations[0].site", "out_of_range", tensor(site=[])),
    ("site-twice", "activations[1]", "duplicate", {"activations": [{"site": "resid_pre.4"}, {"site": "resid_post.3"}]}),
    ("reduce", "activations[0].reduce", "unknown_name", tensor(reduce="sum")),
    ("as", "activations[0].as", "unknown_name", tensor(**{"as": "file"})),
    ("transport", "activations[0].transport", "unknown_field", tensor(transport="inline")),
    ("two-scopes", "activations[0].positions", "conflict", tensor(scope={"prompt": True}, positions="prompt")),
    ("two-scopes-empty", "activations[0].positions", "conflict", tensor(scope={}, positions="all")),
    ("hidden-number", "hidden", "wrong_type", {"hidden": 1}),
    ("hidden-text", "hidden", "wrong_type", {"hidden": "last"}),
    ("hidden-nothing", "hidden.scope", "missing_field", {"hidden": {}}),
    ("hidden-at", "hidden.at", "unknown_field", {"hidden": {"scope": {}, "at": "before"}}),
    ("consumers-list", "consumers", "wrong_type", {"consumers": ["logging"]}),
    ("consumers-null", "consumers.logging", "wrong_type", {"consumers": {"logging": None}}),
    ("consumers-text", "consumers.logging", "wrong_type", {"consumers": {"logging": "on"}}),
    ("consumers-name", "consumers['']", "out_of_range", {"consumers": {"": {}}}),
    ("consumers-many", "consumers", "too_many", {"consumers": {str(n): {} for n in range(MAX_CONSUMERS + 1)}}),
    ("parameters-long", "consumers.b", "too_many", {"consumers": {"a": HALF, "b": {**HALF, "y": 1}}}),
    ("parameters-deep", "consumers.a", "too_many", {"consumers": {"a": {"x": DEEP}}}),
    ("parameters-nan", "consumers.a", "not_finite", {"consumers": {"a": {"x": [float("nan")]}}}),
    ("parameters-long-number", "consumers.a", "out_of_range", {"consumers": {"a": {"x": 10**5000}}}),
    ("parameters-key", "consumers.a", "wrong_type", {"consumers": {"a": {"x": {3: 4}}}}),
    ("parameters-bytes", "consumers.a", "wrong_type", {"consumers": {"a": {"x": b"y"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "code", "wanted"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_a_wrong_read_is_refused_by_name(field: str, code: str, wanted: Any) -> None:
    with pytest.raises(SpecError) as caught:
        from_json({"return": wanted})
    assert (caught.value.field, caught.value.code) == (f"saesteer.return.{field}", code)
    assert len(str(caught.value)) < 500


def test_intervals_of_reads_count_with_those_of_edits() -> None:
    half = {"positions": [[1, 2]] * (MAX_POSITIONS // 2)}
    edits = [{**CLAMP, "scope": half}]
    from_json({"edits": edits, "return": {"probes": [{"probe": "p", "scope": half}]}})
    for wanted, path in [
        ({"probes": [{"probe": "p", "scope": half}, {"probe": "q", "scope": {"positions": [[1, 2]]}}]}, "probes[1]"),
        ({"probes": [{"probe": "p", "scope": half}], "hidden": {"scope": {"positions": [[1, 2]]}}}, "hidden"),
    ]:
        with pytest.raises(SpecError, match=f"got {MAX_POSITIONS + 1} intervals up to here") as caught:
            from_json({"edits": edits, "return": wanted})
        assert caught.value.field == f"saesteer.return.{path}.scope.positions"
        assert caught.value.code == "too_many"
