"""Edits of every kind at admission: their groups, places, conditions and modules, and each way they are refused."""

from dataclasses import replace
from typing import Any

import pytest

from saesteer.language.spec import ablate, add, cap, clamp, from_json, reconstruct, use
from saesteer.planning.plan import END, MOST_CONDITIONS, Catalog, Change, Direction, Plan, Whole
from saesteer.planning.planner import plan
from tests.spec.catalogs import Set
from tests.spec.kinds import INFOS, SITES, VECTORS
from tests.spec.plans import refusal_of

P = 10
ALL = ((1, END),)
MODULES: dict[str, Any] = {
    "calm": [ablate("any", "resid_post.15")],
    "deep": [use("calm", 2.0), clamp("gs15", 1, 1.0)],
    "wrong": [clamp("gs15", 1, 1.0), clamp("gs15", 100, 1.0)],
    "self": [use("self")],
    "ring": [use("gnir")],
    "gnir": [use("calm"), use("ring")],
    "empty": [],
    "mid": [ablate("any", "resid_mid.16")],
    "loud": [use("calm", 1e30)],
    **{f"m{n}": [use(f"m{n - 1}"), use(f"m{n - 1}")] if n else [] for n in range(40)},
}
CATALOG = Catalog(
    INFOS, SITES, 200, VECTORS, {name: from_json({"edits": edits}) for name, edits in MODULES.items()}, 4, 2
)


def planned(*edits: Any, catalog: Catalog = CATALOG) -> Plan:
    return plan(from_json({"edits": list(edits)}), catalog, P)


def refusal(*edits: Any, catalog: Catalog = CATALOG) -> tuple[str, str, str]:
    return refusal_of(lambda: planned(*edits, catalog=catalog))


def test_what_each_kind_becomes() -> None:
    any_ = Direction("any", None)
    at = "saesteer.edits[0]"
    for edit, change in [
        (add("any", "resid_post.15", 4.0), Change(any_, ALL, at, shift=4.0, unit="vector")),
        (add("any", "resid_post.15", 4.0, "match"), Change(any_, ALL, at, shift=4.0, unit="stream")),
        (cap("any", "resid_post.15", max=3.0, strength=0.5), Change(any_, ALL, at, high=3.0, gain=0.5)),
        (cap("any", "resid_post.15", 3.0, 1.0), Change(any_, ALL, at, low=1.0, high=3.0)),
        (ablate("any", "resid_post.15", 2.0), Change(any_, ALL, at, scale=0.0, gain=2.0)),
        (reconstruct("gs15"), Change(Whole("gs15"), ALL, at)),
    ]:
        (group,) = planned(edit).groups
        assert group.changes == (change,)


def sizes(*edits: Any) -> list[int]:
    return [len(group.changes) for group in planned(*edits).groups]


def places(*edits: Any) -> list[tuple[str, int | None]]:
    return [
        (group.site, change.target.layer)
        for group in planned(*edits).groups
        for change in group.changes
        if isinstance(change.target, Direction)
    ]


def test_sites_of_vectors() -> None:
    assert places(add("each", "resid_post")) == [("resid_post.15", 15), ("resid_post.16", 16), ("resid_post.20", 20)]
    assert places(add("each", ["resid_post.15", "resid_mid.16"])) == [("resid_post.15", 15), ("resid_mid.16", 16)]
    assert places(add("each", "resid_pre.16")) == [("resid_post.15", 16)], "the row is that of the layer as written"
    assert places(add("any", ["resid_post.15", "resid_post.16"])) == [("resid_post.15", None), ("resid_post.16", None)]
    inline = {"dtype": "float32", "shape": [2, 4], "data": b"\x01" * 32, "layers": [20, 15]}
    assert places(add(inline, "resid_post")) == [("resid_post.20", 20), ("resid_post.15", 15)]


def test_rows_for_layers_that_the_model_does_not_have() -> None:
    inline = {"dtype": "float32", "shape": [2, 4], "data": b"\x01" * 32, "layers": [20, 15]}
    assert planned(add(inline, "resid_post.15"), catalog=replace(CATALOG, layers=21))
    field, code, message = refusal(add(inline, "resid_post.15"), catalog=replace(CATALOG, layers=20))
    assert (field, code) == ("saesteer.edits[0].vector.layers[0]", "out_of_range")
    assert message.endswith("got 20, expected layers of this model, 0 to 19")
    message = refusal(add("any", "resid_post.40"), catalog=replace(CATALOG, layers=20))[2]
    assert message.endswith("; this model has layers 0 to 19") and "start it with" not in message


def gated(when: Any, site: str = "resid_post.15") -> Any:
    return ablate("any", site, when=when)


FEATURE = {"dictionary": "gs15", "feature": 3, "above": 1.0}


