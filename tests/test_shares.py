"""What a step costs where many read or watch features of one dictionary, by count of products and of gathered rows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.engine.engine import Engine, Row
from saesteer.engine.lanes import Lanes
from saesteer.kernels.read import features
from saesteer.loaders.formats import own
from tests.rows import row_of

WIDTH, FEATURES, REQUESTS = 16, 600, 64
LONG = 512  # tokens of a prompt's step


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    file = tmp_path_factory.mktemp("wide") / "wide.safetensors"
    draw = torch.Generator().manual_seed(3)
    info = CoderInfo("saesteer", WIDTH, WIDTH, FEATURES, "relu", None, "none", None, None, "raw", True, 1, "t", "")
    weights = [torch.randn(FEATURES, WIDTH, generator=draw) for _ in range(2)]
    own.write(
        file,
        SparseCoder(
            weights[0], torch.zeros(FEATURES), weights[1], torch.zeros(WIDTH), info, max_act=torch.ones(FEATURES)
        ),
    )
    config = SaesteerConfig.from_json(
        {"dictionaries": {"wide": {"path": str(file), "site": "resid_post.1"}}, "max_edits": 128}
    )
    made = Engine(
        Assets.open(config),
        width=WIDTH,
        layers=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=REQUESTS,
        max_tokens=LONG + REQUESTS,
    )
    before = made.captures.of("resid_post.1")["before"]
    before.copy_(torch.randn(before.shape, generator=draw))
    return made


class Costs:
    """What steps have computed."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int]] = []  # rows and features of each
        self.rows = 0  # of captured tensors, gathered


@pytest.fixture
def costs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Costs:
    found = Costs()
    dots, gather = features.dots, engine.captures._gather

    def counted(x: Tensor, w_enc: Tensor) -> Tensor:
        found.products.append((len(x), len(w_enc)))
        return dots(x, w_enc)

    def gathered(*args: Any) -> list[Tensor]:
        rows = gather(*args)
        found.rows += sum(map(len, rows))
        return rows

    monkeypatch.setattr(features, "dots", counted)
    monkeypatch.setattr(engine.captures, "_gather", gathered)
    return found


def flags(*numbers: int, scope: Any = None) -> dict[str, Any]:
    """A spec with a flag on each feature."""
    more = {} if scope is None else {"scope": scope}
    return {
        "edits": [
            {"op": "flag", "when": {"dictionary": "wide", "feature": number, "above": 0.5}, **more}
            for number in numbers
        ]
    }


def step(engine: Engine, specs: list[Any], tokens: list[int]) -> dict[str, dict[int, tuple[list[int], list[float]]]]:
    """What rules watch of a step behind a prompt of 8 tokens."""
    lanes, names = Lanes(), [str(number) for number in range(len(specs))]
    rows: list[Row | None] = [row_of(engine, spec, 8) for spec in specs]
    for name, row in zip(names, rows, strict=True):
        assert row is not None
        lanes.add(name, row.readings, {}, engine.captures.where)
    lanes.look(names, {})
    ends = np.cumsum(tokens)
    reads, _ = lanes.step(ends - tokens, ends, np.full(len(specs), 8), single=tokens == [1] * len(tokens))
    brought = engine.captures.bring(reads, None)
    assert brought is not None
    return brought.watched()


def activation(engine: Engine, token: int, feature: int) -> float:
    site = engine.sites["resid_post.1"]
    x = engine.captures.of("resid_post.1")["before"][token]
    return float((x @ site.w_enc[feature]).clamp_min(0))


CASES = {
    "one with 64 flags": ([flags(*range(64))], 64),
    "64 that watch one feature each": ([flags(number) for number in range(64)], 64),
    "64 with 8 flags each": (
        [flags(*range(8 * n, 8 * n + 8)) for n in range(64)],
        FEATURES,
    ),  # so many that gathering them moves more bytes
    "64 with the same 8 flags": ([flags(*range(8)) for _ in range(64)], 8),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_one_product_and_each_row_once(engine: Engine, costs: Costs, name: str) -> None:
    specs, multiplied = CASES[name]
    found = step(engine, specs, [1] * len(specs))
    assert costs.rows == len(specs)
    assert costs.products == [(len(specs), multiplied)]
    for number, spec in enumerate(specs):
        for measure, edit in enumerate(spec["edits"]):
            (at,), (value,) = found[str(number)][measure]
            assert at == 8 and value == pytest.approx(activation(engine, number, edit["when"]["feature"]), abs=1e-4)
