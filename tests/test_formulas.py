"""Specs of every kind through plan, tables and op at several sites, against tests/formulas.py."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from saesteer.engine.doses import sites_of
from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.kernels import layout
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan
from tests.formulas import flat
from tests.kernels.doses import judge_doses
from tests.rows import row_of
from tests.small_engine import forward, make_engine
from tests.small_truth import expected
from tests.small_world import INLINE, INLINE_WIDE, KINDS, MODULES, NARROW, SITES, TOKENS, WHOLE, WIDTH, edits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("formulas"))


@settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(edits(), min_size=1, max_size=5), st.integers(2, TOKENS), st.booleans(), st.integers(0, 2**31))
def test_every_composition_means_what_the_definition_says(
    engine: Engine, found: list[Any], prompt_len: int, dose: bool, seed: int
) -> None:
    spec = {"edits": found} | ({"return": {"dose": True}} if dose else {})
    try:
        row_of(engine, spec, prompt_len)
    except SpecError as error:
        event(f"refused: {error.code}")
        return  # tested in tests/spec
    for op in {edit["op"] for edit, _, _ in flat(found, MODULES)}:
        event(op)
    check(engine, spec, prompt_len, seed)


def check(engine: Engine, spec: Any, prompt_len: int, seed: int = 0) -> float:
    """Compare; how far the spec moved the stream."""
    x = torch.randn(3 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    out = forward(engine, [None, spec, None], prompt_len, x)
    row = engine._filled[2]
    counts = engine.counted(2, row.counters)
    plain = forward(engine, [None, None, None], prompt_len, x)
    mine = slice(TOKENS, 2 * TOKENS)
    limit = engine.config.max_dose or 0.0
    truth, sure, doses = expected(spec, prompt_len, x[mine], limit)
    # float32; what edits multiply by up to four, again and again, counts in lengths of the token
    size = 1 + np.abs(truth).max(1, keepdims=True)
    assert (np.abs(out[mine].numpy() - truth) / size)[sure].max(initial=0) < 2e-4
    names = (
        sites_of(plan(from_json(spec), engine.catalog, prompt_len), engine.catalog) if "return" in spec or limit else ()
    )
    assert row.doses == len(names)
    for name, words in zip(names, counts[row.edits :].view(-1, layout.DOSE_WORDS), strict=True):
        known = doses[sure, SITES.index(name)]
        judge_doses(words, known[~np.isnan(known)], int((~sure).sum()), limit, 2e-4 * size.max())
    assert torch.equal(out[:TOKENS], plain[:TOKENS]) and torch.equal(out[2 * TOKENS :], plain[2 * TOKENS :])
    return float((out[mine] - plain[mine]).abs().max())


SPECS: dict[str, list[Any]] = {
    "add": [{"op": "add", "vector": "each", "site": "resid_post", "scale": 2.0}],
    "add inline, norm match": [{"op": "add", "vector": INLINE[0], "site": "resid_mid.1", "norm": "match"}],
    "two inline": [{"op": "add", "vector": one, "site": "resid_mid.1"} for one in INLINE],
    "cap": [{"op": "cap", "vector": "any", "site": NARROW, "max": 0.3, "strength": 0.5}],
    "ablate, then add": [
        {"op": "ablate", "vector": "any", "site": "resid_mid.2"},
        {"op": "add", "vector": "any", "site": "resid_mid.2", "scale": 3.0},
    ],
    **{f"reconstruct {name}": [{"op": "reconstruct", "dictionary": name}] for name in WHOLE},
    **{
        f"clamps and reconstruct {name}": [
            {"op": "clamp", "dictionary": name, "feature": 1, "value": 2.0},
            {"op": "clamp", "dictionary": name, "feature": 2, "value": 3.0, "mode": "scale"},
            {"op": "reconstruct", "dictionary": name},
            {
                "op": "ablate",
                "vector": "wide" if "heads" in name else "any",
                "site": KINDS[name][3].rpartition(":")[2],
            },
        ]
        for name in WHOLE
    },
    "a transcoder, in front of what stands at the sum": [
        {"op": "add", "vector": "any", "site": "resid_post.1", "when": {"probe": "any", "above": 0.2}},
        {"op": "clamp", "dictionary": "rect", "feature": 1, "value": 2.0},
        {"op": "clamp", "dictionary": "across", "feature": 1, "value": 2.0, "unit": "max_act"},
        {"op": "clamp", "dictionary": "across", "feature": 2, "value": -1.0, "mode": "add", "only_if_active": True},
    ],
    "clamps and a reconstruction that meet what stands where they read": [
        {"op": "add", "vector": "any", "site": "mlp_in.2", "scale": 2.0},
        {"op": "clamp", "dictionary": "over", "feature": 1, "value": 2.0, "unit": "max_act"},
        {"op": "reconstruct", "dictionary": "over"},
        {"op": "cap", "vector": "any", "site": "mlp_out.2", "max": 0.1},
    ],
    "half a reconstruction by a transcoder, twice": [
        {"op": "use", "module": "half", "scale": 0.5},
        {"op": "use", "module": "half", "scale": {"probe": "any", "slope": 0.2}},
    ],
    "one that waits": [
        {
            "op": "reconstruct",
            "dictionary": "under",
            "when": {"probe": "any", "above": 0.0},
            "scope": {"generated": True},
        },
        {"op": "clamp", "dictionary": "under", "feature": 1, "value": 2.0},
    ],
    "edits where a transcoder reads": [
        {"op": "clamp", "dictionary": "inside", "feature": 1, "value": 2.0},
        {"op": "clamp", "dictionary": "best", "feature": 1, "value": 2.0, "mode": "scale"},
        {"op": "clamp", "dictionary": "ahead", "feature": 1, "value": 2.0},
    ],
    "error keep is the delta form": [
        {"op": "clamp", "dictionary": "group", "feature": 1, "value": 2.0},
        {"op": "reconstruct", "dictionary": "group", "error": "keep"},
    ],
    "a gate at an earlier site": [
        {"op": "add", "vector": "any", "site": "resid_post.2", "when": when}
        for when in ({"dictionary": "top", "feature": 3, "above": 0.1}, {"probe": "one", "below": 0.1})
    ],
    "a gate reads before the edits of its site": [
        {"op": "ablate", "vector": "one", "site": "resid_post.1"},
        {"op": "add", "vector": "any", "site": "resid_post.1", "when": {"probe": "one", "above": 0.0}},
    ],
    "add at the heads": [{"op": "add", "vector": "wide each", "site": "z", "scale": 2.0}],
    "every op at the heads": [
        {"op": "clamp", "dictionary": "heads", "feature": 1, "value": 2.0, "unit": "max_act"},
        {"op": "clamp", "dictionary": "heads", "feature": 2, "value": -1.0, "mode": "add"},
        {"op": "add", "vector": INLINE_WIDE, "site": "z.2", "norm": "match", "scale": {"probe": "wide", "max": 2.0}},
        {"op": "cap", "vector": "wide", "site": "z.2", "max": 0.1},
        {"op": "ablate", "vector": "wide each", "site": "z.2", "when": {"probe": "one", "above": -0.5}},
    ],
    "what is read at the heads decides at the stream": [
        {"op": "add", "vector": "any", "site": "resid_post.2",
         "when": {"dictionary": "heads", "feature": n, "above": 0.1},
         "scale": {"dictionary": "best heads", "feature": n}}
        for n in range(4)
    ],
    "vectors of two widths come with one request": [
        {"op": "add", "vector": INLINE_WIDE, "site": "z.2"},
        {"op": "add", "vector": INLINE[0], "site": "resid_post.2"},
    ],
    "modules": [{"op": "use", "module": "nested", "scale": 2.0}, {"op": "use", "module": "calm"}],
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_by_example(engine: Engine, name: str) -> None:
    assert check(engine, {"edits": SPECS[name]}, 5) > 1e-3


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("limited"), max_dose=0.3)


@pytest.mark.parametrize("name", SPECS)
def test_doses_by_example(engine: Engine, limited: Engine, name: str) -> None:
    """A server with a limit measures everybody who is steered, and holds everybody to it."""
    check(engine, {"edits": SPECS[name], "return": {"dose": True}}, 5)
    check(limited, {"edits": SPECS[name]}, 5)


def test_a_strength_that_no_float32_can_hold_stays_within_its_bounds(engine: Engine) -> None:
    """Of a token on which the probe finds nothing, infinity would make what is no number."""
    scale = {"probe": "any", "slope": 3e38, "min": -2.0, "max": 2.0}
    spec = {"edits": [{"op": "add", "vector": "any", "site": "resid_mid.1", "scale": scale}]}
    x = torch.zeros(TOKENS, WIDTH)
    out, (wanted, *_) = forward(engine, [spec], 5, x), expected(spec, 5, x)
    assert np.abs(out.numpy() - wanted).max() < 1e-4


def test_many_conditions_share_and_reuse_their_bits(engine: Engine) -> None:
    """More than 31 conditions in all, fewer at a time."""
    gated = [
        {"op": "ablate", "vector": "any", "site": site, "when": {"probe": "any", "above": n / 7}}
        for site in SITES
        if site.startswith("resid")
        for n in range(8)
    ]
    assert len(gated) == 32
    check(engine, {"edits": gated}, 5)


def test_a_site_that_nobody_edits_asks_for_no_kernel(engine: Engine) -> None:
    gate = {"dictionary": "rect", "feature": 0, "above": 0.0}
    edit = {"op": "add", "vector": "any", "site": "resid_post.2", "when": gate}
    forward(engine, [None, {"edits": [edit]}], 4, torch.randn(2 * TOKENS, WIDTH))
    asked = {name: int(site.kinds) for name, site in engine.sites.items()}
    gated = str(engine.config.dictionaries["rect"].site)
    assert {name for name, kinds in asked.items() if kinds} == {gated, "resid_post.2"}
    engine.rest()
    assert not any(int(site.kinds) for site in engine.sites.values())
