"""What a spec means at admission: groups, bands, duplicates, limits, and what is refused."""

import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError, SpecError
from saesteer.language.edits import Clamp, Scope
from saesteer.language.spec import Spec, clamp, flag, use
from saesteer.planning.plan import END, Catalog, Change, Feature, Group
from saesteer.planning.planner import plan
from saesteer.planning.windows import windows
from tests.spec.catalogs import CATALOG, INFOS, OPEN, Info
from tests.spec.plans import P, planned, refusal
from tests.spec.strategies import specs

ALL = ((1, END),)


def shape(groups: tuple[Group, ...]) -> list[tuple[str, str, list[int]]]:
    found = []
    for one in groups:
        targets = [change.target for change in one.changes]
        assert all(isinstance(target, Feature) for target in targets)
        (name,) = {target.dictionary for target in targets if isinstance(target, Feature)}
        found.append((one.site, name, [target.feature for target in targets if isinstance(target, Feature)]))
    return found


@pytest.mark.parametrize(
    ("mode", "scale", "shift", "low", "high"),
    [
        ("set", 0, 8, -math.inf, math.inf),
        ("add", 1, 8, -math.inf, math.inf),
        ("scale", 8, 0, -math.inf, math.inf),
        ("min", 1, 0, 8, math.inf),
        ("max", 1, 0, -math.inf, 8),
    ],
)
def test_modes(mode: Any, scale: float, shift: float, low: float, high: float) -> None:
    found = planned(clamp("gs15", 34, 8, mode, only_if_active=True))
    change = Change(Feature("gs15", 34), ALL, "saesteer.edits[0]", scale, shift, low, high, "raw", True)
    assert found == (Group("resid_post.15", (change,)),)


def test_max_act_is_left_to_the_caller() -> None:
    ((change,),) = [one.changes for one in planned(clamp("gs15", 34, 2, unit="max_act"))]
    assert (change.unit, change.shift) == ("max_act", 2.0)


def test_resid_pre_16_and_resid_post_15_are_one_site() -> None:
    found = shape(planned(clamp("gs15", 1, 1), clamp("pre16", 2, 1), clamp("gs15", 3, 1)))
    assert found == [
        ("resid_post.15", "gs15", [1]),
        ("resid_post.15", "pre16", [2]),
        ("resid_post.15", "gs15", [3]),
    ]


@given(st.lists(st.tuples(st.sampled_from(["gs15", "pre16", "gs20"]), st.integers(0, 99)), max_size=12))
def test_groups_keep_every_clamp_and_the_order_at_each_site(pairs: list[tuple[str, int]]) -> None:
    """Against the definition: filter the list to one site, then cut it wherever the dictionary changes."""
    try:
        found = planned(*(clamp(name, feature, 1) for name, feature in pairs))
    except SpecError:
        return  # a feature twice in one group, tested below
    for site, names in {"resid_post.15": ("gs15", "pre16"), "resid_post.20": ("gs20",)}.items():
        here = [pair for pair in pairs if pair[0] in names]
        expected: list[tuple[str, str, list[int]]] = []
        for i, (name, feature) in enumerate(here):
            if i == 0 or here[i - 1][0] != name:
                expected.append((site, name, []))
            expected[-1][2].append(feature)
        assert shape(tuple(one for one in found if one.site == site)) == expected
    fields = [int(one.changes[0].field[15:-1]) for one in found]
    assert fields == sorted(fields), "groups stand in the order of their first edits"


def test_min_and_max_make_a_band_in_either_order() -> None:
    low, high, other = clamp("gs15", 34, 2, "min"), clamp("gs15", 34, 5, "max"), clamp("gs15", 3, 1)
    for one, two in ((low, high), (high, low)):
        ((first, second),) = [group.changes for group in planned(one, other, two)]
        assert first == Change(Feature("gs15", 34), ALL, "saesteer.edits[0]", low=2.0, high=5.0)
        assert second.target == Feature("gs15", 3)
    assert planned(low, clamp("gs15", 34, 2, "max"))[0].changes[0].high == 2.0
    field, code, message = refusal(low, other, clamp("gs15", 34, 1, "max"))
    assert (field, code) == ("saesteer.edits[2].value", "conflict")
    assert "min 2.0 to max 1.0" in message


