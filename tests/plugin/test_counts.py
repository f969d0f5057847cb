"""Counts of edited tokens, from the device over rows that change hands into a step's output. Starts no vLLM engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config import KEY
from saesteer.plugin import counts, worker  # needs vLLM
from tests.test_meaning import TOKENS, WIDTH, make_engine

SPEC = {"edits": [{"op": "clamp", "dictionary": "rect", "feature": 1, "value": 50.0}]}


def request(name: str, spec: Any = SPEC, computed: int = 0) -> Any:
    """As much of vLLM's new request as the worker reads."""
    params = SimpleNamespace(extra_args={KEY: spec})
    return SimpleNamespace(req_id=name, prompt_token_ids=[1] * 5, sampling_params=params, num_computed_tokens=computed)


@pytest.fixture
def steering(tmp_path: Path) -> worker.Steering:
    return worker.Steering(make_engine(tmp_path))


def run(steering: worker.Steering, name: str, row: int) -> list[int]:
    """One step of TOKENS tokens for the request in a row: what its output carries, cached tokens first."""
    engine = steering.engine
    steering.look([name, "plain"], TOKENS)
    engine.positions[:TOKENS] = torch.arange(TOKENS)
    engine.schedule(torch.tensor([row]), 0, torch.tensor([0, TOKENS], dtype=torch.int32), 1, TOKENS, 7)
    (site,) = engine.sites.values()
    engine.edit(site, torch.randn(TOKENS, WIDTH))
    names, table = steering.snapshot().table()
    assert names == [name]
    return list(table[0].tolist())


def start(steering: worker.Steering, name: str, row: int, computed: int = 0) -> None:
    found = steering.add(request(name, computed=computed))
    steering.place(name, row)
    steering.engine.fill(row, found)


def move(steering: worker.Steering, name: str, row: int) -> None:
    """As V1 does for a request that is in the batch again."""
    steering.place(name, row)
    steering.engine.fill(row, steering.rows[name])


def test_a_row_counts_for_its_own_request(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    assert run(steering, "a", 1) == [0, TOKENS - 1]
    assert run(steering, "a", 1) == [0, 2 * (TOKENS - 1)]
    steering.forget("a")
    start(steering, "b", 1, computed=3)
    assert run(steering, "b", 1) == [3, TOKENS - 1]
    steering.forget("b")
    assert not (steering._places or steering._holders or steering._kept or steering._cached or steering.rows)


def test_counts_go_on_where_a_row_was_given_up(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    run(steering, "a", 1)
    start(steering, "b", 1)  # V1 gives rows to those that are in the batch
    assert run(steering, "b", 1) == [0, TOKENS - 1]
    move(steering, "a", 2)
    assert run(steering, "a", 2) == [0, 2 * (TOKENS - 1)]
    move(steering, "a", 3)  # nobody has taken the other one
    assert run(steering, "a", 3) == [0, 3 * (TOKENS - 1)]
    start(steering, "c", 2)
    assert run(steering, "a", 3) == [0, 4 * (TOKENS - 1)]
    assert steering._holders == {1: "b", 2: "c", 3: "a"}


def test_a_request_that_begins_anew_counts_anew(steering: worker.Steering) -> None:
    start(steering, "a", 1)
    run(steering, "a", 1)
    steering.forget("a")  # preempted, V2
    start(steering, "a", 2, computed=2)
    assert run(steering, "a", 2) == [2, TOKENS - 1]
    start(steering, "b", 2)  # takes the row
    steering.restart("a", 4)  # preempted, V1
    move(steering, "a", 3)
    assert run(steering, "a", 3) == [4, TOKENS - 1]
    steering.restart("plain", 4)


class _Output:
    """A step's output of either kind, as much of it as is read."""

    def __init__(self) -> None:
        self.req_ids = ["a"]

    saesteer: Any


class _Waiting:
    def get_output(self) -> _Output:
        return _Output()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "asynchronous"])
def test_a_step_takes_counts_along_only_where_somebody_is_steered(steering: worker.Steering, late: bool) -> None:
    made: list[Any] = []

    def sample_tokens(grammar_output: Any) -> Any:
        made.append(_Waiting() if late else _Output())
        return made[-1]

    place = SimpleNamespace(sample_tokens=sample_tokens)
    counts.attach(place, steering)
    steering.look(["plain"], 1)
    output = place.sample_tokens(None)
    assert "get_output" not in vars(output) and "saesteer" not in vars(output)
    start(steering, "a", 1)
    run(steering, "a", 1)
    output = place.sample_tokens(None)
    run(steering, "a", 1)  # the next step is on its way before the host reads this one's
    names, table = (output.get_output() if late else output).saesteer
    assert (names, table.tolist()) == (["a"], [[0, TOKENS - 1]])
