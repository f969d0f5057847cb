"""What a plan reads and where it writes: transcoders, registers, strengths, default modules, factors by layer."""

from dataclasses import replace

import pytest

from saesteer.dictionaries.vectors import from_inline
from saesteer.errors import SpecError
from saesteer.language.spec import Spec, add, cap, clamp, reconstruct, use
from saesteer.planning.plan import Catalog, Feature, Plan, Whole
from saesteer.planning.planner import plan
from tests.spec.catalogs import CATALOG, Info, Set
from tests.spec.plans import P, refusal


def test_an_output_site_without_an_op_takes_one_group_of_additions() -> None:
    """The op of the sum adds them, before what stands at the sum; all else needs the tensor, and the flag is named."""
    infos = {"tc": Info("mlp_out.7", site_in="mlp_in.7")}
    catalog = Catalog(infos, frozenset({"mlp_in.7", "resid_post.7"}), 64, vectors={"v": from_inline((1.0, 2.0))})
    one, two, plain = clamp("tc", 1, 5), clamp("tc", 2, 5), add("v", "mlp_out.7")
    groups = plan(Spec(edits=(add("v", "resid_post.7"), one, two)), catalog, P).groups
    assert [group.site for group in groups] == ["resid_post.7", "mlp_out.7"]
    held = [change.held for change in groups[1].changes]
    assert [(read.site, read.register) for read in held if read] == [("mlp_in.7", 0), ("mlp_in.7", 1)]
    assert plan(Spec(edits=(plain, add("v", "mlp_out.7", 2.0))), catalog, P).groups
    for edits in (
        (one, plain),
        (cap("v", "mlp_out.7", max=1.0),),
        (add("v", "mlp_out.7", norm="match"),),
        (one, add("v", "resid_post.7"), clamp("tc", 3, 5), plain),
        (add("v", "mlp_out.7", {"probe": "v"}),),
        (add("v", "mlp_out.7", when={"probe": "v", "above": 1.0}),),
    ):
        field, code, message = refusal(*edits, catalog=catalog)
        assert (field.split(".")[1][:5], code) == ("edits", "not_served")
        assert "--sites mlp_out.7" in message
        assert plan(Spec(edits=edits), replace(catalog, sites=None), P).groups


def test_a_transcoder_is_reconstructed_where_it_writes() -> None:
    """What it makes of its input is kept for one later site; it replaces a tensor, so it needs an op there."""
    infos = {"tc": Info("mlp_out.7", site_in="mlp_in.7"), "far": Info("resid_post.15", site_in="resid_mid.7")}
    sites = frozenset({"resid_mid.7", "mlp_in.7", "resid_post.7", "mlp_in.15", "resid_post.15"})
    catalog = Catalog(infos, sites | {"mlp_out.7"}, 64)
    found = plan(Spec(edits=(clamp("tc", 1, 5), reconstruct("tc"), reconstruct("tc"))), catalog, P)
    assert [(read.site, read.target) for read in found.reads] == [
        ("mlp_in.7", Feature("tc", 1)),
        ("mlp_in.7", Whole("tc")),
    ]
    assert [group.site for group in found.groups] == ["mlp_out.7"] * 2
    assert [change.held for group in found.groups for change in group.changes] == [*found.reads, found.reads[1]]
    field, code, message = refusal(reconstruct("tc"), catalog=replace(catalog, sites=sites))
    assert (field, code) == ("saesteer.edits[0]", "not_served")
    assert "--sites mlp_out.7" in message
    field, code, message = refusal(reconstruct("far"), reconstruct("tc"), catalog=catalog)
    assert (field, code) == ("saesteer.edits[1]", "too_many")
    assert "reconstruction 2" in message and "at most 1" in message
    field, code, _ = refusal(reconstruct("tc"), catalog=replace(catalog, max_entries=1))
    assert code == "too_many", "what is read is an entry, too"


def test_what_is_read_is_shared_and_bounded() -> None:
    catalog = replace(CATALOG, vectors={"v": from_inline((1.0, 2.0))}, width=2)
    scales = [{"probe": "v", "slope": float(n)} for n in (1, 2, 3)]
    found = plan(Spec(edits=tuple(add("v", "resid_post.7", scales[n]) for n in (0, 1, 0))), catalog, P)
    assert [read.register for read in found.reads] == [0, 1]
    six = [add("v", "resid_post.7", {"probe": "v", "slope": float(n)}) for n in range(1, 7)]
    full = replace(catalog, max_entries=12)
    assert [read.register for read in plan(Spec(edits=tuple(six)), full, P).reads] == [*range(6)]
    field, code, message = refusal(*six, catalog=replace(catalog, max_entries=11))
    assert (field, code) == ("saesteer.edits", "too_many"), "each number that is read is an entry"
    assert "--max-edits" in message
    later = [add("v", f"resid_post.{layer}", scale) for layer, scale in zip((7, 15, 20), scales, strict=True)]
    registers = [read.register for read in plan(Spec(edits=tuple(later)), catalog, P).reads]
    assert registers == [0, 0, 0], "a register is free behind its last edit"