@pytest.mark.parametrize(
    "second",
    [
        clamp("gs15", 34, 5),
        clamp("gs15", 34, 8, "min"),
        clamp("gs15", 34, 9, "max", scope={"generated": True}),
        clamp("gs15", 34, 9, "max", only_if_active=True),
        clamp("gs15", 34, 9, "max", unit="max_act"),
        clamp("gs15", 34, 9, "add", scope={"positions": [[3, 4]]}),
    ],
    ids=["set", "min-twice", "band-windows", "band-gate", "band-unit", "one-position"],
)
def test_a_feature_clamped_twice_in_a_group_is_refused(second: Clamp) -> None:
    for one, two in ((clamp("gs15", 34, 8, "min"), second), (second, clamp("gs15", 34, 8, "min"))):
        field, code, message = refusal(one, clamp("gs15", 3, 1), clamp("gs20", 34, 1), two)
        assert (field, code) == ("saesteer.edits[3].feature", "duplicate")
        assert "as saesteer.edits[0] does" in message


def test_a_third_clamp_does_not_hide_behind_a_band() -> None:
    low, high = clamp("gs15", 34, 2, "min"), clamp("gs15", 34, 5, "max")
    for third in (low, high, clamp("gs15", 34, 1)):
        assert refusal(low, high, third)[1] == "duplicate"
        assert refusal(third, low, high)[1] == "duplicate"


def test_windows_that_do_not_meet_may_clamp_a_feature_twice() -> None:
    """So the last prompt token and the answer can be steered alike: the first generated token is steered as well."""
    last, answer = (
        clamp("gs15", 34, 8, scope={"positions": [[-1, None]]}),
        clamp("gs15", 34, 8, scope={"generated": True}),
    )
    (group,) = planned(last, answer)
    assert [change.windows for change in group.changes] == [((P - 1, P),), ((P, END),)]


near = st.builds(
    Scope, positions=st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1).map(tuple)
) | st.builds(
    Scope, positions=st.lists(st.integers(0, 19).map(lambda p: (p, p + 1)), min_size=1, max_size=3).map(tuple)
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), near, st.sampled_from(["set", "add", "min", "max"])), max_size=5))
def test_duplicates_are_found_position_by_position(drawn: list[tuple[int, Scope, Any]]) -> None:
    clamps = [clamp("gs15", feature, 3, mode, scope=scope) for feature, scope, mode in drawn]
    spans = [windows(one.scope, P) for one in clamps]
    alike = [
        (i, j)
        for i, one in enumerate(clamps)
        for j, two in enumerate(clamps)
        if one.feature == two.feature and spans[i] == spans[j] and (one.mode, two.mode) == ("min", "max")
    ]
    assume(
        len({i for i, _ in alike}) == len(alike) == len({j for _, j in alike})
    )  # which of three pair up is no matter
    clash = any(
        one.feature == two.feature
        and i < j
        and (i, j) not in alike
        and (j, i) not in alike
        and any(a <= p < b and c <= p < d for p in range(20) for a, b in spans[i] for c, d in spans[j])
        for i, one in enumerate(clamps)
        for j, two in enumerate(clamps)
    )
    if clash:
        assert refusal(*clamps)[1] == "duplicate"
    else:
        found = planned(*clamps)
        assert sum(len(group.changes) for group in found) == len(clamps) - len(alike)


