"""Cross-layer transcoders in a plan: one read and several writes, what the sites share, and what is refused."""

from dataclasses import replace
from typing import Any

from saesteer.dictionaries.vectors import from_inline
from saesteer.language.spec import Spec, add, clamp, reconstruct
from saesteer.planning.plan import Catalog, Feature, Plan
from saesteer.planning.planner import plan
from saesteer.planning.runs import contents
from tests.spec.catalogs import Info
from tests.spec.plans import P, refusal

LAYERS = range(5, 8)


class Stored(Info):
    """A layer of a cross-layer transcoder."""

    by_rows = True
    d_in = 2


INFOS = {
    f"clt@{layer}": Stored(f"mlp_out.{layer}", f"mlp_in.{layer}", targets=8 - layer, can_reconstruct=False)
    for layer in LAYERS
}
SITES = frozenset(f"{kind}.{layer}" for layer in LAYERS for kind in ("mlp_in", "resid_post"))
VECTORS = {"v": from_inline((1.0, 2.0))}
CATALOG = Catalog(INFOS, SITES, 64, vectors=VECTORS, width=2, sets={"clt": tuple(LAYERS)})


def of(layer: int, feature: int = 3, value: Any = 5.0, **more: Any) -> Any:
    return clamp("clt", feature, value, layer=layer, **more)


def planned(*edits: Any, catalog: Catalog = CATALOG) -> Plan:
    return plan(Spec(edits=edits), catalog, P)


def test_a_clamp_is_one_read_and_a_write_at_its_layer_and_each_later_one() -> None:
    found = planned(of(5))
    [read] = found.reads
    assert (read.site, read.target) == ("mlp_in.5", Feature("clt@5", 3))
    assert [group.site for group in found.groups] == ["mlp_out.5", "mlp_out.6", "mlp_out.7"]
    changes = [change for group in found.groups for change in group.changes]
    assert [change.target for change in changes] == [Feature("clt@5", 3, target) for target in range(3)]
    assert all(replace(change, target=changes[0].target) == changes[0] for change in changes)
    assert changes[0].held == read
    [last] = planned(of(7)).groups
    assert last.site == "mlp_out.7"


def test_clamps_of_all_layers_form_a_group_at_a_site() -> None:
    """So two of them need no op at mlp_out: that of the sum adds one group."""
    found = planned(of(5), of(6, 4), of(5, 9))
    assert [(group.site, len(group.changes)) for group in found.groups] == [
        ("mlp_out.5", 2),
        ("mlp_out.6", 3),
        ("mlp_out.7", 3),
    ]
    assert [read.register for read in found.reads] == [0, 1, 2], "each is kept to the last layer"
    behind = planned(of(5), add("v", "resid_post.6", {"probe": "v"}))
    assert [(read.site, read.register) for read in behind.reads] == [("mlp_in.5", 0), ("resid_post.6", 1)]


def test_a_condition_and_a_strength_are_read_once_for_all_sites() -> None:
    gate = {"dictionary": "clt", "layer": 5, "feature": 7, "above": 1.0}
    found = planned(of(6, value={"probe": "v"}, mode="add", when=gate), catalog=replace(CATALOG, sites=None))
    [condition] = found.conditions
    assert (condition.site, condition.target) == ("mlp_in.5", Feature("clt@5", 7))
    strength, feature = sorted(found.reads, key=lambda one: one.site, reverse=True)
    assert (strength.site, feature.site) == ("mlp_out.6", "mlp_in.6")
    for group in found.groups:
        [change] = group.changes
        assert (change.gates, change.held, change.strength) == (condition.bit, feature, strength)


def test_blocks_are_kept_apart_by_each_decoder_row() -> None:
    class Row:
        def __init__(self, digest: str) -> None:
            self.digest = digest

    found = planned(of(6))
    rows: Any = {Feature("clt@6", 3, target): Row(f"{target}") for target in range(2)}
    before = contents(found, replace(CATALOG, rows=rows))
    after = contents(found, replace(CATALOG, rows=rows | {Feature("clt@6", 3, 1): Row("other")}))
    assert before[0] == after[0] and before[1] != after[1]
    read = contents(found, replace(CATALOG, rows=rows | {Feature("clt@6", 3): Row("other")}))
    assert before[0] != read[0] and before[1] != read[1], "both read the encoder's row"


def test_what_is_refused() -> None:
    field, code, message = refusal(of(5), catalog=replace(CATALOG, sites=SITES - {"resid_post.6"}))
    assert (field, code) == ("saesteer.edits[0].dictionary", "not_served")
    assert "writes mlp_out.6, where this server has no op" in message and "--sites resid_post.6" in message
    for error in ("drop", "keep"):
        field, code, message = refusal(of(5), reconstruct("clt", layer=5, error=error), catalog=CATALOG)
        assert (field, code) == ("saesteer.edits[1].dictionary", "not_served")
        assert "'clt@5' is a cross-layer transcoder" in message
    field, code, message = refusal(of(5), of(6), catalog=replace(CATALOG, inline_rows=1))
    assert (field, code) == ("saesteer.edits[1].feature", "too_many")
    assert "2 that the request takes from files for mlp_out.6" in message
    assert message.endswith("--inline-rows")
    field, code, _ = refusal(of(5), catalog=replace(CATALOG, max_entries=3))
    assert (field, code) == ("saesteer.edits", "too_many"), "three writes and a read"
    field, code, _ = refusal(of(5), of(5, value=6.0), catalog=CATALOG)
    assert (field, code) == ("saesteer.edits[1].feature", "duplicate")
    gate = {"dictionary": "clt", "layer": 7, "feature": 1, "above": 0}
    field, code, message = refusal(of(5, when=gate), catalog=CATALOG)
    assert (field, code) == ("saesteer.edits[0].when.dictionary", "conflict")
    assert "reads mlp_in.7, which comes after mlp_out.5" in message
    unknown = replace(CATALOG, dictionaries={**INFOS, "clt@5": replace(INFOS["clt@5"], has_max_act=False)})
    field, code, message = refusal(of(5, unit="max_act"), catalog=unknown)
    assert (field, code) == ("saesteer.edits[0].unit", "unknown_max_act")
    assert "the max activations of 'clt@5' are not known, `saesteer calibrate` finds them" in message
