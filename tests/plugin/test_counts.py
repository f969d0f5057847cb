"""Counts and doses, from the device over rows that change hands into a step's output. Starts no vLLM engine."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY
from saesteer.dictionaries.vectors import from_inline
from saesteer.engine.encode import encode
from saesteer.engine.engine import Engine
from saesteer.kernels import layout, ops
from saesteer.language.spec import from_json
from saesteer.planning.digests import digest_of
from saesteer.planning.plan import Catalog, Direction
from saesteer.planning.planner import plan
from saesteer.plugin.results import forms
from saesteer.plugin.worker.steering import Steering  # needs vLLM
from tests.one_site import CODERS, PLACES, TOKENS, WIDTH, make_engine

INFOS = {name: replace(CODERS[name].info, site_in=site, site_out=site) for name, (_, site) in PLACES.items()}
CATALOG = Catalog(INFOS, sites=None, max_entries=64, vectors={"v": from_inline((1.0,) * WIDTH)})
SPEC = {"edits": [{"op": "clamp", "dictionary": "rect", "feature": 1, "value": 50.0}]}


def request(name: str, spec: Any = SPEC, computed: int = 0, stop: Sequence[str] = ()) -> Any:
    """As much of vLLM's new request as the worker reads."""
    found = from_json(spec)
    admitted = encode(plan(found, CATALOG, 5), CATALOG, dose=found.returns.dose)
    params = SimpleNamespace(extra_args={KEY: admitted}, stop=stop)
    return SimpleNamespace(req_id=name, prompt_token_ids=[1] * 5, sampling_params=params, num_computed_tokens=computed)


@pytest.fixture
def steering(tmp_path: Path) -> Steering:
    return Steering(make_engine(tmp_path))


def schedule(engine: Engine, rows: list[int], tokens: int) -> None:
    """A step of as many tokens for the request in each row."""
    starts = torch.arange(len(rows) + 1, dtype=torch.int32) * tokens
    engine.schedule(torch.tensor(rows), 0, starts, len(rows), len(rows) * tokens, np.full(1, 7, dtype=np.int32))


def publish(engine: Engine) -> None:
    """As the step's last op does."""
    (site,) = engine.sites.values()
    ops.publish_(engine.counts, site.index, engine.steps, engine.published)


def run(steering: Steering, name: str, row: int) -> list[int]:
    """One step of TOKENS tokens for the request in a row: what its output carries, cached tokens first."""
    engine = steering.engine
    steering.look([name, "plain"], TOKENS)
    engine.positions[:TOKENS] = torch.arange(TOKENS)
    schedule(engine, [row], TOKENS)
    (site,) = engine.sites.values()
    engine.edit(site, torch.randn(TOKENS, WIDTH))
    publish(engine)
    found: forms.Table = pickle.loads(pickle.dumps(steering.snapshot()))  # as it goes to the scheduler of many ranks
    assert (found.names, found.failed) == ([name], {})
    return list(found.counted[0].tolist())


def start(steering: Steering, name: str, row: int, computed: int = 0) -> None:
    found = steering.add(request(name, computed=computed))
    steering.place(name, row)
    steering.engine.fill(row, found)


DOSED = {**SPEC, "return": {"dose": True}}


def write(steering: Steering, row: int, largest: float, total: float, tokens: int, limited: int = 0) -> None:
    """As the device counts the doses of a row with one edit at one site."""
    block = np.zeros(layout.DOSE_WORDS, dtype=np.int32)
    floats = block.view(np.float32)
    floats[layout.DOSE_MAX], floats[layout.DOSE_SUM] = largest, total
    block[layout.DOSE_TOKENS], block[layout.DOSE_LIMITED] = tokens, limited
    steering.engine.counts[row, 0] = tokens
    steering.engine.counts[row, 1 : 1 + layout.DOSE_WORDS] = torch.from_numpy(block)


def doses(table: Any) -> tuple[float, float, list[int]]:
    floats = table[0, 2:].view(np.float32)
    whole = [int(table[0, 1]), *table[0, 2:][[layout.DOSE_TOKENS, layout.DOSE_LIMITED]].tolist()]
    return float(floats[layout.DOSE_MAX]), float(floats[layout.DOSE_SUM]), whole