@pytest.mark.parametrize(
    ("edit", "field", "code", "words"),
    [
        (
            clamp("gs16", 1, 1),
            ".dictionary",
            "unknown_name",
            ["'gs16'", "did you mean 'gs15'?", "few, gs15, gs20, pre16"],
        ),
        (clamp("gs15", 100, 1), ".feature", "out_of_range", ["got 100", "0 to 99"]),
        (clamp("few", 6, 1), ".feature", "out_of_range", ["got 6", "3 features", "5, 900, 40000"]),
        (clamp("gs20", 1, 1, unit="max_act"), ".unit", "unknown_max_act", ["saesteer calibrate", "'gs20'"]),
        (clamp("few", 900, 1, unit="max_act"), ".unit", "unknown_max_act", ["feature 900 of 'few' is not known"]),
        (clamp("gs15", 1, 1, scope={"prompt": True, "skip_first": P}), ".scope", "empty_scope", ["10 tokens"]),
        (clamp("gs15", 1, 1, scope={"positions": [[-1, None]], "generated": True}), ".scope", "empty_scope", []),
    ],
    ids=[
        "dictionary",
        "feature",
        "feature-not-held",
        "max_act",
        "max_act-of-one",
        "scope-skips-all",
        "scope-meets-nothing",
    ],
)
def test_refusals(edit: Clamp, field: str, code: str, words: list[str]) -> None:
    found = refusal(clamp("gs15", 7, 1), edit)
    assert found[:2] == (f"saesteer.edits[1]{field}", code)
    for word in words:
        assert word in found[2]


def test_dictionaries_at_sites_without_an_op_are_refused() -> None:
    for info in (Info("resid_post.3"), Info(None), Info("resid_post.15", site_in="resid_mid.15")):
        field, code, message = refusal(clamp("x", 1, 1), catalog=Catalog({"x": info}, CATALOG.sites, 64))
        assert (field, code) == ("saesteer.edits[0].dictionary", "not_served")
        assert "where this server has no op" in message
    assert planned(clamp("x", 1, 1), catalog=Catalog({"x": Info("resid_post.3", "resid_pre.4")}, None, 64))


@settings(max_examples=150, deadline=None)
@given(specs)
def test_specs_of_every_kind_make_no_other_error_than_a_refusal(spec: Spec) -> None:
    """With names that the server has, so that all of the plan is reached."""
    with suppress(SpecError):
        plan(spec, OPEN, P)


def test_the_limit_counts_features_times_windows() -> None:
    catalog = Catalog(INFOS, None, 4)
    two = {"positions": [[1, 2], [4, 5]]}
    band = [clamp("gs15", 3, 1, "min"), clamp("gs15", 3, 2, "max")]
    assert planned(clamp("gs15", 1, 1, scope=two), clamp("gs20", 1, 1), *band, catalog=catalog)
    field, code, message = refusal(
        clamp("gs15", 1, 1, scope=two), clamp("gs20", 1, 1, scope=two), *band, catalog=catalog
    )
    assert (field, code) == ("saesteer.edits", "too_many")
    for word in ("makes more than 4 entries with edits[2]", "at most 4", "--max-edits"):
        assert word in message


def test_a_default_scope_is_that_of_edits_that_name_none() -> None:
    told = SaesteerConfig.from_json({"default_scope": {"response": True, "prompt": None}}).to_json()
    found = Assets.open(SaesteerConfig.from_json(json.loads(json.dumps(told)))).catalog(width=8, layers=4).scope
    assert found == Scope(response=True)
    modules = {"m": Spec((clamp("gs15", 4, 1.0),))}
    catalog = replace(CATALOG, scope=found, modules=modules)
    named = [clamp("gs15", n, 1.0, scope=scope) for n, scope in ((5, {"prompt": True}), (6, {"positions": [[0, 3]]}))]
    watch = flag({"dictionary": "gs15", "feature": 7, "above": 1.0}, scope={})
    planned = plan(Spec((use("m"), clamp("gs15", 1, 1.0), clamp("gs15", 2, 1.0), *named, watch)), catalog, 10)
    windows = {
        getattr(change.target, "feature", None): change.windows for group in planned.groups for change in group.changes
    }
    assert windows == {**dict.fromkeys((4, 1, 2), ((9, END),)), 5: ((1, 10),), 6: ((0, 3),)}
    assert planned.rules[0].windows[0][1] == END and planned.relative
    with pytest.raises(ConfigError, match=r"default_scope.messages: names messages"):
        SaesteerConfig.from_json({"default_scope": {"messages": "user"}})
