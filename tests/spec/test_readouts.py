"""What reads mean at admission: sites, windows, what must be computed again, how many bytes, and each refusal."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from saesteer.errors import SpecError
from saesteer.language.edits import Scope
from saesteer.language.spec import Return, Spec, add, clamp, from_json
from saesteer.planning.messages import named, resolve
from saesteer.planning.plan import END, Direction, Readout
from saesteer.planning.planner import plan
from saesteer.planning.readouts import captures, readouts
from saesteer.planning.runs import contents, runs
from saesteer.planning.windows import windows_of_read
from tests.spec.catalogs import OPEN
from tests.spec.chats import PROMPT, ROLES, spans
from tests.spec.plans import P
from tests.spec.reads import CATALOG, GENERATED, features, planned
from tests.spec.scopes import holds, near_scopes
from tests.spec.strategies import returns


def one(**wanted: Any) -> Readout:
    [found] = planned(**wanted)
    return found


def test_features() -> None:
    found = one(features=[{"dictionary": "gs20"}])
    at = "saesteer.return.features[0]"
    assert found == Readout(
        "features", at, "resid_post.20", "resid_post.20", False, GENERATED, dictionary="gs20", top_k=8
    )
    found = one(features=[{"dictionary": "set", "layer": 15, "features": [99, 0], "at": "after", "cached": "skip"}])
    assert (found.dictionary, found.top_k, found.features) == ("set@15", 0, (99, 0))
    assert (found.after, found.recompute) == (True, False)
    assert one(features=[{"dictionary": "few", "features": [900]}]).features == (900,)


def test_where_features_are_read() -> None:
    coder, pregain = planned(features=[{"dictionary": "coder"}, {"dictionary": "pregain"}])
    assert (coder.site, coder.op) == ("mlp_in.15", "mlp_in.15")
    assert (pregain.site, pregain.op) == ("mlp_in_pregain.15", "resid_mid.15")


def test_what_comes_behind_the_edits_of_its_op_is_read_there() -> None:
    reads = {
        "features": [{"dictionary": "pregain"}, {"dictionary": "coder"}],
        "activations": [{"site": "resid_mid.15"}],
    }
    watched = [{"op": "flag", "when": {"dictionary": name, "feature": 1, "above": 0}} for name in ("pregain", "coder")]
    for site, behind in (("resid_mid.15", True), ("resid_post.15", False)):
        edits = [add("any", site), *watched]
        found = plan(from_json({"edits": edits, "return": reads}), CATALOG, P)
        assert [one.summed for one in (*found.readouts, *found.measures)] == [behind, False, False, behind, False]
    found = plan(from_json({"edits": [add("any", "attn_out.15")], "return": reads}), CATALOG, P)
    assert [one.summed for one in found.readouts] == [True, False, True]


def test_captures_have_what_is_added_to_a_part_of_the_sum_as_reads_do() -> None:
    sites_ = ("resid_mid.15", "resid_post.15", "resid_post.20")
    read = {"activations": [{"site": "resid_post.15", "scope": {"prompt": True, "generated": True}, "cached": "skip"}]}
    both = [add("any", "resid_mid.15"), add("any", "attn_out.15"), add("any", "mlp_out.15")]
    for wanted in (read, {}):
        found = plan(from_json({"edits": both, "return": wanted}), CATALOG, P)
        captured = [one for one in captures(sites_, found, CATALOG) if one.captured]
        assert [(one.site, one.summed) for one in captured] == [("resid_post.15", True), ("resid_post.20", False)]
        assert [one.shown for one in captured] == [bool(wanted), False]


def test_probes() -> None:
    first, second, third = planned(
        probes=[
            "one",
            {"probe": "any", "site": "resid_post.20", "at": "after"},
            {"probe": "each", "site": "resid_pre.16"},
        ]
    )
    assert (first.kind, first.site, first.probe) == ("probe", "resid_post.15", Direction("one", 15))
    assert (second.site, second.op, second.after) == ("resid_post.20", "resid_post.20", True)
    assert second.probe == Direction("any", None)
    assert (third.site, third.probe) == ("resid_post.15", Direction("each", 16)), "the row of the layer as written"
    assert one(probes=[{"probe": "wide", "site": "z.15"}]).site == "z.15"


def test_activations() -> None:
    found = one(activations=[{"site": "resid_pre.16", "reduce": "mean", "scope": {"prompt": True}}])
    assert (found.kind, found.site, found.op, found.windows) == (
        "activation", "resid_post.15", "resid_post.15", ((0, P),)
    )  # fmt: skip
    assert (found.reduce, found.inline, found.recompute, found.after) == ("mean", True, True, False)


def test_hidden_states() -> None:
    found = one(hidden=True)
    assert found == Readout("hidden", "saesteer.return.hidden", None, None, True, (), last=True)
    found = one(hidden={"scope": {"positions": [[-1, None]]}, "cached": "skip"})
    assert (found.last, found.windows, found.recompute) == (False, ((P - 1, P),), False)
    assert planned(hidden=False) == ()


def test_a_handle_takes_the_place_of_the_numbers() -> None:
    assert [planned(**tensor(**{"as": how}))[0].inline for how in ("inline", "handle")] == [True, False]


def probe(**more: Any) -> dict[str, Any]:
    return {"probes": [{"probe": "any", "site": "resid_post.15", **more}]}


def tensor(**more: Any) -> dict[str, Any]:
    return {"activations": [{"site": "resid_post.15", **more}]}


REFUSED: list[tuple[str, str, str, dict[str, Any], list[str]]] = [
    # id, field below saesteer.return, code, return, words of the message
    ("dictionary", "features[0].dictionary", "unknown_name", features(dictionary="gs16"), ["did you mean 'gs15'?"]),
    ("no-layer", "features[0].layer", "missing_field", features(dictionary="set"), ["one of 15, 20"]),
    ("layer", "features[0].layer", "out_of_range", features(dictionary="set", layer=16), ["got 16", "15, 20"]),
    ("other-layer", "features[0].layer", "out_of_range", features(layer=16), ["is of layer 15"]),
    ("by-rows", "features[0].dictionary", "not_served", features(dictionary="rows"),
     ["the strongest of 'rows'", "only rows of features", "by name"]),
    ("many-by-rows", "features[0].features", "too_large", features(dictionary="rows", features=[*range(65)]),
     ["got 65 features", "at most 64"]),
    ("across", "features[0].dictionary", "not_served", features(dictionary="clt", layer=5),
     ["the strongest of 'clt@5'", "by name"]),
    ("no-op-of-a-dictionary", "features[0].dictionary", "not_served", features(dictionary="away"),
     ["resid_post.3", "no op", "--sites resid_post.3"]),
    ("not-kept-of-a-dictionary", "features[0].dictionary", "not_served", features(dictionary="unkept"), ["--reads"]),
    ("feature", "features[0].features[1]", "out_of_range", features(features=[99, 100]), ["got 100", "0 to 99"]),
    ("feature-not-held", "features[0].features[0]", "out_of_range", features(dictionary="few", features=[6]),
     ["got 6", "5, 900, 40000"]),
    ("top_k", "features[0].top_k", "out_of_range", features(top_k=101), ["got 101", "at most 100", "'gs15'"]),
    ("top_k-few", "features[0].top_k", "out_of_range", features(dictionary="few", top_k=4), ["got 4", "at most 3"]),
    ("probe", "probes[0].probe", "unknown_name", probe(probe="anny"), ["'anny'", "did you mean 'any'?"]),
    ("probe-width", "probes[0].probe", "conflict", probe(probe="wide"), ["7 wide", "expected 4"]),
    ("probe-width-there", "probes[0].probe", "conflict", probe(site="z.15"), ["4 wide", "expected 7"]),
    ("probe-anywhere", "probes[0].site", "missing_field", {"probes": ["any"]}, ["one row for any site"]),
    ("probe-layers", "probes[0].site", "missing_field", {"probes": ["each"]}, ["layers 15, 16, 20"]),
    ("probe-no-row", "probes[0].site", "out_of_range", probe(probe="one", site="resid_post.20"), ["layer 20", ": 15"]),
    ("probe-no-op", "probes[0].site", "not_served", probe(site="mlp_out.15"), ["no op", "--reads mlp_out.15"]),
    ("probe-no-op-of-its-layer", "probes[0].probe", "not_served", {"probes": ["early"]}, ["--reads resid_post.3"]),
    ("probe-not-kept", "probes[0].site", "not_served", probe(site="resid_post.16"),
     ["not keep", "--reads resid_post.16"]),
    ("no-op", "activations[0].site", "not_served", tensor(site="mlp_out.15"),
     ["mlp_out.15", "no op", "--reads mlp_out.15"]),
    ("pregain", "activations[0].site", "not_served", tensor(site="mlp_in_pregain.3"),
     ["only dictionaries", "mlp_in.3"]),
    ("not-kept", "activations[0].site", "not_served", tensor(site="resid_pre.17"),
     ["not keep", "--reads resid_post.16"]),
    ("after-pregain", "features[0].at", "conflict", features(dictionary="pregain", at="after"), ["expected before"]),
    ("pregain-probe", "probes[0].site", "not_served", probe(site="mlp_in_pregain.15"), ["expected resid_mid.15"]),
    ("prompt-skipped", "features[0].scope", "empty_scope", features(scope={"prompt": True, "skip_first": P}),
     ["10 tokens"]),
    ("prompt-cut", "probes[0].scope", "empty_scope", probe(scope={"prompt": True, "positions": [[P, P + 5]]}), []),
    ("prompt-of-hidden", "hidden.scope", "empty_scope", {"hidden": {"scope": {"prompt": True, "skip_first": P}}}, []),
    ("messages", "activations[0].scope.messages", "not_served", tensor(scope={"messages": "user"}), ["only chat"]),
    ("twice", "features[1]", "duplicate", {"features": [{"dictionary": "gs15"}, {"dictionary": "gs15", "layer": 15}]},
     ["saesteer.return.features[0] reads"]),
    ("probe-twice", "probes[1]", "duplicate", {"probes": ["one", {"probe": "one", "site": "resid_post.15"}]}, []),
    ("means-of-messages", "activations[0].reduce", "not_served", tensor(reduce="message"), ["expected mean"]),
    ("parameter", "consumers.logging.tag", "unknown_field", probe() | {"consumers": {"logging": {"tag": 1}}}, []),
    ("consumers-of-nothing", "consumers", "conflict", {"consumers": {"logging": {}}}, ["reads nothing"]),
    ("consumer", "consumers.loging", "unknown_name", {"consumers": {"loging": {}}},
     ["did you mean 'logging'", "--consumer"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "code", "wanted", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refusals(field: str, code: str, wanted: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        planned(**wanted)
    assert (caught.value.field, caught.value.code) == (f"saesteer.return.{field}", code)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 500


@settings(max_examples=300, deadline=None)
@given(near_scopes, st.integers(1, 40))
def test_reads_hold_what_edits_hold_and_position_0(scope: Scope, prompt_len: int) -> None:
    """Against the fine print of scopes, in which a scope that names every position leaves none alone."""
    fine = scope if scope.positions else replace(scope, positions=((0, None),))
    found = windows_of_read(scope, prompt_len)
    assert [p for p in range(60) if any(lo <= p < hi for lo, hi in found)] == [
        p for p in range(60) if holds(fine, p, prompt_len, 3)
    ]


def test_dictionaries_leave_no_position_alone() -> None:
    """The norm of position 0 is an outlier, which is a reason to leave it alone and none to hide it."""
    assert one(features=[{"dictionary": "gs20", "scope": {}}]).windows == ((0, END),)
    assert one(features=[{"dictionary": "gs20", "scope": {"skip_first": 2, "prompt": True}}]).windows == ((2, P),)


def test_plans_of_reads_count_from_the_prompt_where_a_scope_does() -> None:
    def relative(**wanted: Any) -> bool:
        return plan(from_json({"return": wanted}), CATALOG, P).relative

    assert relative(**features()) and relative(**probe()) and relative(hidden={"scope": {"positions": [[-1, None]]}})
    assert (
        not relative(**tensor())
        and not relative(**features(scope={"positions": [[0, 3]]}))
        and not relative(hidden=True)
    )
    edit = clamp("gs15", 1, 1.0, scope={"generated": True})
    assert plan(Spec((edit,), from_json({"return": tensor()}).returns), CATALOG, P).relative


def everything(**scope: Any) -> Return:
    found: Return = from_json(
        {"return": {**features(scope=scope), **probe(scope=scope), **tensor(scope=scope), "hidden": {"scope": scope}}}
    ).returns
    return found


def test_reads_are_in_no_key_and_edit_nothing() -> None:
    edits = (clamp("gs15", 1, 8.0), clamp("gs20", 2, 1.0, scope={"generated": True}))
    reading, alone = (plan(Spec(edits, returns), CATALOG, P) for returns in (everything(), Return()))
    assert len(reading.readouts) == 4 and replace(reading, readouts=()) == alone
    for digests in [contents(alone, CATALOG)]:
        assert contents(reading, CATALOG) == digests
        assert runs(reading, digests) == runs(alone, digests) != ()
    only = plan(Spec(returns=everything()), CATALOG, P)
    assert only.readouts and not only
    assert runs(only, contents(only, CATALOG)) == ()


def test_messages_become_positions() -> None:
    spec = Spec((clamp("gs15", 1, 1.0, scope={"messages": "user"}),), everything(messages=["system", -1]))
    found = resolve(spec, CATALOG, PROMPT, ROLES, spans)
    assert named(spec) and named(Spec(returns=spec.returns)) and not named(found)
    assert {scope.positions for _, scope in found.returns.scopes()} == {((0, 8), (21, 28))}, "position 0 is one of them"
    assert [scope.positions for scope in (found.edits[0].scope,)] == [((8, 14), (21, 28))]
    skipped = resolve(Spec(returns=everything(messages="system", skip_first=3)), CATALOG, PROMPT, ROLES, spans)
    assert {scope.positions for _, scope in skipped.returns.scopes()} == {((3, 8),)}
    other = Spec(returns=everything(generated=True))
    assert resolve(other, CATALOG, PROMPT, ROLES, spans) == other


@pytest.mark.parametrize(
    ("scope", "field", "code"),
    [
        ({"messages": ["user", "usr"]}, "scope.messages[1]", "unknown_name"),
        ({"messages": [4]}, "scope.messages[0]", "out_of_range"),
        ({"messages": "system", "skip_first": 8}, "scope", "empty_scope"),
    ],
)
def test_messages_that_are_not_there(scope: dict[str, Any], field: str, code: str) -> None:
    spec = from_json({"return": probe(scope=scope)})
    with pytest.raises(SpecError) as caught:
        resolve(spec, CATALOG, PROMPT, ROLES, spans)
    assert (caught.value.field, caught.value.code) == (f"saesteer.return.probes[0].{field}", code)


def told(wanted: Return, prompt_len: int) -> tuple[tuple[Readout, ...], SpecError | None]:
    try:
        return readouts(wanted, OPEN, prompt_len), None
    except SpecError as error:
        return (), error


@settings(max_examples=200, deadline=None)
@given(returns, st.integers(1, 40))
def test_reads_of_every_kind_are_planned_or_refused_by_name(wanted: Return, prompt_len: int) -> None:
    """With names that the server has, so that all of the planning is reached."""
    found, error = told(wanted, prompt_len)
    if error is not None:
        assert error.field.startswith("saesteer.return.")
        return
    assume(found)
    fields = [f"saesteer.return.{path}" for path, _ in wanted.scopes()]
    several = [*dict.fromkeys(one.field for one in found)]  # a read of several sites has one for each
    assert several == fields + ["saesteer.return.hidden"] * (wanted.hidden is True)
    for readout in found:
        assert readout.last or readout.windows
