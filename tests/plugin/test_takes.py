"""What a worker remembers of a step for the next ones never shows in what it reads. Starts no engine."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.brought import Brought
from saesteer.engine.captures import Take
from saesteer.engine.engine import Engine
from saesteer.engine.readouts import Segment
from saesteer.engine.spool import Sink
from saesteer.plugin.worker.steering import Steering
from tests.plugin.test_recent import admitted
from tests.test_meaning import WIDTH, make_engine

NAMES = ("a", "b", "c", "d")
SITE = "resid_post.1"
PROMPT, MOST = 5, 24  # tokens of a prompt, and of a step
SPECS: list[dict[str, Any] | None] = [
    None,  # it is not steered
    {"edits": [{"op": "clamp", "dictionary": "rect", "feature": 1, "value": 50.0}]},  # it reads nothing
    {"return": {"activations": [{"site": SITE}], "hidden": True}},
    {"return": {"activations": [{"site": SITE, "scope": {"positions": [[2, 4], [7, 12]]}}]}},
    {"return": {"features": [{"dictionary": "jump", "top_k": 2, "scope": {"positions": [[6, 9], [11, None]]}}]}},
    {"return": {"activations": [{"site": SITE, "at": "after", "reduce": "mean", "scope": {"generated": True}}]}},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(Path(tmp_path_factory.mktemp("takes")))


class World:
    """Requests as a runner knows them, and the steering of their worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steering = engine, Steering(engine)
        self.at: dict[str, int] = {}  # positions of their next tokens
        self.draw = torch.Generator().manual_seed(7)

    def begin(self, name: str, spec: dict[str, Any] | None) -> None:
        request = admitted(self.engine, spec or {"edits": []}, PROMPT)
        request.req_id = name
        if spec is None:
            request.sampling_params.extra_args = {}
        self.steering.add(request)
        self.at[name] = 0

    def end(self, name: str) -> None:
        if self.at.pop(name, None) is not None:
            self.steering.forget(name)

    def preempt(self, name: str) -> None:
        if name in self.at:
            self.steering.restart(name, 0)
            self.at[name] = 0

    def step(self, tokens: dict[str, int]) -> None:
        """Each of these requests computes so many tokens."""
        batch = [name for name in tokens if name in self.at]
        if not batch:
            return
        for plane in self.engine.captures.of(SITE).values():
            plane[:MOST] = torch.randn(MOST, WIDTH, generator=self.draw)
        hidden = torch.randn(MOST, WIDTH, generator=self.draw)
        starts = np.cumsum([0, *(tokens[name] for name in batch)])
        positions = np.array([self.at[name] for name in batch])
        self.steering.look(batch, int(starts[-1]))
        self.steering.step = lambda: (starts, positions, hidden)
        anew = [
            Segment(name, row.readings, int(starts[number]), self.at[name], tokens[name])
            for number, name in enumerate(batch)
            if (row := self.steering.rows.get(name)) is not None and row.readings
        ]
        assert told(self.steering.read()) == told(self.engine.captures.read(anew, hidden))
        for name in batch:
            self.at[name] += tokens[name]


def told(brought: Brought | None) -> dict[str, Any]:
    """What would be sent if every answer ended."""
    found = {} if brought is None else brought.blobs(NAMES)
    return {name: sorted(blobs, key=lambda blob: blob[0]) for name, blobs in found.items()}


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_step_reads_what_it_would_read_anew(engine: Engine, data: st.DataObject) -> None:
    """Requests begin, end, are preempted and leave the batch for a while, between steps that go on as before."""
    world = World(engine)
    kept: dict[str, int] = {}
    for _ in range(data.draw(st.integers(3, 30))):
        what = data.draw(st.sampled_from(["go on"] * 4 + ["begin", "end", "preempt", "batch"]))
        name = data.draw(st.sampled_from(NAMES))
        if what == "begin":
            world.end(name)
            world.begin(name, data.draw(st.sampled_from(SPECS)))
        elif what == "end":
            world.end(name)
        elif what == "preempt":
            world.preempt(name)
        elif what == "batch":
            batch = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
            kept = {one: data.draw(st.integers(1, 6)) for one in batch}
        for _ in range(data.draw(st.integers(1, 3))):
            world.step(kept or dict.fromkeys(NAMES, 1))
            kept = dict.fromkeys(kept, 1)


def test_steps_that_go_on_as_before_take_nothing_anew(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    world, taken, take = World(engine), list[list[Segment]](), engine.captures.take

    def counted(segments: list[Segment]) -> Take:
        taken.append(segments)
        return take(segments)

    monkeypatch.setattr(engine.captures, "take", counted)
    for name, spec in zip("ab", SPECS[2:4], strict=True):
        world.begin(name, spec)
    world.step({"a": PROMPT, "b": PROMPT})
    for _ in range(10):
        world.step({"a": 1, "b": 1})
    # World looks anew in each step; beside that: the prompts, positions 5, 7 and 12, where b begins and ends to read.
    assert len(taken) - 11 == 4


def test_who_has_ended_holds_no_file(engine: Engine, tmp_path: Path) -> None:
    """Also where no step follows: an idle engine would keep the room of a deleted file on the disk."""
    world = World(engine)
    world.begin("a", SPECS[2])
    (tmp_path / "rows").touch()
    sink = Sink(str(tmp_path / "rows"), 0, 100)
    number = sink.file
    world.steering._sinks._open["a"] = {0: sink}
    del sink
    world.steering.look(["a"], 1)
    world.steering.step = lambda: (np.array([0, 1]), np.array([0]), torch.zeros(MOST, WIDTH))
    brought = world.steering.read()
    world.end("a")
    assert brought is not None
    brought.blobs(["a"])  # waits until the row is written
    del brought
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