def test_a_strength_of_a_ranked_feature_needs_its_dictionary_whole() -> None:
    infos = {"top": Info("resid_post.7", activation="topk", k=3), "other": Info("resid_post.7", activation="topk", k=3)}
    catalog = Catalog(infos, frozenset({"resid_post.7", "resid_post.15"}), 64, vectors={"v": from_inline((1.0, 2.0))})
    scale = {"dictionary": "top", "feature": 3}
    assert plan(Spec(edits=(add("v", "resid_post.15", scale),)), catalog, P).reads
    field, code, _ = refusal(add("v", "resid_post.15", scale), clamp("other", 1, 2), catalog=catalog)
    assert (field, code) == ("saesteer.edits[1].dictionary", "not_served")


def test_a_chain_holds_one_strength_that_is_read() -> None:
    scale = {"probe": "v"}
    inner = Spec(edits=(add("v", "resid_post.7", scale),))
    catalog = replace(CATALOG, vectors={"v": from_inline((1.0, 2.0))}, modules={"m": inner}, width=2)
    assert plan(Spec(edits=(use("m", 0.5),)), catalog, P).reads
    field, code, message = refusal(use("m", scale), catalog=catalog)
    assert (field, code) == ("saesteer.edits[0].module.edits[0].scale", "conflict")
    assert "expected a number in one of the two" in message


def test_a_default_module_stands_in_front_of_every_request() -> None:
    inner = Spec(edits=(add("v", "resid_post.7"),))
    catalog = replace(CATALOG, vectors={"v": from_inline((1.0, 2.0))}, modules={"m": inner}, width=2, default="m")
    own = clamp("gs15", 1, 2)
    assert [group.site for group in plan(Spec(edits=(own,)), catalog, P).groups] == ["resid_post.7", "resid_post.15"]
    (alone,) = plan(Spec(), catalog, P).groups
    assert [change.field for change in alone.changes] == ["saesteer.defaults.edits[0]"]
    assert plan(Spec(defaults=False), catalog, P) == Plan()
    assert plan(Spec(edits=(own,), defaults=False), catalog, P) == plan(Spec(edits=(own,)), CATALOG, P)
    both = plan(Spec(edits=(add("v", "resid_post.7"),)), catalog, P)
    assert [len(group.changes) for group in both.groups] == [1, 1], "as a use in front of the edits: two groups"


def test_a_vector_of_several_layers_may_have_a_factor_for_each() -> None:
    rows = Set(layers=(7, 15), digests={7: "0" * 64, 15: "1" * 64})
    catalog = replace(CATALOG, vectors={"v": rows})
    found = plan(Spec(edits=(add("v", "resid_post", 2.0, scales=[1.0, -3.0]),)), catalog, P)
    assert [(group.site, group.changes[0].shift) for group in found.groups] == [
        ("resid_post.7", 2.0),
        ("resid_post.15", -6.0),
    ]
    field, code, message = refusal(add("v", "resid_post", scales=[1.0]), catalog=catalog)
    assert (field, code) == ("saesteer.edits[0].scales", "conflict")
    assert "got 1 numbers for the 2 layers" in message
    with pytest.raises(SpecError, match=r"add\.scales: is one number for each layer, expected a kind alone"):
        add("v", "resid_post.7", scales=[1.0])


def test_products_that_float32_cannot_hold_are_refused() -> None:
    rows = Set(layers=(7, 15), digests={7: "0" * 64, 15: "1" * 64})
    catalog = replace(CATALOG, vectors={"v": rows, "p": from_inline((1.0, 2.0), bias=-4.0)}, width=None)
    field, code, message = refusal(add("v", "resid_post", 3e38, scales=[1.0, -2.0]), catalog=catalog)
    assert (field, code) == ("saesteer.edits[0].scales[1]", "out_of_range")
    assert "got -2, which makes -6e+38 with scale" in message
    scale = {"probe": "p", "slope": 3e38}
    field, code, message = refusal(add("p", "resid_post.7", scale), catalog=catalog)
    assert (field, code) == ("saesteer.edits[0].scale.slope", "out_of_range")
    assert "got 3e+38, which makes -1.2e+39 with the bias" in message
    assert plan(Spec(edits=(add("p", "resid_post.7", scale | {"slope": 8e37, "bias": 2.0}),)), catalog, P).reads
