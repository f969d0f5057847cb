"""What stages of a pipeline have counted and read becomes one table, whatever a stage lacks."""

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import WorkerProc

from saesteer.engine.brought import Brought
from saesteer.kernels import layout
from saesteer.plugin.results import counts
from saesteer.plugin.results.counts import Table
from saesteer.plugin.results.gathering import Gathering, joined

NAMES = ["a", "b", "c", "d"]


def table(counted: dict[str, list[int]], failed: dict[str, str], parts: list[Any]) -> Table:
    width = max(map(len, counted.values()), default=0)
    rows = np.array([words + [0] * (width - len(words)) for words in counted.values()], np.int32).reshape(
        len(counted), width
    )
    return Table([*counted], rows, failed, frozenset(), Brought(parts) if parts else None)


@given(st.data())
def test_each_counter_is_the_one_of_its_stage(data: st.DataObject) -> None:
    """Cached tokens are told by all stages, a counter by one; a request may have failed on a stage alone."""
    stages = data.draw(st.integers(1, 3))
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
    whole = {name: data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)) for name in names}
    owners = {name: [data.draw(st.integers(0, stages - 1)) for _ in whole[name]] for name in names}
    lost = [set(data.draw(st.lists(st.sampled_from(names)))) if names else set() for _ in range(stages)]
    found = []
    for stage in range(stages):
        counted = {
            name: [
                word * (not at or owner == stage)
                for at, (word, owner) in enumerate(zip(words, owners[name], strict=True))
            ]
            for name, words in whole.items()
            if name not in lost[stage]
        }
        found.append(table(counted, dict.fromkeys(sorted(lost[stage]), f"on {stage}"), [f"part of {stage}"]))
    made = SimpleNamespace(saesteer=found[-1])
    outputs = [one for each in found[:-1] for one in (each, None)] + [made, None]  # two ranks a stage
    assert Gathering(2).aggregate(outputs, len(outputs) - 2) is made
    told = made.saesteer
    assert set(told.names) == whole.keys() - lost[-1]
    for name, words in zip(told.names, told.counted.tolist(), strict=True):
        if not any(name in one for one in lost):
            assert words[: len(whole[name])] == whole[name] and not any(words[len(whole[name]) :])
    assert told.failed.keys() == set().union(*lost)
    assert told.read is not None and sorted(map(str, told.read.made)) == [f"part of {n}" for n in range(stages)]


def test_steps_that_nobody_reports_are_left_as_they_are() -> None:
    plain = SimpleNamespace()
    assert Gathering(1).aggregate([None, plain], 1) is plain and not vars(plain)
    assert Gathering(1).aggregate([None, None], 1) is None


def test_nothing_read_stays_nothing() -> None:
    one = table({"a": [3, 0]}, {}, [])
    assert joined(one, one).read is None


class _Device:
    """One that runs its work only when somebody waits for an event."""

    def __init__(self) -> None:
        self.ran = False

    def event(self, *, blocking: bool) -> Any:
        assert blocking, "a thread that spins takes the time of those that work"

        def synchronize() -> None:
            self.ran = True

        return SimpleNamespace(record=lambda: None, synchronize=synchronize)


@dataclass
class _Snapshot:
    """Something that can be read only when the device has run."""

    device: _Device

    def __reduce__(self) -> Any:
        assert self.device.ran, "read before the device has run"
        return str, ("read",)


@pytest.mark.parametrize("threaded", [False, True], ids=["at once", "in a thread"])
def test_an_earlier_stage_is_read_when_its_device_has_run(monkeypatch: pytest.MonkeyPatch, threaded: bool) -> None:
    """vLLM's worker sends what it gets. On a GPU it gets it while the step still runs."""
    device, sent = _Device(), []
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    steering = SimpleNamespace(
        engine=SimpleNamespace(is_last=False, sites={"resid_post.0": None}, device=torch.device("cuda")),
        health=None,
        any=True,
        failed={},
        read=lambda: None,
        snapshot=lambda _: _Snapshot(device),
    )
    worker = SimpleNamespace(sample_tokens=lambda _: None, model_runner=None, is_driver_worker=True)
    counts.attach(worker, steering)
    place: Any = SimpleNamespace(
        use_async_scheduling=threaded,
        async_output_queue=SimpleNamespace(put=lambda output: WorkerProc.enqueue_output(place, output)),
        enqueue_output=lambda output: WorkerProc.enqueue_output(place, output),
        worker_response_mq=SimpleNamespace(enqueue=lambda result: sent.append(pickle.loads(pickle.dumps(result)))),
    )
    WorkerProc.handle_output(place, worker.sample_tokens(None))
    assert sent == [(WorkerProc.ResponseStatus.SUCCESS, "read")]


def test_a_pipeline_of_many_stages_reads_its_counts_in_time() -> None:
    """As many steps are under way as vLLM says, before the oldest was read: each needs a place of its own."""
    scheduler = SimpleNamespace(async_scheduling=True)
    for stages in (1, 2, 4, 8):
        parallel = SimpleNamespace(pipeline_parallel_size=stages)
        vllm: Any = SimpleNamespace(parallel_config=parallel, scheduler_config=scheduler, use_v2_model_runner=True)
        assert VllmConfig.max_concurrent_batches.fget(vllm) < layout.PUBLISHED
