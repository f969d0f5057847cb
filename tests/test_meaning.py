"""From a spec in JSON to edited tensors, against an independent float32 transcription of what the language means.

The transcription knows no plan, no table and no op: it reads the JSON and follows the definition of a clamp.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saesteer.config.config import SaesteerConfig
from saesteer.config.sources import DictionarySource
from saesteer.engine.engine import Engine
from saesteer.errors import ConfigError, SpecError
from tests.formulas import within
from tests.one_site import CODERS, FEATURES, PLACES, TOKENS, WIDTH, make_engine
from tests.rows import row_of


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("coders"))


def edit(engine: Engine, specs: list[Any], prompt_len: int, x: torch.Tensor) -> torch.Tensor:
    """Requests of TOKENS tokens each, one after the other, through plan, table, work list and op."""
    kinds = np.zeros(len(engine.sites), dtype=np.int32)
    for row, spec in enumerate(specs, 1):
        content = None if spec is None else row_of(engine, spec, prompt_len)
        if content is not None:
            kinds |= content.kinds
        engine.fill(row, content)
    rows = torch.arange(len(specs), dtype=torch.int64)
    starts = torch.arange(len(specs) + 1, dtype=torch.int32) * TOKENS
    positions = torch.arange(TOKENS).repeat(len(specs))
    engine.positions[: len(positions)] = positions
    engine.schedule(rows, 1, starts, len(specs), len(positions), kinds)
    (site,) = engine.sites.values()
    out = x.clone()
    engine.edit(site, out)
    return out


def transcription(spec: Any, prompt_len: int, x: np.ndarray) -> np.ndarray:
    """x [TOKENS, WIDTH] of one request → x', from the definition of clamp, scope and group."""
    x = x.astype(np.float32).copy()
    groups: list[tuple[str, list[Any]]] = []
    for one in spec["edits"]:
        if not groups or groups[-1][0] != one["dictionary"]:
            groups.append((one["dictionary"], []))
        groups[-1][1].append(one)
    for name, clamps in groups:
        c = CODERS[name]
        w_enc, w_dec = c.w_enc.numpy(), c.w_dec.numpy()
        for t in range(TOKENS):
            pre = w_enc @ x[t] + c.b_enc.numpy()
            if c.info.activation == "topk":
                kept = sorted(range(FEATURES), key=lambda i: (-pre[i], i))[:3]
                f = np.array([max(pre[i], 0) if i in kept else 0 for i in range(FEATURES)], np.float32)
            else:
                bound = c.threshold.numpy() if c.threshold is not None else np.zeros(FEATURES, np.float32)
                f = np.where(pre > bound, pre, 0).astype(np.float32)
            changed = f.copy()
            # min and max of one feature make a band, whichever stands first
            for one in sorted(clamps, key=lambda one: one.get("mode") == "max"):
                i = one["feature"]
                if not within(one.get("scope"), t, prompt_len) or (one.get("only_if_active") and f[i] == 0):
                    continue
                v = one["value"] * (
                    float(c.max_act[i] if c.max_act is not None else 1) if one.get("unit") == "max_act" else 1
                )
                mode = one.get("mode", "set")
                if mode == "set":
                    changed[i] = v
                elif mode == "add":
                    changed[i] = f[i] + v
                elif mode == "scale":
                    changed[i] = f[i] * v
                elif mode == "min":
                    changed[i] = max(changed[i], v)
                else:
                    changed[i] = min(changed[i], v)
            x[t] = x[t] + (changed - f) @ w_dec
    return x


