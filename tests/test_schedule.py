"""What a step brings to the device: rows, vectors and row numbers come once, and the list is the step's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.engine.registry import Gone
from saesteer.kernels import ops
from tests.rows import row_of

WIDTH, SITE = 6, "resid_post.1"


@pytest.fixture
def engine() -> Engine:
    assets = Assets.open(SaesteerConfig(sites=(SITE,), inline_rows=2))
    return Engine(
        assets, width=WIDTH, layers=2, dtype=torch.float32, device=torch.device("cpu"), max_rows=4, max_tokens=64
    )


def admit(engine: Engine, row: int, vector: list[float] | None) -> None:
    spec = {"edits": [{"op": "add", "site": SITE, "vector": vector}]}
    engine.fill(row, None if vector is None else row_of(engine, spec, 4))


def schedule(engine: Engine, rows: list[int] | torch.Tensor, lengths: list[int], *, changed: bool = True) -> list[int]:
    """The row of each token that the list has."""
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    engine.schedule(rows, 0, starts, len(lengths), sum(lengths), np.ones(1, dtype=np.int32), changed=changed)
    return [row for _, row, tokens, _ in engine.work[1 : 1 + int(engine.work[0, 0])].tolist() for _ in range(tokens)]


def test_what_has_come_is_not_sent_again(engine: Engine) -> None:
    site = engine.sites[SITE]
    first, second = np.eye(2, WIDTH).tolist()
    admit(engine, 1, first)
    schedule(engine, [1], [1])
    slot = int(site.w_dec[:, 0].argmax())
    assert site.w_dec[slot].tolist() == site.w_enc[slot].tolist() == first
    for weights in (site.w_enc, site.w_dec):
        weights[slot] = 77.0
    engine.table[1, 15] = 77  # a word that nobody reads here
    admit(engine, 2, second)
    schedule(engine, [2, 1], [1, 1])
    engine.flush()
    assert (site.w_enc[slot] == 77).all() and (site.w_dec[slot] == 77).all() and engine.table[1, 15] == 77
    assert second in site.w_dec.tolist() and engine.table[2, 0] == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_list_is_written_with_types_that_were_not_warmed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    made: set[Any] = set()

    def map_(_: Any, rows: torch.Tensor, __: int, starts: torch.Tensor, *rest: Any) -> None:
        made.add((rows.dtype, starts.dtype, rest[-1]))  # what Triton makes a kernel for, beside what is always alike

    monkeypatch.setattr(ops, "map_", map_)
    rows = torch.tensor([1], dtype=dtype)
    engine.warm_map(rows, torch.zeros(2, dtype=torch.int32))
    warm, made = made, set()
    admit(engine, 1, [1.0] * WIDTH)
    engine.flush()
    schedule(engine, rows, [1])
    assert made
    assert made <= warm


def test_guessed_tokens_have_rows_of_their_own() -> None:
    """With the entries and slots of their request's row; what they count is apart, and can be dropped."""
    assets = Assets.open(SaesteerConfig(sites=(SITE,), inline_rows=1))
    size: dict[str, Any] = {"width": WIDTH, "layers": 2, "max_rows": 2, "max_tokens": 64, "drafts": 3}
    engine = Engine(assets, dtype=torch.float32, device=torch.device("cpu"), **size)
    every = [row for number in (1, 2) for row in (number, *engine.drafts_of(number))]
    assert sorted(every) == [*range(1, len(engine.table))], "each row is somebody's"
    admit(engine, 2, [1.0] * WIDTH)
    admit(engine, 1, [2.0] * WIDTH)  # there are slots for two vectors, as many as requests
    guesses = [*engine.drafts_of(2)]
    assert schedule(engine, [1, 2, *guesses[:2]], [2, 1, 1, 1]) == [1, 1, 2, *guesses[:2]]
    engine.positions[:5] = torch.tensor([4, 5, 7, 8, 9])
    stream = torch.zeros(5, WIDTH)
    engine.edit(engine.sites[SITE], stream)
    assert stream[:, 0].tolist() == pytest.approx([2.0, 2.0, 1.0, 1.0, 1.0])
    assert [int(engine.counted(row, 1)) for row in (1, 2, *guesses)] == [2, 1, 1, 1, 0]
    engine.forget_drafts()
    assert [int(engine.counted(row, 1)) for row in (1, 2, *guesses)] == [2, 1, 0, 0, 0]
    engine.fill(2, None)
    assert schedule(engine, [1, 2, *guesses], [1, 1, 1, 1, 1]) == [1], "they are empty with it"


def test_a_row_for_which_there_is_no_slot_is_empty_with_those_of_its_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    assets = Assets.open(SaesteerConfig(sites=(SITE,), inline_rows=1))
    size: dict[str, Any] = {"width": WIDTH, "layers": 2, "max_rows": 1, "max_tokens": 64, "drafts": 2}
    engine = Engine(assets, dtype=torch.float32, device=torch.device("cpu"), **size)
    rows = [1, *engine.drafts_of(1)]
    admit(engine, 1, [1.0] * WIDTH)
    assert schedule(engine, rows, [1, 1, 1]) == rows

    def gone(content: Any) -> None:
        raise Gone("a name was replaced")

    monkeypatch.setattr(engine.registry, "take", gone)
    with pytest.raises(Gone):
        admit(engine, 1, [2.0] * WIDTH)
    assert schedule(engine, rows, [1, 1, 1]) == []
