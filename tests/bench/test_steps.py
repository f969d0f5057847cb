"""The meter's arithmetic without a GPU: graphs and events share a clock of their own. It times no kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import steps
from bench.nodes import keep_graphs, kernels

ROOT = Path(__file__).parents[2]


class Clock:
    """A GPU that runs one thing after the other, and gets slower all the time."""

    def __init__(self) -> None:
        self.now = 0.0  # ms

    def graph(self, ms: float) -> Any:
        clock = self

        class Graph:
            def replay(self) -> None:
                clock.now += ms * (1 + clock.now / 1e5)

        return Graph()

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        clock = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        return Event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return clock


def test_a_tenth_of_a_percent_shows_on_a_clock_that_drifts(clock: Clock) -> None:
    found = steps.measure(clock.graph(4.0), clock.graph(4.004), rounds=5, pairs=50)
    assert found["percent"] == pytest.approx(0.1, abs=0.005)
    assert found["low"] <= found["percent"] <= found["high"]
    assert found["us"] == pytest.approx(4.0, rel=0.15)
    drifted = clock.now
    assert drifted > 2000
    same = clock.graph(4.0)
    assert steps.measure(same, same, rounds=5, pairs=50)["percent"] == pytest.approx(0, abs=0.002)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_tells_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", torch.cuda.CUDAGraph)  # so that it is put back
    keep_graphs()
    x = torch.zeros(1000, device="cuda")
    x.mul_(2).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        x.mul_(2).add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [5.0] * 1000
    assert kernels(graph).total() == 3 and len(kernels(graph)) == 2