values = st.floats(-4, 4, width=32).filter(lambda v: abs(v) > 0.01)
scopes = st.one_of(
    st.none(),
    st.fixed_dictionaries({}, optional={"prompt": st.booleans(), "skip_first": st.integers(0, 6)}),
    st.just({"generated": True}),
    st.lists(st.tuples(st.integers(-8, 15), st.one_of(st.none(), st.integers(-4, 20))), min_size=1, max_size=3).map(
        lambda spans: {"positions": [list(span) for span in spans]}
    ),
)
clamps = st.builds(
    lambda name, feature, value, mode, unit, active, scope: {
        "op": "clamp", "dictionary": name, "feature": feature, "value": value, "mode": mode,
        "unit": "raw" if mode == "scale" else unit, "only_if_active": active, **({"scope": scope} if scope else {}),
    },
    st.sampled_from(list(PLACES)), st.integers(0, FEATURES - 1), values,
    st.sampled_from(["set", "add", "scale", "min", "max"]), st.sampled_from(["raw", "max_act"]), st.booleans(), scopes,
)  # fmt: skip
specs = st.lists(clamps, min_size=1, max_size=6).map(lambda edits: {"edits": edits})


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(specs, st.integers(1, TOKENS), st.integers(0, 2**31))
def test_a_spec_means_what_the_definition_says(engine: Engine, spec: Any, prompt_len: int, seed: int) -> None:
    try:
        row_of(engine, spec, prompt_len)
    except SpecError:
        return  # duplicates and empty scopes, tested in tests/spec
    x = torch.randn(3 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    out = edit(engine, [None, spec, None], prompt_len, x)
    expected = transcription(spec, prompt_len, x[TOKENS : 2 * TOKENS].numpy())
    # float32, sums of 24 products in another order, up to six groups that build on each other
    np.testing.assert_allclose(out[TOKENS : 2 * TOKENS].numpy(), expected, rtol=2e-4, atol=2e-3)
    assert torch.equal(out[:TOKENS], x[:TOKENS]) and torch.equal(out[2 * TOKENS :], x[2 * TOKENS :])


def test_a_row_is_empty_after_its_request(engine: Engine) -> None:
    spec = {"edits": [{"op": "clamp", "dictionary": "jump", "feature": 1, "value": 3.0}]}
    x = torch.randn(TOKENS, WIDTH)
    assert not torch.equal(edit(engine, [spec], 4, x), x)
    assert torch.equal(edit(engine, [None], 4, x), x)
    engine.rest()
    assert int(engine.work[0, 0]) == 0


def test_five_thousand_specs_leave_the_tables_as_they_were(engine: Engine) -> None:
    before = engine.table.data_ptr(), engine.table.shape
    for n in range(5000):
        clamp = {"op": "clamp", "dictionary": "rect", "feature": n % FEATURES, "value": float(n + 1)}
        engine.fill(1 + n % 4, row_of(engine, {"edits": [clamp]}, 5))
        if n % 3 == 0:
            engine.flush()
    for row in range(1, 5):
        engine.fill(row, None)
    engine.flush()
    assert (engine.table.data_ptr(), engine.table.shape) == before
    assert not engine.table[:, 0].any()


@pytest.mark.parametrize(
    ("sites", "options", "message"),
    [
        ({}, {"width": 25}, "24 wide, but this model is 25 wide"),
        ({"jump": "resid_post.4"}, {}, "layers 0 to 3"),
        ({"jump": "mlp_in_pregain.1"}, {}, "not served"),
        ({"jump": "z.1"}, {"other_widths": {"z": 32}}, r"'jump' is 24 wide, but z\.1 of this model is 32 wide"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_start(
    tmp_path: Path, sites: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, sites, **options)


@pytest.mark.parametrize(
    "raw",
    [
        3,
        {"dictionary": {}},
        {"dictionaries": []},
        {"dictionaries": {"a": 3}},
        {"sites": "resid_post.1"},
        {"max_edits": 0},
    ],
)
def test_a_wrong_configuration_is_refused(raw: Any) -> None:
    with pytest.raises(ConfigError):
        SaesteerConfig.from_json(raw)


def test_the_configuration_round_trips() -> None:
    source = DictionarySource.from_argument("org/repo/x@resid_mid.3")
    config = SaesteerConfig({"a": source}, ("resid_post.1",), max_edits=7)
    assert SaesteerConfig.from_json(config.to_json()) == config
    assert config.dictionaries["a"] == DictionarySource("org/repo/x", "resid_mid.3")
