"""What stages of a pipeline have counted and read becomes one table, whatever a stage lacks."""

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import WorkerProc

from saesteer.kernels import layout
from saesteer.plugin.worker import counts


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
