"""What a worker remembers of a step for the next ones never shows in what it reads. Starts no engine."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY
from saesteer.engine.brought import Brought
from saesteer.engine.engine import Engine
from saesteer.engine.readouts import Reading, Segment
from saesteer.engine.sinks import SPOOLS, address
from saesteer.planning.windows import rank
from saesteer.plugin.worker.steering import Steering
from tests.one_site import WIDTH, make_engine
from tests.plugin.admitted import admitted
from tests.plugin.spooling import filed

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
FILED: list[dict[str, Any]] = [
    {"return": {"activations": [{"site": SITE, "as": "handle", **how}]}}
    for how in (
        {"scope": {"generated": True}},
        {"scope": {"positions": [[2, 4], [5, 6], [9, None]]}, "at": "after"},
        {"scope": {"positions": [[0, 3]]}},
    )
]
START, ROOM = 64, 12  # byte of a file's first row, and the rows that it has room for


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(Path(tmp_path_factory.mktemp("takes")))


class File:
    """Of a request's only readout, and what it should hold."""

    def __init__(self, reading: Reading, path: Path) -> None:
        path.touch()
        self.reading, self.path = reading, path
        self.rows: dict[int, tuple[int, torch.Tensor]] = {}  # by position, which one it is, and its content

    def step(self, engine: Engine, first: int, position: int, tokens: int) -> None:
        """A step has these tokens of the request."""
        rows = engine.captures.of(SITE)["after" if self.reading.after else "before"][first : first + tokens]
        for row, at in zip(rows, range(position, position + tokens), strict=True):
            if any(lo <= at < hi for lo, hi in self.reading.windows):
                self.rows[at] = rank(self.reading.windows, at), row.clone()

    def check(self, told: Sequence[Any], end: int) -> None:
        """Up to a position it holds this, and these spans are of all positions."""
        rows = {at: row for at, row in self.rows.items() if at < end and row[0] < ROOM}
        assert {at for _, spans in told for lo, hi in spans for at in range(lo, min(hi, end))} == rows.keys()
        data = self.path.read_bytes()
        for where, row in rows.values():
            begin = START + row.nbytes * where
            assert data[begin : begin + row.nbytes] == row.view(torch.uint8).numpy().tobytes()


class World:
    """Requests as a runner knows them, and the steering of their worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steering = engine, Steering(engine)
        self.at: dict[str, int] = {}  # positions of their next tokens
        self.files: dict[str, File] = {}
        self.draw = torch.Generator().manual_seed(7)
        self.looks = 1  # at a batch: the V1 runner may look twice, as requests without a row fail in between

    def begin(self, name: str, spec: dict[str, Any] | None, path: Path | None = None) -> None:
        """A request comes; with a path, what it reads goes there."""
        request = admitted(self.engine, spec or {"edits": []}, PROMPT)
        request.req_id = name
        if spec is None:
            request.sampling_params.extra_args = {}
        if path is not None:
            request.sampling_params.extra_args[KEY][SPOOLS] = address([(0, str(path), START, ROOM)])
        row = self.steering.add(request)
        if path is not None:
            assert row is not None and row.readings[0] is not None
            self.files[name] = File(row.readings[0], path)
        self.at[name] = 0

    def end(self, name: str) -> None:
        if self.at.pop(name, None) is not None:
            self.steering.forget(name)
            self.files.pop(name, None)

    def preempt(self, name: str) -> None:
        if name in self.at:
            self.steering.restart(name, 0)
            self.at[name] = 0

    def guess(self, name: str, tokens: int, wrong: int) -> None:
        """A request computes several tokens, of which the last were guesses that do not hold."""
        self.step({name: tokens})
        if name in self.at:
            self.at[name] -= wrong

    def step(self, tokens: dict[str, int], ends: Collection[str] = ()) -> None:
        """Each of these requests computes so many tokens; some end then, of those that have files."""
        batch = [name for name in tokens if name in self.at]
        if not batch:
            return
        for plane in self.engine.captures.of(SITE).values():
            plane[:MOST] = torch.randn(MOST, WIDTH, generator=self.draw)
        hidden = torch.randn(MOST, WIDTH, generator=self.draw)
        starts = np.cumsum([0, *(tokens[name] for name in batch)])
        positions = np.array([self.at[name] for name in batch])
        for _ in range(self.looks):
            self.steering.look(batch, int(starts[-1]))
        self.steering.step = lambda: (starts, positions, hidden)
        anew = [
            Segment(name, row.readings, int(starts[number]), self.at[name], tokens[name])
            for number, name in enumerate(batch)
            if (row := self.steering.rows.get(name)) is not None and row.readings and name not in self.files
        ]
        brought = self.steering.read()
        assert told(brought) == told(self.engine.captures.read(anew, hidden))
        for number, name in enumerate(batch):
            if name in self.files:
                self.files[name].step(self.engine, int(starts[number]), self.at[name], tokens[name])
            self.at[name] += tokens[name]
        for name in self.files.keys() & ends:
            assert brought is not None
            self.files[name].check(filed(brought, name), self.at[name])
            self.end(name)


def told(brought: Brought | None) -> dict[str, Any]:
    """What would be sent if every answer ended."""
    found = {} if brought is None else brought.blobs(NAMES)
    return {name: sorted(blobs, key=lambda blob: blob[0]) for name, blobs in found.items()}


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_step_reads_what_it_would_read_anew(engine: Engine, tmp_path: Path, data: st.DataObject) -> None:
    """Requests begin, end, are preempted and leave the batch for a while, between steps that go on as before.

    What goes into a file is what was captured last of each position, and who ends it is told of all of them.
    """
    world = World(engine)
    world.looks = data.draw(st.sampled_from([1, 2]))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    kept: dict[str, int] = {}
    for turn in range(data.draw(st.integers(3, 30))):
        what = data.draw(st.sampled_from(["go on"] * 4 + ["begin", "end", "preempt", "batch", "guess"]))
        name = data.draw(st.sampled_from(NAMES))
        if what == "begin":
            world.end(name)
            if data.draw(st.booleans()):
                world.begin(name, data.draw(st.sampled_from(FILED)), folder / f"{turn}")
            else:
                world.begin(name, data.draw(st.sampled_from(SPECS)))
        elif what == "end":
            world.end(name)
        elif what == "preempt":
            world.preempt(name)
        elif what == "guess":
            world.guess(name, 5, data.draw(st.integers(0, 4)))
        elif what == "batch":
            batch = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
            kept = {one: data.draw(st.integers(1, 6)) for one in batch}
        for _ in range(data.draw(st.integers(1, 3))):
            tokens = kept or dict.fromkeys(NAMES, 1)
            world.step(tokens, tokens.keys() & data.draw(st.sampled_from([(), (), ("a", "b"), ("c",)])))
            kept = dict.fromkeys(kept, 1)


@pytest.mark.parametrize("looks", [1, 2])
def test_rows_follow_a_neighbour_that_needs_fewer_tokens_than_before(
    engine: Engine, tmp_path: Path, looks: int
) -> None:
    """The neighbour's prompt ends: who stands behind it has one token as before, in another place."""
    world = World(engine)
    world.looks = looks
    world.begin("b", None)
    world.begin("a", FILED[1], tmp_path / "rows")
    for tokens in (1, 1, 5, 1, 1, 1):
        world.step({"b": tokens, "a": 1})
    world.step({"b": 1, "a": 1}, "a")
