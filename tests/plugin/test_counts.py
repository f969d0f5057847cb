"""Counts of edited tokens, from the worker's bookkeeping over rows that change hands. Starts no engine of vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config import KEY
from saesteer.plugin import frontend, worker  # needs vLLM
from tests.test_meaning import TOKENS, WIDTH, make_engine

SPEC = {"edits": [{"op": "clamp", "dictionary": "rect", "feature": 1, "value": 50.0}]}


def request(name: str, tag: str = "t", spec: Any = SPEC) -> Any:
    """As much of vLLM's new request as the worker reads."""
    params = SimpleNamespace(extra_args={KEY: spec, frontend.TAG: tag})
    return SimpleNamespace(req_id=name, prompt_token_ids=[1] * 5, sampling_params=params)


@pytest.fixture
def steering(tmp_path: Path) -> worker.Steering:
    return worker.Steering(make_engine(tmp_path))


def run(steering: worker.Steering, row: int) -> None:
    """One step of TOKENS tokens for the request in a row."""
    engine = steering.engine
    engine.positions[:TOKENS] = torch.arange(TOKENS)
    engine.schedule(torch.tensor([row]), 0, torch.tensor([0, TOKENS], dtype=torch.int32), 1, TOKENS, 7)
    (site,) = engine.sites.values()
    engine.edit(site, torch.randn(TOKENS, WIDTH))


def start(steering: worker.Steering, name: str, row: int) -> None:
    found = steering.add(request(name))
    steering.place(name, row)
    steering.engine.fill(row, found)


def test_a_row_counts_for_its_own_request(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    run(steering, 1)
    steering.forget("a")
    start(steering, "b", 1)
    assert steering.counted("t") == {"a": [TOKENS - 1], "b": [0]}, "b had no step yet"
    assert steering.counted("t") == {}


def test_counts_go_on_where_a_row_was_given_up(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    run(steering, 1)
    start(steering, "b", 1)  # V1 gives rows to those that are in the batch
    run(steering, 1)
    steering.place("a", 2)
    steering.engine.fill(2, steering.rows["a"])
    run(steering, 2)
    run(steering, 2)
    assert steering.counted("t") == {"a": [3 * (TOKENS - 1)], "b": [TOKENS - 1]}


def test_a_request_that_begins_anew_counts_anew(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    run(steering, 1)
    steering.forget("a")  # preempted
    start(steering, "a", 2)
    run(steering, 2)
    assert steering.counted("t") == {"a": [TOKENS - 1]}


def test_what_nobody_asks_for_is_dropped(steering: worker.Steering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_DONE", 3)
    for n in range(9):
        steering.add(request(f"r{n}", f"tag{n}"))
        steering.place(f"r{n}", 1)
        steering.forget(f"r{n}")
    assert len(steering._done) == 3
    assert not (steering._places or steering._holders or steering._tags or steering._counts)
