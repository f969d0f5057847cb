"""What goes wrong on a worker for one request ends that request, and engines that would not steer are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from saesteer import plugin
from saesteer.config.config import KEY, SaesteerConfig
from saesteer.engine.registry import Gone
from saesteer.errors import UnsupportedError
from saesteer.plugin.unservable import refuse
from saesteer.plugin.worker import worker
from saesteer.plugin.worker.steering import Steering
from tests.apart import hear
from tests.plugin.admitted import ADD, admitted
from tests.small_engine import make_engine
from tests.small_world import WIDTH

SPEC = {"edits": [ADD]}
OTHER = {"edits": [{**ADD, "vector": [2.0, *[1.0] * (WIDTH - 1)]}]}


@pytest.fixture
def steering(tmp_path: Path) -> Steering:
    return Steering(make_engine(tmp_path))


def arrive(steering: Steering, name: str, spec: Any, row: int) -> None:
    """As the V2 runner's add_request does."""
    request = admitted(steering.engine, spec, 4)
    request.req_id = name
    steering.add(request)
    steering.fill(name, row)


def test_reads_for_which_there_is_no_room_fail_their_requests_alone(
    steering: Steering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows stay until the scheduler ends them, as on ranks that read nothing."""
    arrive(steering, "reads", {"return": {"hidden": {"scope": {"prompt": True}}}}, 1)
    arrive(steering, "edits", SPEC, 2)
    starts, positions = np.array([0, 4, 8], np.int32), np.zeros(2, np.int32)
    steering.step = lambda: (starts, positions, torch.zeros(8, WIDTH))
    assert steering.look(["reads", "edits"], 8) and steering.read() is not None

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(steering.engine.captures, "bring", full)
    assert steering.read() is None
    assert steering.failed == {"reads": "broken: OutOfMemoryError: no room"}
    assert steering.snapshot().failed == steering.failed and set(steering.rows) == {"reads", "edits"}
    steering.forget("reads")
    assert not steering.failed


def test_a_rank_that_nobody_hears_ends_the_engine(steering: Steering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would go on, steered on the other ranks alone; what all ranks find for themselves is no reason."""
    steering.heard = False
    arrive(steering, "good", SPEC, 1)

    def lacking(error: Exception) -> Callable[..., Any]:
        def lack(*_: Any) -> Any:
            raise error

        return lack

    monkeypatch.setattr(steering.engine, "make_row", lacking(Gone("its name was replaced")))
    arrive(steering, "gone", OTHER, 2)
    assert steering.failed == {"gone": "gone"}
    monkeypatch.setattr(steering.engine, "make_row", lacking(torch.OutOfMemoryError("no room")))
    with pytest.raises(SystemExit, match=r"those of the others \(no room\)"):
        arrive(steering, "bad", OTHER, 3)
    monkeypatch.undo()
    monkeypatch.setattr(steering.engine, "fill", lacking(MemoryError("none left")))
    with pytest.raises(SystemExit, match="none left"):
        arrive(steering, "full", OTHER, 3)


JOB = """
from tests.apart import tell
import saesteer
try:
    saesteer.LLM("no such model", dictionaries={})
except saesteer.SaesteerError as error:
    tell([type(error).__name__, str(error)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["", "lora_filesystem_resolver"])
def test_an_engine_whose_plugins_leave_saesteer_out_is_refused_at_once(chosen: str) -> None:
    kind, told = hear("-c", JOB, environment={**os.environ, "VLLM_PLUGINS": chosen}, timeout=300)
    assert kind == "UnsupportedError"
    assert f"VLLM_PLUGINS is {chosen!r}, which leaves saesteer out" in told


def _parallel(**more: Any) -> Any:
    return SimpleNamespace(pipeline_parallel_size=1, distributed_executor_backend=None, **more)


def _scheduler(async_scheduling: bool = False, scheduler_cls: Any = None) -> Any:
    return SimpleNamespace(async_scheduling=async_scheduling, scheduler_cls=scheduler_cls)


def settings(**changes: Any) -> Any:
    """Of vLLM's config as much as is looked at; a stand-in, since each of these starts an engine of its own kind."""
    found: dict[str, Any] = {
        "parallel_config": _parallel(),
        "compilation_config": SimpleNamespace(pass_config=None),
        "model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        "cache_config": SimpleNamespace(),
        "scheduler_config": _scheduler(),
        "device_config": SimpleNamespace(device_type="cpu"),
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**found, **changes})


