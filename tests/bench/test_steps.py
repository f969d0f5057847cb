"""The meter's arithmetic and table without a GPU: graphs and events share a clock of their own. It times no kernel."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import steps
from bench.asks import MODES
from bench.nodes import keep_graphs, kernels, plain
from saesteer.engine.graph_sets import Sites

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


def test_each_replay_of_the_second_has_neighbours(clock: Clock) -> None:
    times, longer = steps.turns(clock.graph(1.0), clock.graph(3.0), 4)
    assert (len(times), len(longer)) == (5, 4)
    assert times == pytest.approx([1000.0] * 5, rel=0.01) and longer == pytest.approx([2000.0] * 4, rel=0.01)


def test_kernels_differ_by_name_and_number() -> None:
    ours = Counter({"triton_red_fused_add_3": 2, "triton_red_fused_add_4": 1, "gemm": 5, "extra": 1})
    theirs = Counter({"triton_red_fused_add_1": 3, "gemm": 6})
    assert plain(ours)["triton_red_fused_add"] == 3
    assert plain(Counter({"triton_red_fused_add_edit__norm_7": 1, "edit_kernel": 1, "sm90_2": 1})) == {
        "triton_red_fused_add_norm": 1,
        "edit_kernel": 1,
        "sm90_2": 1,
    }
    assert [" ".join(line.split()) for line in steps.differences(ours, theirs)] == [
        "1 instead of 0 extra",
        "5 instead of 6 gemm",
    ]
    assert steps.differences(ours, ours) == []


def test_the_table_and_the_usual_modes(clock: Clock) -> None:
    assert set(steps.USUAL) <= {name for name, mode in MODES.items() if mode.engine == "saesteer"}
    given = steps.arguments(["--modes", "clamp", "--pairs", "3"])
    row = steps.measure(clock.graph(4.0), clock.graph(4.1), rounds=5, pairs=given.pairs)
    said = steps.table([{"mode": "clamp", "requests": 16, "prompt_tokens": 256, "sites": 34, "served": True, **row}])
    assert said.splitlines()[1].split()[:4] == ["clamp", "16", "256", "34"] and said.endswith("served")


def test_what_a_set_took_is_heard_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker.graphs import name_of

    line = "saesteer captured graphs for %s, in %.1f s and %.2f GiB"
    assert f'"{line}"' in (ROOT / "saesteer/plugin/worker/graphs.py").read_text()
    site = frozenset({"resid_post.1"})
    sets = (Sites(), Sites(reads=site), Sites(site), Sites(site | {"resid_post.2"}))
    captures, log = steps.Captures(), logging.getLogger("vllm.saesteer")
    with caplog.at_level(logging.ERROR, log.name), captures.listening():  # as VLLM_LOGGING_LEVEL may have it
        for at, one in enumerate(sets[:2]):  # too little memory for the third; the last one is vLLM's
            log.info(line, name_of(one), 1.25 + at, 0.081)
        log.info("saesteer captures no graphs for %s", "x")
    none = {"set_s": None, "set_gib": None}
    assert captures.of(sets) == [{"set_s": 1.2, "set_gib": 0.08}, {"set_s": 2.2, "set_gib": 0.08}, none, none]


def test_sets_have_a_table() -> None:
    taken = {"set": 1, "sites": 34, "kernels": 512, "set_s": 1.2, "set_gib": 0.08}
    said = steps.sets_table([taken, taken | {"set": 2, "set_s": None, "set_gib": None}])
    assert [line.split() for line in said.splitlines()[1:]] == [["1", "34", "512", "1.2", "0.08"], ["2", "34", "512"]]


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
