"""vLLM's sleep at level 2, with a CPU's memory: all that was made while the model was loaded is lost but its buffers.

test_reload.py has the real thing, on a GPU.
"""

import gc
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from torch import Tensor, nn

from saesteer.engine.engine import Engine
from saesteer.engine.readouts import Segment
from saesteer.plugin.worker.layers import Op
from tests.rows import row_of
from tests.small_engine import make_engine
from tests.small_world import HEADS, SITES, TOKENS, WIDTH

PROMPT = 4
SPECS: list[dict[str, Any]] = [
    {
        "edits": [
            {"op": "clamp", "dictionary": "abs", "feature": 2, "value": 3.0},
            {"op": "add", "vector": "any", "site": "resid_post.2", "when": {"probe": "any", "above": 0.0}},
            {"op": "clamp", "dictionary": "across", "feature": 1, "value": 2.0},
            {"op": "reconstruct", "dictionary": "over"},
        ],
        "return": {
            "dose": True,
            "features": [{"dictionary": "jump", "top_k": 3, "scope": {"positions": [[0, None]]}}],
            "probes": [{"probe": "any", "site": "resid_post.2", "scope": {"positions": [[0, None]]}}],
        },
    },
    {"edits": [{"op": "add", "vector": [0.5] * HEADS, "site": "z.2"}]},
]


def reachable(start: Any) -> list[Tensor]:
    """All tensors that an object holds, through whatever it holds."""
    seen, found, left = {id(start)}, [], [start]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                left.append(other)
    return found


class World:
    """An engine and a model that has nothing but its ops."""

    def __init__(self, folder: Path) -> None:
        self.engine: Engine = make_engine(folder, reads=SITES)
        self.engine.warm_reads()
        self.model = nn.ModuleList(Op(site, self.engine, None, paired=False) for site in self.engine.sites.values())
        self.loaded = reachable(self.engine)
        assert {id(self.engine.table), id(self.engine._nobody)} <= {*map(id, self.loaded)}
        self.rows: list[Any] = []

    def fill(self) -> None:
        for spec in SPECS:
            self.rows.append(row_of(self.engine, spec, PROMPT))
            self.engine.fill(len(self.rows), self.rows[-1])

    def step(self, seed: int) -> list[Any]:
        """Streams behind the ops, what was read and what was counted."""
        engine, count = self.engine, len(self.rows)
        starts = torch.arange(count + 1, dtype=torch.int32) * TOKENS
        engine.positions[: count * TOKENS] = torch.arange(TOKENS).repeat(count)
        kinds = self.rows[0].kinds | self.rows[1].kinds
        engine.schedule([*range(1, count + 1)], 0, starts, count, count * TOKENS, kinds)
        draw = torch.Generator().manual_seed(seed)
        made = []
        for name, op in zip(engine.sites, self.model, strict=True):
            x = torch.randn(count * TOKENS, HEADS if name.startswith("z.") else WIDTH, generator=draw)
            op(x)
            made.append(x)
        brought = engine.captures.read([Segment("a", self.rows[0].readings, 0, 0, TOKENS)], None)
        assert brought is not None
        step, published = engine.last_published()
        return [*made, brought.blobs(["a"]), published.read(step, [1, 2], self.rows[0].counters).tolist()]

    def sleep(self) -> None:
        """And wake up, as vLLM's GPU worker does."""
        saved = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for one in self.loaded:
            one.view(-1).view(torch.uint8).fill_(0x55) if one.is_contiguous() else one.t().view(-1).fill_(0x55)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved[name])


@pytest.mark.parametrize("before", [False, True], ids=["first used behind it", "used before"])
def test_nothing_that_a_step_reads_is_lost(tmp_path: Path, before: bool) -> None:
    awake, slept = World(tmp_path), World(tmp_path)
    for world in (awake, slept):
        if before:
            world.fill()
            world.step(1)
        if world is slept:
            world.sleep()
        if not before:
            world.fill()
    for seed in (2, 3):
        one, two = awake.step(seed), slept.step(seed)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, two, strict=True))
