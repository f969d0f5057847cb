"""Rules: how they are refused, what of them is planned, and that they fire where a plain loop over positions says."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.language.spec import Scope, clamp, flag, from_json, stop
from saesteer.planning.plan import END, MOST_RULES, Direction, Plan, Readout, Rule
from saesteer.planning.planner import plan
from saesteer.planning.readouts import first_recomputed
from saesteer.planning.rules import Fired, Watch
from saesteer.planning.runs import contents, runs
from tests.spec.plans import P, refusal_of
from tests.spec.reads import CATALOG, GENERATED

AT = "saesteer.edits[0]"
RISK = {"probe": "one", "above": 0.5}
FEATURE = {"dictionary": "gs20", "feature": 7, "above": 1.0, "below": 2.0}
INF = float("inf")


def planned(*edits: Any, catalog: Any = CATALOG, **more: Any) -> Plan:
    return plan(from_json({"edits": list(edits), **more}), catalog, P)


def refusal(*edits: Any, **more: Any) -> tuple[str, str, str]:
    return refusal_of(lambda: planned(*edits, **more))


@pytest.mark.parametrize(
    ("field", "code", "fields"),
    [
        (".when", "missing_field", {}),
        (".when", "missing_field", {"when": []}),
        (".when", "wrong_type", {"when": None}),
        (".when[1].above", "missing_field", {"when": [RISK, {"probe": "one"}]}),
        (".when.site", "conflict", {"when": {**FEATURE, "site": "resid_post.20"}}),
        (".when.site", "unknown_name", {"when": {**RISK, "site": "resid_past.20"}}),
        (".for", "out_of_range", {"when": RISK, "for": 0}),
        (".for", "wrong_type", {"when": RISK, "for": True}),
        (".value", "unknown_field", {"when": RISK, "value": 1}),
        (".scope", "empty_scope", {"when": RISK, "scope": {"prompt": False, "generated": False}}),
    ],
)
@pytest.mark.parametrize("op", ["stop", "flag"])
def test_what_is_wrong_by_itself(op: str, field: str, code: str, fields: Any) -> None:
    assert refusal({"op": op, **fields})[:2] == (AT + field, code)


@pytest.mark.parametrize(
    ("field", "code", "when"),
    [
        (".when.probe", "unknown_name", {"probe": "ones", "above": 0}),
        (".when.site", "missing_field", {"probe": "any", "above": 0}),
        (".when.site", "missing_field", {"probe": "each", "above": 0}),
        (".when.site", "out_of_range", {"probe": "one", "above": 0, "site": "resid_post.20"}),
        (".when[1].dictionary", "unknown_name", [RISK, {"dictionary": "gs", "feature": 1, "above": 0}]),
        (".when.feature", "out_of_range", {"dictionary": "gs15", "feature": 100, "above": 0}),
        (".when.layer", "missing_field", {"dictionary": "set", "feature": 1, "above": 0}),
        (".when.feature", "out_of_range", {"dictionary": "rows", "feature": 100, "above": 0}),
        (".when.dictionary", "not_served", {"dictionary": "unkept", "feature": 1, "above": 0}),
        (".when.probe", "not_served", {"probe": "early", "above": 0}),
    ],
)
def test_what_this_server_refuses(field: str, code: str, when: Any) -> None:
    assert refusal({"op": "stop", "when": when})[:2] == (AT + field, code)


def test_what_a_rule_becomes() -> None:
    """Something to read that no answer shows, and no change of any tensor."""
    found = planned(
        stop([RISK, FEATURE], 3),
        clamp("gs15", 1, 2.0),
        flag({**RISK, "above": 2.0}),
        flag({"probe": "any", "site": "resid_mid.15", "below": 0}, scope={"prompt": True}),
        **{"return": {"probes": ["one"]}},
    )
    assert len(found.readouts) == 1 and all(one.recompute and not one.after for one in found.measures)
    probe, feature, other = found.measures
    assert probe == Readout(
        "probe",
        f"{AT}.when[0]",
        "resid_post.15",
        "resid_post.15",
        False,
        GENERATED,
        probe=Direction("one", 15),
    )
    assert (feature.kind, feature.dictionary, feature.features, feature.top_k) == ("features", "gs20", (7,), 0)
    assert (other.site, other.windows) == ("resid_mid.15", ((1, P),))
    assert found.rules == (
        Rule("stop", AT, GENERATED, ((0, 0.5, INF), (1, 1.0, 2.0)), 3),
        Rule("flag", "saesteer.edits[2]", GENERATED, ((0, 2.0, INF),), 1),
        Rule("flag", "saesteer.edits[3]", ((1, P),), ((2, -INF, 0.0),), 1),
    )
    assert len(found.groups) == 1 and found.relative
    assert first_recomputed(found.measures, P) == 1, "from the first watched position of the prompt on"
    assert first_recomputed(planned(stop(RISK)).measures, P) is None, "prompts stay cached"


def test_rules_are_in_no_key_of_the_cache() -> None:
    edits = [clamp("gs15", 1, 2.0)]
    keys = []
    for more in ([], [stop(RISK, scope={})], [flag(FEATURE), stop(RISK)]):
        found = planned(*more, *edits)
        keys.append(runs(found, contents(found, CATALOG)))
    assert keys[0] and keys[0] == keys[1] == keys[2]
    assert not planned(stop(RISK)), "a plan with nothing but rules edits nothing"


@pytest.mark.parametrize("inside", [[stop(RISK)], [], [{"op": "use", "module": "empty"}]])
@pytest.mark.parametrize("scale", [{"probe": "ones"}, {"probe": "one"}, {"dictionary": "gs15", "feature": 1 << 30}])
def test_a_scale_that_is_read_for_nothing_is_refused(inside: list[Any], scale: Any) -> None:
    """Nobody would look for its probe or feature, which may not exist."""
    modules = {"watch": from_json({"edits": inside}), "empty": from_json({"edits": []})}
    catalog = replace(CATALOG, modules=modules)
    field, code, message = refusal({"op": "use", "module": "watch", "scale": scale}, catalog=catalog)
    assert (field, code) == (f"{AT}.scale", "conflict")
    assert "is read, and module 'watch' has no edit that it would scale" in message


def test_rules_of_modules() -> None:
    """Their paths say where they stand; scales and the defaults of a request do not matter to them."""
    modules = {"watch": from_json({"edits": [stop(RISK), clamp("gs15", 1, 2.0)]})}
    catalog = replace(CATALOG, modules=modules, default="watch")
    found = planned({"op": "use", "module": "watch", "scale": 0.5}, catalog=catalog)
    assert [one.field for one in found.rules] == ["saesteer.defaults.edits[0]", f"{AT}.module.edits[0]"]
    assert len(found.measures) == 1, "they watch the same"
    assert planned(catalog=catalog, defaults=False).rules == ()


@pytest.mark.parametrize("part", ["reasoning", "answer"])
def test_parts_of_the_answer(part: str) -> None:
    """All generated tokens are taken; where the border is, is known later."""
    catalog, scope = replace(CATALOG, parts=True), {"part": part}
    wanted = {"probes": [{"probe": "one", "scope": scope}], "hidden": {"scope": {**scope, "skip_first": 12}}}
    found = planned(stop(RISK, 2, scope), catalog=catalog, **{"return": wanted})
    assert [(one.windows, one.part) for one in found.readouts] == [(GENERATED, part), (((12, END),), part)]
    assert [one.windows for one in found.measures] == [GENERATED]
    assert [(one.windows, one.part) for one in found.rules] == [(GENERATED, part)]
    assert found.relative


@pytest.mark.parametrize(
    ("field", "code", "edit"),
    [
        (".scope.part", "unknown_name", stop(RISK).to_json() | {"scope": {"part": "thinking"}}),
        (".scope.part", "conflict", stop(RISK).to_json() | {"scope": {"part": "answer", "prompt": True}}),
        (".scope.part", "conflict", stop(RISK).to_json() | {"scope": {"part": "answer", "generated": False}}),
        (".scope.part", "conflict", stop(RISK).to_json() | {"scope": {"part": "answer", "messages": "user"}}),
        (".scope.part", "not_served", stop(RISK, scope={"part": "answer"})),
        (".scope.part", "not_served", clamp("gs15", 1, 2.0, scope={"part": "answer"})),
    ],
)
def test_parts_that_are_refused(field: str, code: str, edit: Any) -> None:
    assert refusal(edit)[:2] == (AT + field, code)


def test_parts_that_are_read_need_a_parser() -> None:
    probe = {"probe": "one", "scope": {"part": "answer"}}
    field, code, message = refusal(**{"return": {"probes": [probe]}})
    assert (field, code) == ("saesteer.return.probes[0].scope.part", "not_served")
    assert "--reasoning-parser" in message


@pytest.mark.parametrize("part", ["reasoning", "answer"])
def test_edits_of_a_part(part: Any) -> None:
    """All generated tokens are their windows, and the part is in the key of their runs."""
    catalog = replace(CATALOG, parts=True)
    edits = [clamp("gs15", 1, 2.0, scope={"part": part}), clamp("gs15", 2, 2.0, scope={"part": part, "skip_first": 12})]
    found = planned(*edits, catalog=catalog)
    changes = [one for group in found.groups for one in group.changes]
    assert [(one.windows, one.part) for one in changes] == [(GENERATED, part), (((12, END),), part)]
    assert found.relative
    plain = planned(*(replace(one, scope=Scope(generated=True)) for one in edits), catalog=catalog)
    other = planned(*(replace(one, scope=Scope(part="answer")) for one in edits), catalog=catalog)
    ((start, end, key),) = runs(plain, contents(plain, catalog))
    mine = runs(found, contents(found, catalog))
    assert (start, end) == (P, END) and [one[:2] for one in mine] == [(P, 12), (12, END)]
    assert key not in {one[2] for one in mine}
    ((*_, last),) = runs(other, contents(other, catalog))
    assert (mine[-1][2] == last) == (part == "answer")


PARTS = [{"part": "reasoning"}, {"part": "answer"}, {"generated": True}]


@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("second", PARTS)
def test_a_feature_is_clamped_once_in_each_part(first: Any, second: Any) -> None:
    catalog = replace(CATALOG, parts=True)
    edits = [clamp("gs15", 1, value, scope=scope) for value, scope in ((2.0, first), (3.0, second))]
    if "part" in first and "part" in second and first != second:
        assert len(planned(*edits, catalog=catalog).groups[0].changes) == 2
    else:
        assert refusal(*edits, catalog=catalog)[:2] == ("saesteer.edits[1].feature", "duplicate")


def test_halves_of_a_band_are_of_one_part() -> None:
    catalog = replace(CATALOG, parts=True)

    def halves(low: Any, high: Any) -> Any:
        edits = [clamp("gs15", 1, 1.0, mode="min", scope=low), clamp("gs15", 1, 2.0, mode="max", scope=high)]
        return planned(*edits, catalog=catalog).groups[0].changes

    (band,) = halves(PARTS[1], PARTS[1])
    assert (band.low, band.high, band.part) == (1.0, 2.0, "answer")
    first, second = halves(*PARTS[:2])
    assert (first.low, first.high, first.part) == (1.0, INF, "reasoning")
    assert (second.low, second.high, second.part) == (-INF, 2.0, "answer")


def test_how_much_rules_may_watch() -> None:
    each = [{"dictionary": "gs15", "feature": n, "above": 0} for n in range(MOST_RULES)]
    edits = [flag(each[n : n + 2]) for n in range(0, MOST_RULES, 2)]
    assert len(planned(*edits, *edits).measures) == MOST_RULES
    field, code, message = refusal(*edits, flag([each[0], RISK]))
    assert (field, code) == (f"saesteer.edits[{len(edits)}].when[1]", "too_many")
    assert f"is condition {MOST_RULES + 1}" in message and f"at most {MOST_RULES}" in message
    field, code, message = refusal(*edits, *edits, flag(each[0]))
    assert (field, code) == (f"saesteer.edits[{MOST_RULES}]", "too_many")
    assert f"is rule {MOST_RULES + 1}" in message and f"at most {MOST_RULES}" in message


windows = st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True).map(
    lambda bounds: tuple(zip(sorted(bounds)[::2], sorted(bounds)[1::2], strict=False))
)


Case = tuple[list[Rule], dict[int, list[float]]]


@st.composite
def watching(draw: st.DrawFn) -> Case:
    """Rules over a few measures, of which each has the windows of its rule; and each measure's value anywhere."""
    rules: list[Rule] = []
    values: dict[int, list[float]] = {}
    for number in range(draw(st.integers(1, 4))):
        spans = draw(windows)
        if draw(st.booleans()):
            spans = (*spans[:-1], (spans[-1][0], END))
        several = range(2 * number, 2 * number + draw(st.integers(1, 2)))
        bounds = tuple((n, *draw(st.sampled_from([(0.5, INF), (-INF, 0.5), (-0.5, 0.5)]))) for n in several)
        op: Any = draw(st.sampled_from(["stop", "flag", "flag"]))
        part: Any = draw(st.sampled_from([None, None, "reasoning", "answer"]))
        rules.append(Rule(op, f"saesteer.edits[{number}]", spans, bounds, draw(st.integers(1, 4)), part))
        for n in several:
            values[n] = draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 0.5]), min_size=40, max_size=40))
    return rules, values