GUESSES: dict[str, Any] = {
    "speculative_config": SimpleNamespace(method="ngram"),
    "scheduler_config": _scheduler(),
}
STAGES = SimpleNamespace(pipeline_parallel_size=2, distributed_executor_backend="mp")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a KV connector": ({"kv_transfer_config": SimpleNamespace(kv_connector="ExampleConnector")}, "ExampleConnector"),
    "a pooling model": ({"model_config": SimpleNamespace(runner_type="pooling")}, "the pooling runner"),
    "pipeline parallelism by Ray": (
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=2, distributed_executor_backend="ray")},
        "pipeline parallelism and the executor ray .* --distributed-executor-backend mp",
    ),
    "engines that join": ({"parallel_config": _parallel(enable_elastic_ep=True)}, "elastic expert parallelism"),
    "engines that go on behind a failure": ({"parallel_config": _parallel(enable_fault_tolerance=True)}, "fault toler"),
    "pipeline parallelism and guesses": (
        {"parallel_config": STAGES, **GUESSES},
        "pipeline parallelism and speculative decoding .* switch one of them off",
    ),
    "a long pipeline": (
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=15, distributed_executor_backend="mp")},
        "a pipeline of 15 stages in this version; use tensor parallelism",
    ),
    "heads of other kinds": (
        {"speculative_config": SimpleNamespace(method="medusa")},
        "speculative decoding by medusa",
    ),
    "guesses on the V2 runner": ({**GUESSES, "use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    "guesses while the step before runs": (
        {**GUESSES, "scheduler_config": _scheduler(async_scheduling=True)},
        "speculative decoding and asynchronous scheduling .* --no-async-scheduling",
    ),
    "an encoder-decoder": (
        {"model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=True)},
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_start_by_name(name: str) -> None:
    refuse(settings())
    changes, told = REFUSED[name]
    with pytest.raises(UnsupportedError, match=told):
        refuse(settings(**changes))


class Own(Scheduler):
    """A scheduler of one's own, which does not say what vLLM's says."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return {}


@pytest.fixture
def configured(model_dir: str) -> Callable[..., Any]:
    """vLLM's config, made as its command line makes it in each process that begins a server or a node of one."""
    plugin.register()
    wire = SaesteerConfig(sites=("resid_post.3",)).to_json()

    def make(headless: bool = False, **options: Any) -> Any:
        some = EngineArgs(model_dir, enforce_eager=True, max_model_len=64, additional_config={KEY: wire}, **options)
        return some.create_engine_config(headless=headless)

    return make


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize("said", ["1", "01", "2"])
def test_a_front_end_without_python_is_refused_before_it_starts(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, said: str, headless: bool
) -> None:
    configured(headless)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", said)
    with pytest.raises(UnsupportedError, match="the Rust front end"):
        configured(headless)
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    configured(headless)


def test_a_worker_refuses_what_no_front_end_has(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(worker, "attach", lambda *found: attached.append(found))
    wrapper = SimpleNamespace(vllm_config=configured(), worker=object())
    begin = worker._attaching(lambda _: None)
    begin(wrapper)
    assert len(attached) == 1
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedError, match="the Rust front end"):
        begin(wrapper)
    assert len(attached) == 1


@pytest.mark.parametrize("own", [Own, f"{__name__}.Own"])
def test_a_scheduler_that_need_not_call_vllms_is_refused(configured: Callable[..., Any], own: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"--scheduler-cls tests\.plugin\.test_unservable\.Own\) .* leave"):
        configured(scheduler_cls=own)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllms_own_schedulers_are_served(configured: Callable[..., Any], asynchronous: bool) -> None:
    for found in (None, Scheduler, AsyncScheduler, "vllm.v1.core.sched.async_scheduler.AsyncScheduler"):
        config = configured(async_scheduling=asynchronous, scheduler_cls=found)
        assert hasattr(config.scheduler_config.get_scheduler_cls().update_from_output, "__wrapped__")


START = """
import json, sys
import saesteer
from tests.apart import tell

if __name__ == "__main__":
    model, told = sys.argv[1], []
    for options in json.loads(sys.argv[2]):
        if "kv_transfer_config" in options:
            from vllm.config import KVTransferConfig
            options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
        try:
            saesteer.LLM(model, sites=["resid_post.3"], enforce_eager=True, max_model_len=64, **options)
            told.append("started")
        except saesteer.UnsupportedError as error:
            told.append(str(error))
    tell(told)
"""
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "ExampleConnector"),
    ({"kv_offloading_size": 1.0}, "a KV connector"),
    ({"runner": "pooling"}, "the pooling runner"),
]


@pytest.mark.slow
def test_vllm_itself_is_refused_with_these_options(model_dir: str) -> None:
    told = hear("-c", START, model_dir, json.dumps([options for options, _ in OPTIONS]), timeout=600, fork=True)
    for said, (_, expected) in zip(told, OPTIONS, strict=True):
        assert expected in said and "saesteer cannot serve with" in said