def test_a_probe_of_several_layers_is_read_with_the_row_of_the_layer_as_written() -> None:
    gate, strength = {"probe": "each", "above": 1.0}, {"probe": "each"}
    for site, row in (("resid_pre.16", 16), ("resid_post.15", 15)):
        for edit in (gated(gate, site), cap("any", site, 1.0, when=gate), add("any", site, strength, when=gate)):
            assert {(one.site, one.target) for one in planned(edit).inputs} == {
                ("resid_post.15", Direction("each", row))
            }
    for name, row in (("pre16", 16), ("gs15", 15)):
        found = planned(clamp(name, 1, strength, "add", when=gate))
        assert [one.target for one in found.inputs] == [Direction("each", row)] * 2
        for edits in ([reconstruct(name, when=gate)], [clamp(name, 1, 1.0, when=gate), reconstruct(name, when=gate)]):
            assert [one.target for one in planned(*edits).conditions] == [Direction("each", row)]
    everywhere = Catalog(INFOS, None, 200, VECTORS)
    found = planned(add("each", "resid_pre", strength, when=gate), catalog=everywhere)
    rows = [(f"resid_post.{layer - 1}", Direction("each", layer)) for layer in (15, 16, 20)]
    assert [(one.site, one.target) for one in found.conditions] == rows
    assert [(one.site, one.target) for one in found.reads] == rows


def test_a_bit_is_given_again_behind_its_last_edit() -> None:
    many = [gated({**FEATURE, "feature": n}) for n in range(20)]
    later = [gated({"dictionary": "gs20", "feature": n, "above": 0.0}, "resid_post.20") for n in range(20)]
    found = planned(*many, *later)
    assert len(found.conditions) == 40
    assert all(0 < one.bit < 1 << MOST_CONDITIONS for one in found.conditions)
    kept = [gated({**FEATURE, "feature": n}, "resid_post.20") for n in range(20)]
    field, code, message = refusal(*many, *kept, *later)
    assert code == "too_many" and field.startswith("saesteer.edits[") and "31" in message


@pytest.mark.parametrize(
    ("name", "site", "place", "layer"),
    [
        ("any", "resid_mid.16", "resid_mid.16", None),
        ("each", "resid_mid.16", "resid_mid.16", 16),
        ("one", "resid_post.20", "resid_post.15", 15),
    ],
)
def test_where_a_probe_reads(name: str, site: str, place: str, layer: int | None) -> None:
    (condition,) = planned(gated({"probe": name, "below": 2.0}, site)).conditions
    assert (condition.site, condition.target) == (place, Direction(name, layer))


def test_a_vector_that_its_file_holds_to_a_kind_of_site_is_for_no_other() -> None:
    held = {"post": Set((15, 16), kind="resid_post"), "mlp": Set((16,), kind="mlp_out")}
    everywhere = Catalog(INFOS, None, 200, VECTORS | held)
    found = planned(add("post", "resid_pre.16", {"probe": "post"}), catalog=everywhere)
    assert {(one.site, one.target) for one in found.inputs} == {("resid_post.15", Direction("post", 15))}
    for site, place in (("mlp_out.16", "mlp_out.16"), ("resid_post.20", "mlp_out.16")):
        (condition,) = planned(gated({"probe": "mlp", "below": 2.0}, site), catalog=everywhere).conditions
        assert (condition.site, condition.target) == (place, Direction("mlp", 16))
    field, code, message = refusal(add("mlp", "resid_post.16"), catalog=everywhere)
    assert (field, code) == ("saesteer.edits[0].site", "conflict") and "for mlp_out, expected that" in message


def test_reconstruct_takes_the_clamps_before_it() -> None:
    one, two, whole = clamp("gs15", 1, 1), clamp("gs15", 2, 1), reconstruct("gs15")
    assert sizes(one, two, whole) == [3]
    assert sizes(one, clamp("gs20", 1, 1), two, whole, ablate("any", "resid_post.15")) == [3, 1, 1]
    assert sizes(one, reconstruct("gs15", "keep"), two) == [1, 1], "what follows reads the reconstruction"
    assert sizes(reconstruct("gs15"), clamp("gs15", 1, 1)) == [1, 1]


WIDE = {"dtype": "float32", "shape": [5], "data": b"\x01" * 20}
SCOPE = {"generated": True}

REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "vector": ([add("anny", "resid_post.15")], "edits[0].vector", "unknown_name"),
    "vector-width": ([add([1.0, 2.0], "resid_post.15")], "edits[0].vector", "conflict"),
    "vector-shape": ([add(WIDE, "resid_post.15")], "edits[0].vector.shape", "conflict"),
    "no-row": ([add("each", "resid_post.14")], "edits[0].site", "out_of_range"),
    "no-row-in-list": ([add("each", ["resid_post.15", "resid_post.14"])], "edits[0].site[1]", "out_of_range"),
    "no-op": ([add("any", "resid_post.3")], "edits[0].site", "not_served"),
    "no-op-in-list": ([cap("any", ["resid_post.15", "mlp_out.3"], 1)], "edits[0].site[1]", "not_served"),
    "no-op-at-a-layer": ([ablate("each", "resid_mid")], "edits[0].site", "not_served"),
    "kind-alone": ([add("any", "resid_post")], "edits[0].site", "conflict"),
    "scope": ([add("any", "resid_post.15", scope={"positions": [[0, 1]], "skip_first": 1})], "edits[0].scope",
              "empty_scope"),
    "own-vectors": ([add([1, 0, 0, n], "resid_post.15") for n in range(3)], "edits[2].vector", "too_many"),
    "gate-dictionary": ([gated({**FEATURE, "dictionary": "x"})], "edits[0].when.dictionary", "unknown_name"),
    "gate-feature": ([gated([FEATURE, {**FEATURE, "feature": 100}])], "edits[0].when[1].feature", "out_of_range"),
    "gate-probe": ([gated({"probe": "x", "above": 1})], "edits[0].when.probe", "unknown_name"),
    "gate-later": ([clamp("mid16", 1, 1, when={"dictionary": "gs20", "feature": 1, "above": 1})],
                   "edits[0].when.dictionary", "conflict"),
    "gate-later-probe": ([ablate("any", "resid_pre.0", when={"probe": "one", "above": 1})],
                         "edits[0].when.probe", "conflict"),
    "gate-many-rows": ([gated({"probe": "each", "above": 1}, "resid_post.14")], "edits[0].when.probe", "conflict"),
    "gate-no-op": ([gated({"probe": "early", "above": 1})], "edits[0].when.probe", "not_served"),
    "keep-alone": ([reconstruct("gs15", "keep")], "edits[0].error", "conflict"),
    "keep-others": ([clamp("other15", 1, 1), reconstruct("gs15", "keep")], "edits[1].error", "conflict"),
    "keep-behind-use": ([clamp("gs15", 1, 1), use("empty"), reconstruct("gs15", "keep")], "edits[2].error", "conflict"),
    "scopes": ([clamp("gs15", 1, 1, scope=SCOPE), reconstruct("gs15")], "edits[1].scope", "conflict"),
    "whens": ([clamp("gs15", 1, 1), reconstruct("gs15", when=FEATURE)], "edits[1].when", "conflict"),
    "partial": ([reconstruct("part15")], "edits[0].dictionary", "not_served"),
    "groupmax": ([reconstruct("group15")], "edits[0].dictionary", "not_served"),
    "rank-behind": ([ablate("any", "resid_post.15"), clamp("top15", 1, 1)], "edits[1].dictionary", "not_served"),
    "whole-behind": ([clamp("top15", 1, 1), reconstruct("gs15")], "edits[1].dictionary", "not_served"),
    "two-whole": ([reconstruct("gs15"), reconstruct("gs15")], "edits[1].dictionary", "not_served"),
    "two-ranked": ([clamp("top15", 1, 1, when={**FEATURE, "dictionary": "group15"})], "edits[0].dictionary",
                   "not_served"),
    "gate-whens-differ": ([clamp("gs15", 1, 1, when=FEATURE), clamp("gs15", 1, 2)], "edits[1].feature", "duplicate"),
    "module": ([use("clam")], "edits[0].module", "unknown_name"),
    "module-inside": ([use("wrong")], "edits[0].module.edits[1].feature", "out_of_range"),
    "self": ([use("self")], "edits[0].module.edits[0].module", "conflict"),
    "ring": ([use("ring")], "edits[0].module.edits[0].module.edits[1].module", "conflict"),
    "scale": ([use("loud", 1e30)], "edits[0].module.edits[0].scale", "out_of_range"),
}  # fmt: skip


@pytest.mark.parametrize(("edits", "field", "code"), REFUSED.values(), ids=REFUSED)
def test_refusals(edits: list[Any], field: str, code: str) -> None:
    found = refusal(*edits)
    assert found[:2] == (f"saesteer.{field}", code)
    assert len(found[2]) < 500


def test_edits_by_the_norm_behind_resid_mid_do_not_stand_beside_edits_of_resid_mid() -> None:
    """Its op reads the norm of the stream as it arrives there, which is no longer what the MLP reads."""
    source = {"dictionary": "norm16", "feature": 3}
    for edit, path in [
        (clamp("norm16", 1, 1.0), ""),
        (reconstruct("norm16"), ""),
        (ablate("any", "resid_post.20", when={**source, "above": 1.0}), ".when"),
        (add("any", "resid_post.16", source), ".scale"),
    ]:
        assert planned(edit, ablate("any", "resid_post.15")).groups
        for place, edits in enumerate([(edit, ablate("any", "resid_mid.16")), (use("mid"), edit)]):
            other = ("saesteer.edits[1]", "saesteer.edits[0].module.edits[0]")[place]
            field, code, message = refusal(*edits)
            assert (field, code) == (f"saesteer.edits[{place}]{path}.dictionary", "not_served")
            assert "reads mlp_in_pregain.16 with 'norm16'" in message and f"resid_mid.16 in {other}" in message
    field, code, message = refusal(gated({**source, "above": 1.0}, "resid_mid.16"))
    assert (field, code) == ("saesteer.edits[0].when.dictionary", "conflict")
    assert "reads mlp_in_pregain.16, which comes after resid_mid.16" in message