def plain(rules: Sequence[Rule], values: dict[int, list[float]], tokens: int, border: int) -> list[Fired]:
    """What fires in the first so many positions, one after another."""
    lengths = [0] * len(rules)
    found: list[Fired] = []
    for position in range(tokens):
        stopped = None
        for number, rule in enumerate(rules):
            inside = any(lo <= position < hi for lo, hi in rule.windows)
            inside &= {None: True, "reasoning": position <= border, "answer": position > border}[rule.part]
            holds = inside and all(above < values[n][position] < below for n, above, below in rule.bounds)
            lengths[number] = lengths[number] + 1 if holds else 0
            if lengths[number] == rule.run and rule.field not in {one.field for one in found}:
                one = Fired(rule.op, rule.field, position)
                if rule.op == "flag":
                    found.append(one)
                else:
                    stopped = stopped or one
        if stopped:
            return [*found, stopped]
    return found


@given(watching(), st.data())
def test_rules_fire_where_a_plain_loop_says(
    case: tuple[list[Rule], dict[int, list[float]]], data: st.DataObject
) -> None:
    """However the positions come: in parts, again behind a preemption, with a last token that is sampled again."""
    rules, values = case
    tokens, border = data.draw(st.integers(0, 40), label="tokens"), data.draw(st.integers(0, 40), label="border")
    watch, at = Watch(rules), 0
    found: list[Fired] = []
    while at < tokens and not any(one.op == "stop" for one in found):
        if data.draw(st.integers(0, 3), label="preempted") == 0:
            at = data.draw(st.integers(0, at), label="from")
        end = data.draw(st.integers(at + 1, tokens), label="part")
        known = end - data.draw(st.booleans(), label="the last one is sampled again")
        step = {}
        for rule in rules:
            inside = [p for p in range(at, end) if any(lo <= p < hi for lo, hi in rule.windows)]
            for n, *_ in rule.bounds if inside else ():
                step[n] = inside, [values[n][p] for p in inside]
        found += watch.look(step, known, border if border < known else END)
        at = known
    assert found == plain(rules, values, tokens, border)


