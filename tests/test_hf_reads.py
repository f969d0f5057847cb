"""What Model.read returns on Transformers: the model's own tensors, and where it says slow what an engine answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer import hf
from saesteer.errors import SpecError
from saesteer.loaders.formats import own
from tests import small_world
from tests.entries import tensor as numbers_of
from tests.hf_models import IDS, SITE, V, made_with

ADD = {"op": "add", "vector": V.tolist(), "site": SITE, "scale": 3.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> hf.Model:
    return made_with(tmp_path_factory.mktemp("reads"))


def tensor(entry: dict[str, Any]) -> Tensor:
    return torch.from_numpy(numbers_of(entry).copy())


def test_activations_before_and_after_the_edits(model: hf.Model) -> None:
    wanted = [{"site": SITE, "at": "after"}, {"site": SITE}, {"site": "resid_mid.2"}]
    answer = model.read(IDS, steer={"edits": [ADD], "return": {"activations": wanted}})
    plain = model.streams(IDS)
    after, before, mid = answer["activations"]
    assert [one["site"] for one in answer["activations"]] == [SITE, SITE, "resid_mid.2"]
    assert [one["layers"] for one in answer["activations"]] == [[1], [1], [2]]
    assert before["positions"] == [*range(len(IDS))]
    assert before["dtype"] == "float32"
    torch.testing.assert_close(tensor(before), plain[SITE])
    torch.testing.assert_close((tensor(after) - tensor(before))[1:], (3 * V).expand(len(IDS) - 1, -1))
    assert torch.equal(tensor(after)[0], tensor(before)[0]), "position 0 is not edited"
    torch.testing.assert_close(tensor(mid), model.streams(IDS, steer=[ADD])["resid_mid.2"])


def test_several_sites_are_one_tensor(model: hf.Model) -> None:
    """A list in its order, and a kind at all layers that are kept, reduced or not."""
    alone = [{"site": "resid_mid.2"}, {"site": SITE}, {"site": SITE, "at": "after", "reduce": "mean"}]
    mid, before, mean = model.read(IDS, steer={"edits": [ADD], "return": {"activations": alone}})["activations"]
    sites = [SITE, "resid_mid.2"]
    wanted = [{"site": sites}, {"site": "resid_post", "at": "after", "reduce": "mean"}]
    several, kind = model.read(IDS, steer={"edits": [ADD], "return": {"activations": wanted}})["activations"]
    assert (several["site"], several["layers"], several["shape"]) == (sites, [1, 2], [len(IDS), 2, V.numel()])
    assert torch.equal(tensor(several), torch.stack([tensor(before), tensor(mid)], 1))
    assert (kind["site"], kind["layers"]) == ([SITE], [1])
    assert torch.equal(tensor(kind), tensor(mean)[:, None])
    [one] = model.read(IDS, steer={"return": {"activations": [{"site": [SITE]}]}})["activations"]
    assert (one["site"], one["shape"]) == (SITE, [len(IDS), V.numel()]), "a list of one is that site"
    for site, told in (("attn_out", "keeps no tensor"), ([SITE, "resid_mid.0"], "reads resid_mid.0")):
        with pytest.raises(SpecError, match=told) as caught:
            model.read(IDS, steer={"return": {"activations": [{"site": site}]}})
        assert (caught.value.field, caught.value.code) == ("saesteer.return.activations[0].site", "not_served")


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_reductions(model: hf.Model, reduce: str) -> None:
    wanted = [{"site": SITE, "reduce": reduce, "scope": {"prompt": True, "skip_first": 2}}]
    [entry] = model.read(IDS, steer={"return": {"activations": wanted}}, prompt_len=9)["activations"]
    rows = model.streams(IDS)[SITE][2:9]
    expected = {"mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}[reduce]
    torch.testing.assert_close(tensor(entry)[0], expected)
    assert (entry["reduce"], entry["tokens"], entry["positions"]) == (reduce, 7, [2, 9])
    vector = {name: entry[name] for name in ("dtype", "shape", "layers", "data")}
    add = {"op": "add", "vector": vector, "site": "resid_post", "scale": 2.0}
    [steered] = model.read(IDS, steer={"edits": [add], "return": {"activations": [{"site": SITE, "at": "after"}]}})[
        "activations"
    ]
    difference = tensor(steered)[1:] - model.streams(IDS)[SITE][1:]
    torch.testing.assert_close(difference, (2.0 * expected).expand_as(difference), atol=1e-5, rtol=1e-5)


FEW = [{"scope": {}, "features": [900, 7]}, {"scope": {}, "top_k": 2}, {"scope": {}, "features": [7], "top_k": 2}]


@pytest.mark.parametrize("wanted", FEW, ids=["named", "strongest", "both"])
def test_a_file_of_some_features_gives_them_by_their_numbers(tmp_path: Path, wanted: dict[str, Any]) -> None:
    """A read, and a rule, which only ever names features."""
    whole = small_world.CODERS["jump"]
    ids, rows = (7, 900, 12), [0, 1, 2]
    info = replace(whole.info, features=len(ids), feature_ids=ids, can_reconstruct=False)
    parts: dict[str, Any] = {
        name: getattr(whole, name)[rows] for name in ("w_enc", "b_enc", "w_dec", "threshold", "max_act")
    }
    few = replace(whole, info=info, **parts)
    own.write(tmp_path / "few.safetensors", few)
    model = made_with(tmp_path, {"few": f"{tmp_path}/few.safetensors@{SITE}"})
    rule = {"op": "flag", "when": {"dictionary": "few", "feature": 900, "above": -1.0}, "scope": {}}
    spec = {"edits": [rule], "return": {"features": [{"dictionary": "few", **wanted}]}}
    answer = model.read(IDS, steer=spec)
    assert answer["flags"] == [{"edit": "saesteer.edits[0]", "position": 1}]
    found = dict(zip(ids, few.encode(model.streams(IDS)[SITE]).T, strict=True))
    [entry] = answer["features"]
    for row in entry["rows"]:
        here = {one: float(values[row["position"]]) for one, values in found.items()}
        strongest = sorted((one for one in here if here[one] > 0), key=lambda one: -here[one])[: wanted.get("top_k", 0)]
        assert [one for one, _ in row.get("top", [])] == strongest
        named = {str(one): here[one] for one in wanted.get("features", [])}
        assert row.get("features", {}) == pytest.approx(named, abs=1e-5)


def test_hidden_states_are_what_the_head_multiplies(model: hf.Model) -> None:
    with torch.no_grad():
        expected = model.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0]
    [last] = model.read(IDS, steer={"return": {"hidden": True}})["hidden"]
    assert last["positions"] == [len(IDS) - 1]
    torch.testing.assert_close(tensor(last)[0], expected[-1])
    [some] = model.read(IDS, steer={"return": {"hidden": {"scope": {"positions": [[2, 4]]}}}})["hidden"]
    assert some["positions"] == [2, 3]
    torch.testing.assert_close(tensor(some), expected[2:4])


def test_refusals_are_those_of_a_server_and_there_are_no_handles(model: hf.Model) -> None:
    for wanted, field in [
        ({"probes": ["nobody"]}, "probes[0].probe"),
        ({"activations": [{"site": SITE, "as": "handle"}]}, "activations[0].as"),
    ]:
        with pytest.raises(SpecError) as caught:
            model.read(IDS, steer={"return": wanted})
        assert caught.value.field == f"saesteer.return.{field}"


def assert_alike(found: Any, expected: Any) -> None:
    """Equal JSON but for numbers, which may differ by 1e-4 of the largest; ties may stand in another order."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        if "data" in expected:
            one, other = tensor(found), tensor(expected)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))
        for key in expected.keys() - {"data", "top"}:
            assert_alike(found[key], expected[key])
        if "top" in expected:
            assert dict(found["top"]) == pytest.approx(dict(expected["top"]), rel=1e-4, abs=2e-3)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-3)
    else:
        assert found == expected