def test_doses_of_several_rows_are_merged(steering: Steering) -> None:
    for row, (largest, total, tokens) in enumerate([(0.5, 1.5, 4), (2.0, 3.25, 5), (0.25, 0.5, 2)], start=1):
        found = steering.add(request("a", DOSED)) if row == 1 else steering.rows["a"]
        assert found is not None and (found.edits, found.doses) == (1, 1)
        steering.place("a", row)
        steering.engine.fill(row, found)
        schedule(steering.engine, [row], 1)
        write(steering, row, largest, total, tokens, limited=1)
        publish(steering.engine)
    steering.look(["plain", "a"], 2)
    left = steering.snapshot()
    assert (left.names, doses(left.counted), left.failed) == (["a"], (2.0, 5.25, [11, 11, 3]), {})


def test_a_dose_above_the_limit_fails_its_own_request_where_the_operator_refuses(steering: Steering) -> None:
    def run(limited: int) -> Mapping[str, str]:
        for row, name in enumerate("abc", start=1):
            found = steering.add(request(name, SPEC if name == "a" else DOSED))
            steering.place(name, row)
            steering.engine.fill(row, found)
        schedule(steering.engine, [1, 2, 3], 1)
        for row, name in enumerate("abc", start=1):
            write(steering, row, 2.0, 2.0, 3, limited=limited if name == "b" else 0)
        publish(steering.engine)
        steering.look(["c", "b", "a"], 3)
        return steering.snapshot().failed

    assert run(1) == {}
    steering.engine.config = replace(steering.engine.config, max_dose=1.0)
    assert run(1) == {}, "clamped on the device"
    steering.engine.config = replace(steering.engine.config, max_dose_action="refuse")
    assert run(1) == {"b": "dose"}
    assert run(0) == {}


def test_a_request_keeps_what_its_names_meant_and_its_slots_only_while_it_runs(steering: Steering) -> None:
    (site,) = steering.engine.sites
    engine, registry = steering.engine, steering.engine.registry
    pins = [{(site, bytes([n]) * 16): np.full(WIDTH, 1.0 + n, np.float32)} for n in range(3)]
    first = site, digest_of(Direction("v", None), CATALOG)
    engine.pin({first: np.ones(WIDTH, np.float32)}, ())
    waits = request("b", {"edits": [{"op": "add", "vector": "v", "site": site}]})
    runs = request("a", {"edits": [{"op": "add", "vector": "v", "site": site}]})
    steering.add(runs)
    steering.fill("a", 1)
    engine.pin(pins[0], {first})
    engine.pin(pins[1], pins[0])
    assert registry.usage()[site][0] == 2, "what runs, and what is pinned"
    words = steering.rows["a"].words.tolist()
    steering.add(waits)
    steering.fill("b", 2)
    assert set(steering.rows) == {"a", "b"} and not steering.failed
    engine.flush()
    assert words == engine.table[1, : len(words)].tolist() != engine.table[2, : len(words)].tolist()
    steering.forget("a")
    engine.pin(pins[2], pins[1])
    assert registry.usage()[site][0] == 1


def test_counters_of_another_step_are_refused(steering: Steering) -> None:
    start(steering, "a", 1)
    run(steering, "a", 1)
    old = steering.snapshot()
    for _ in range(layout.PUBLISHED - 1):
        run(steering, "a", 1)
    assert old.counted.tolist() == [[0, TOKENS - 1]]
    run(steering, "a", 1)
    ran = 1 + layout.PUBLISHED
    with pytest.raises(RuntimeError, match=f"counters of step 1 were asked for, but the memory holds step {ran}"):
        old.counted  # noqa: B018
    schedule(steering.engine, [1], TOKENS)
    with pytest.raises(RuntimeError, match=rf"of step {ran + 1} .* the memory holds step 2"):
        steering.snapshot().counted  # noqa: B018  (the op did not run)


def move(steering: Steering, name: str, row: int) -> None:
    """As V1 does for a request that is in the batch again, behind a step without it."""
    steering.look(["plain"], 1)
    steering.place(name, row)
    steering.engine.fill(row, steering.rows[name])


def test_counts_go_on_where_a_row_was_given_up(steering: Steering) -> None:
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


def test_who_never_ran_in_a_row_keeps_nothing_of_the_request_before(steering: Steering) -> None:
    """The device empties a row with the next work list: until then it holds the counts of somebody else."""
    start(steering, "a", 1)
    run(steering, "a", 1)
    start(steering, "b", 1)
    start(steering, "c", 1)
    assert run(steering, "c", 1) == [0, TOKENS - 1]
    move(steering, "b", 2)
    assert run(steering, "b", 2) == [0, TOKENS - 1]


def test_a_request_that_begins_anew_counts_anew(steering: Steering) -> None:
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