@pytest.mark.parametrize("first", [[5.0], [4.0, 5.0]], ids=["one position", "two"])
def test_a_position_counts_once_and_not_before_its_token_is_known(first: list[float]) -> None:
    """The second value of a position is another one: a token that was sampled anew, or other rounding."""
    [rule] = planned(stop(RISK)).rules
    number, above, _ = rule.bounds[0]
    positions = [*range(21 - len(first), 21)]
    failing = positions, [above - one for one in first]
    holding = [20], [above + 1.0]
    again, counted = Watch([rule]), Watch([rule])
    assert not again.look({number: failing}, 20) and again.look({number: holding}, 21)[0].position == 20
    assert not counted.look({number: failing}, 21) and not counted.look({number: holding}, 21)


@pytest.mark.parametrize(("holding", "fired"), [((1, 4, 6), []), ((1, 4, 5), [5])])
@pytest.mark.parametrize("cuts", [[9], [2, 9], [3, 9], [*range(1, 10)]], ids=str)
@pytest.mark.parametrize("op", [stop, flag])
def test_a_run_does_not_go_on_over_a_gap_of_the_scope(
    op: Any, cuts: list[int], holding: tuple[int, ...], fired: list[int]
) -> None:
    """The last position of one interval and the first of the next are not two in a row."""
    watch = Watch(planned(op(RISK, run=2, scope={"positions": [[0, 2], [4, 7]]}).to_json()).rules)
    found: list[Fired] = []
    for start, end in pairwise([0, *cuts]):
        inside = [p for p in range(start, end) if p < 2 or 4 <= p < 7]
        values = inside, [float(p in holding) for p in inside]
        found += watch.look({0: values} if inside else {}, end)
    assert [one.position for one in found] == fired