@pytest.mark.parametrize("part", ["mlp_out.1", "attn_out.2"])
def test_a_read_of_a_sum_has_what_was_added_to_its_part_wherever_that_has_an_op(
    model: hf.Model, tmp_path: Path, part: str
) -> None:
    site = {"mlp_out.1": SITE, "attn_out.2": "resid_mid.2"}[part]
    reads = {
        "activations": [{"site": site}, {"site": site, "at": "after"}],
        "features": [{"dictionary": "jump", "scope": {}}],
        "probes": [{"probe": "probe", "scope": {}}],
    }
    rule = {"op": "flag", "when": {"probe": "probe", "above": 5.0}, "scope": {}}
    spec = {"edits": [{**ADD, "site": part}, rule], "return": reads}
    found = [one.read(IDS, steer=spec) for one in (model, made_with(tmp_path, sites=[part]))]
    assert_alike(*found)
    before, after = (tensor(one) for one in found[0]["activations"])
    assert torch.equal(before, after), "the site has no edits of its own"
    assert not torch.allclose(before[1:], model.streams(IDS)[site][1:])
    with pytest.raises(SpecError) as caught:
        model.read(IDS, steer={**spec, "edits": [{**ADD, "site": site}, *spec["edits"]]})
    assert caught.value.field in ("saesteer.return.activations[0]", "saesteer.return.features[0]")
    assert caught.value.code == "not_served" and f"--sites {part}" in str(caught.value)


