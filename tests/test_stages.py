"""Engines of a pipeline's stages: together they edit, count and read what one engine does, or a spec is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.language.sites import order
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan
from tests.rows import row_of
from tests.small_engine import forward, make_engine
from tests.small_world import SITES, TOKENS, WIDTH, edits

CUTS = [(2,), (1, 3)]  # where the later stages of a model of four layers begin
# A read-out of several sites in one, and with what needs no site.
READ = {"activations": [{"site": site, "scope": {"positions": [[0, None]]}} for site in SITES], "hidden": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("whole"), reads=SITES)


@pytest.fixture(scope="module", params=CUTS, ids=str)
def stages(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    folder: Path = tmp_path_factory.mktemp("stages")
    cuts = request.param
    return [make_engine(folder, reads=SITES, stages=cuts, stage=number) for number in range(1 + len(cuts))]


def test_each_site_is_on_one_stage_where_its_tensor_is_consumed(whole: Engine, stages: list[Engine]) -> None:
    assert [name for one in stages for name in one.sites] == [*whole.sites]
    for number, one in enumerate(stages):
        for name in one.sites:
            kind, _, layer = name.rpartition(".")
            consumed = int(layer) + (kind == "resid_post")
            assert number == sum(first <= consumed for first in one.catalog.stages)
    held = [sum(site.w_enc.nbytes for site in one.sites.values()) for one in stages]
    assert sum(held) == sum(site.w_enc.nbytes for site in whole.sites.values()), "weights stand where the op is"


def crosses(spec: Any, whole: Engine, first: Engine, prompt_len: int) -> bool:
    """Whether one of its changes takes anything from another stage's site; from the plan for one engine."""
    found, of = plan(from_json(spec), whole.catalog, prompt_len), first.catalog.stage_of
    for group in found.groups:
        last: dict[int, str] = {}  # a bit is used again: it is that of the last condition before the edit
        for one in sorted(found.conditions, key=lambda one: order(one.site)):
            if order(one.site) <= order(group.site):
                last[one.bit] = one.site
        for change in group.changes:
            sites = [site for bit, site in last.items() if change.gates & bit]
            sites += [read.site for read in (change.held, change.strength) if read is not None]
            if any(of(site) != of(group.site) for site in sites):
                return True
    return False


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(edits(), min_size=1, max_size=4), st.integers(2, TOKENS), st.booleans(), st.integers(0, 2**31))
def test_stages_make_what_one_engine_makes(
    whole: Engine, stages: list[Engine], found: list[Any], prompt_len: int, dose: bool, seed: int
) -> None:
    """Each token, each counter; or the spec would need on one stage what another has read."""
    spec = {"edits": found} | ({"return": {"dose": True}} if dose else {})
    try:
        row_of(whole, spec, prompt_len)
    except SpecError:
        assume(False)
    if crosses(spec, whole, stages[0], prompt_len):
        with pytest.raises(SpecError, match="of this server's pipeline, by what is read at"):
            row_of(stages[0], spec, prompt_len)
        event("refused")
        return
    event("served")
    x = torch.randn(2 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    expected = forward(whole, [None, spec], prompt_len, x)
    out = forward(stages[0], [None, spec], prompt_len, x, later=stages[1:])
    assert torch.equal(out, expected)
    counters = whole._filled[2].counters
    counts = [one.counted(2, counters) for one in stages]
    assert torch.equal(sum(counts[1:], counts[0]), whole.counted(2, counters))
    assert ((torch.stack(counts) != 0).sum(0) <= 1).all(), "each is one stage's"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "what waits": ({"op": "add", "vector": "any", "site": "resid_post.2"}, "resid_post.2", "resid_post.1"),
    "a transcoder": (
        {"op": "clamp", "dictionary": "ahead", "feature": 1, "value": 2.0},
        "resid_post.2",
        "resid_post.1",
    ),
    "what is added at the sum": (
        {"op": "clamp", "dictionary": "across", "feature": 1, "value": 2.0},
        "mlp_out.1",
        "mlp_in.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_another_stage_has_read_is_refused_with_both_sites(whole: Engine, stages: list[Engine], name: str) -> None:
    edit, there, here = REFUSED[name]
    if name == "what waits":
        edit = {**edit, "when": {"dictionary": "rect", "feature": 0, "above": 0.1}}
    spec = {"edits": [edit]}
    assert row_of(whole, spec, 4) is not None
    one, two = (stages[0].catalog.stage_of(site) for site in (there, here))
    if one == two:
        assert row_of(stages[0], spec, 4) is not None
        return
    with pytest.raises(SpecError, match=f"edits {there}, on stage {one} .* read at {here}, on stage {two}; expected"):
        row_of(stages[0], spec, 4)


def _numbers(blobs: list[Any]) -> list[float]:
    return [number for _, _, *arrays in blobs for data in arrays for number in np.frombuffer(data, "<f4").tolist()]
