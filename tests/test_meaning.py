"""Rows of one site: empty again after their requests, however many there were; and what is refused at start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.errors import ConfigError
from tests.one_site import TOKENS, WIDTH, make_engine
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


def test_a_row_is_empty_after_its_request(engine: Engine) -> None:
    spec = {"edits": [{"op": "clamp", "dictionary": "jump", "feature": 1, "value": 3.0}]}
    x = torch.randn(TOKENS, WIDTH)
    assert not torch.equal(edit(engine, [spec], 4, x), x)
    assert torch.equal(edit(engine, [None], 4, x), x)
    engine.rest()
    assert int(engine.work[0, 0]) == 0


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