@pytest.mark.parametrize("edited", [["resid_mid.2"], ["attn_out.2"], ["attn_out.2", "resid_mid.2"]])
@pytest.mark.parametrize("sites", [[], ["attn_out.2"]], ids=["one op", "two"])
def test_the_norm_behind_resid_mid_is_read_as_the_request_leaves_the_stream(
    edited: list[str], sites: list[str], tmp_path: Path
) -> None:
    """The norms of this model have gains of 1, so what dictionaries read before them and behind them is the same."""
    own.write(tmp_path / "tc.safetensors", small_world.CODERS["pregain"])
    names = ("mlp_in_pregain", "mlp_in")
    places = {name: f"{tmp_path}/tc.safetensors@{name}.2:mlp_out.2" for name in names}
    model = made_with(tmp_path, places, sites=sites)
    adds = [{**ADD, "site": site} for site in edited]
    reads = [{"dictionary": name, "features": [1, 2, 3], "scope": {}} for name in names]
    found, expected = model.read(IDS, steer={"edits": adds, "return": {"features": reads}})["features"]
    for one, other in zip(found["rows"], expected["rows"], strict=True):
        assert one["features"] == pytest.approx(other["features"], abs=2e-3)
    rules = [{"op": "flag", "when": {"dictionary": name, "feature": 1, "above": 0.2}, "scope": {}} for name in names]
    for before, first in (([], 4), (adds, 1)):
        flags = model.read(IDS, steer={"edits": before + rules})["flags"]
        assert [one["position"] for one in flags] == [first, first]


def test_rules_fire_where_their_scores_say(model: hf.Model) -> None:
    """In ``read`` alone: nothing ends there, and what generates refuses them by name."""
    scored = {"return": {"probes": [{"probe": "probe", "scope": {"skip_first": 1}}]}}
    [entry] = model.read(IDS, steer=scored)["probes"]
    scores = dict(zip(entry["positions"], entry["scores"], strict=True))
    above = sum(sorted(scores.values())[len(scores) // 2 :][:2]) / 2  # between two of them
    expected = next((at for at in scores if scores[at] > above and scores.get(at - 1, above) > above), None)
    rules = [{"op": "stop", "when": {"probe": "probe", "above": above}, "for": n, "scope": {}} for n in (2, 1)]
    marks = model.read(IDS, steer={"edits": rules[:1]})
    assert marks == {"flags": [] if expected is None else [{"edit": "saesteer.edits[0]", "position": expected}]}
    first = next(at for at in scores if scores[at] > above)
    assert model.read(IDS, steer={"edits": rules})["flags"] == [{"edit": "saesteer.edits[1]", "position": first}]
    with pytest.raises(SpecError) as caught:
        model.generate(IDS, steer={"edits": rules}, max_tokens=2)
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[0].when", "not_served")
