"""A request whose row cannot be filled, behind both runners' hooks: it ends alone. Starts no engine of vLLM."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.engine import Engine
from saesteer.kernels import ops
from saesteer.plugin.results import forms
from saesteer.plugin.worker import counts
from saesteer.plugin.worker.steering import Steering
from saesteer.plugin.worker.worker import _wrap_v1, _wrap_v2
from tests.plugin.admitted import admitted
from tests.small_engine import make_engine
from tests.small_world import NARROW, WIDTH

# Vectors of three names at one site, where requests may bring two.
NAMED = [{"op": "add", "vector": name, "site": "resid_post.1"} for name in ("any", "each", "one")]
ADD = [{"op": "add", "vector": [1.0] * WIDTH, "site": "resid_mid.1"}]


class World:
    """A worker's hooks, and steps in which each request of a batch has one token.

    Args:
        engine: the worker's.
        second: whether the runner is vLLM's V2.
    """

    def __init__(self, engine: Engine, *, second: bool) -> None:
        self.engine, self.steering, self.second = engine, Steering(engine), second
        self.runner, self.state = Mock(), Mock()
        self.output: Any = None
        self.runner.requests = {}
        if not second:
            del self.runner.model_state
            _wrap_v1(self.runner, self.steering)
        else:
            _wrap_v2(self.runner, self.state, self.steering)
        self.worker: Any = SimpleNamespace(model_runner=self.runner, is_driver_worker=True)
        self.worker.sample_tokens = lambda _: self.output
        counts.attach(self.worker, self.steering)
        self.slots: dict[str, int] = {}

    def step(self, batch: list[str], new: list[Any], ended: list[str]) -> forms.Table | None:
        """What leaves with the output of a step; it may travel to another process."""
        for one in new:
            self.slots[one.req_id] = len(self.slots)
            one.prefill_token_ids = one.prompt_token_ids
            self.runner.requests[one.req_id] = SimpleNamespace(
                prompt_token_ids=one.prompt_token_ids, output_token_ids=[], num_computed_tokens=0
            )
        starts = torch.arange(len(batch) + 1, dtype=torch.int32)
        ids = torch.ones(len(batch), dtype=torch.int32)
        if self.second:
            for name in ended:
                self.state.remove_request(name)
            for one in new:
                self.state.add_request(self.slots[one.req_id], one)
            about = {"req_ids": batch, "num_reqs": len(batch), "num_tokens": len(batch), "input_ids": ids}
            slots = torch.tensor([self.slots[name] for name in batch], dtype=torch.int32)
            self.state.prepare_inputs(SimpleNamespace(**about, idx_mapping=slots, query_start_loc=starts), None)
        else:
            cached = SimpleNamespace(resumed_req_ids=set(), req_ids=[], num_computed_tokens=[])
            told = SimpleNamespace(finished_req_ids=ended, scheduled_new_reqs=new, scheduled_cached_reqs=cached)
            told.total_num_scheduled_tokens, told.scheduled_spec_decode_tokens = len(batch), {}
            self.runner._update_states(told)
            self.runner.input_batch = SimpleNamespace(req_ids=batch, num_reqs=len(batch))
            self.runner.query_start_loc.gpu, self.runner.input_ids.gpu = starts, ids
            self.runner._prepare_inputs(told)
        self.engine.positions[: len(batch)] = 3
        for name in NARROW:
            self.engine.edit(self.engine.sites[name], torch.zeros(len(batch), WIDTH))
        ops.publish_(self.engine.counts, next(iter(self.engine.sites.values())).index, *self._published())
        made = SimpleNamespace(req_ids=batch)
        self.output = SimpleNamespace(model_runner_output=made) if self.second else made
        self.worker.sample_tokens(None)
        found = getattr(made, "saesteer", None)
        return None if found is None else pickle.loads(pickle.dumps(found))

    def _published(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.engine.steps, self.engine.published


@pytest.mark.parametrize("second", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("beside", [(), ("other",)], ids=["alone", "beside another"])
def test_a_request_whose_names_are_gone_ends_alone(tmp_path: Path, second: bool, beside: tuple[str, ...]) -> None:
    engine = make_engine(tmp_path)
    world = World(engine, second=second)

    def asked(name: str, edits: Any) -> Any:
        request = admitted(engine, {"edits": edits}, 4)
        request.req_id = name
        return request

    gone = asked("gone", NAMED)
    engine.pin({}, [*engine.registry._pins])
    others = [asked(name, ADD) for name in beside]
    table = world.step([*beside, "gone"], [*others, gone], [])
    assert table is not None and table.failed == {"gone": forms.GONE}
    assert table.names == [*beside]
    assert table.counted.tolist() == [[0, 1]] * len(beside)
    world.step([*beside], [], ["gone"]) if beside else None
    table = world.step([*beside, "late"], [asked("late", ADD)], [] if beside else ["gone"])
    assert table is not None and not table.failed
    assert dict(zip(table.names, table.counted[:, 1].tolist(), strict=True)) == dict.fromkeys(beside, 3) | {"late": 1}
    assert engine.steps.item() == engine._step, "host and device number the same steps"
