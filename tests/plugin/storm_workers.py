"""The workers of a storm: saesteer's whole worker side around runners whose forward pass is made up.

Knows what the model says of each request's tokens, and neither what requests ask for nor what they are answered.
"""

import itertools
from collections.abc import Iterator, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from saesteer.engine.engine import Engine
from saesteer.kernels import ops
from saesteer.plugin.worker import counts, worker
from saesteer.plugin.worker.steering import Steering
from tests.plugin.storm_requests import SITES, Asked

Span = tuple[int, int]  # positions of one request


class _V1:
    """What the hooks see of vLLM's V1 runner: places in the batch move, and who is not scheduled leaves it."""

    def __init__(self, asked: Mapping[str, Asked]) -> None:
        self.asked = asked
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, num_computed_tokens_cpu=np.zeros(64, int))
        starts = np.zeros(65, np.int32)
        self.query_start_loc = SimpleNamespace(np=starts, gpu=torch.from_numpy(starts.copy()))
        self.input_ids = SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32))
        self.execute_model_state: Any = None

    def begin(self, step: Any) -> None:
        self._update_states(step)

    def batch(self, step: Any) -> list[str]:
        return [*self.input_batch.req_ids]

    def prepare(self, step: Any, batch: list[str], tokens: list[int]) -> None:
        self.input_ids.gpu[: len(tokens)] = torch.tensor(tokens)
        self._prepare_inputs(step)

    def launched(self, hidden: torch.Tensor) -> None:
        self.execute_model_state = SimpleNamespace(hidden_states=hidden)

    def _update_states(self, step: Any) -> None:
        batch, resumed = self.input_batch.req_ids, step.scheduled_cached_reqs.resumed_req_ids
        staying = step.num_scheduled_tokens.keys() - resumed - step.finished_req_ids
        for name in [name for name in batch if name not in staying]:
            place, last = batch.index(name), batch.pop()
            if last != name:
                batch[place] = last
        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            one = SimpleNamespace(prompt_token_ids=new.prompt_token_ids, output_token_ids=[])
            _know(one, new.num_computed_tokens, len(one.prompt_token_ids))
            self.requests[new.req_id] = one
            batch.append(new.req_id)
        for name, computed, said in _going_on(step):
            one, prompt = self.requests[name], self.asked[name].prompt
            one.output_token_ids = self.asked[name].ids[prompt:][:said]
            _know(one, computed, prompt + said)
            if name not in batch:
                batch.append(name)
        self.input_batch.num_reqs = len(batch)

    def _prepare_inputs(self, step: Any) -> None:
        names, starts = self.input_batch.req_ids, self.query_start_loc
        starts.np[1 : 1 + len(names)] = np.cumsum([step.num_scheduled_tokens[name] for name in names])
        starts.gpu.copy_(torch.from_numpy(starts.np))
        for place, name in enumerate(names):
            self.input_batch.num_computed_tokens_cpu[place] = self.requests[name].num_computed_tokens

    def _dummy_run(self) -> None:
        raise AssertionError("nobody asks for it")


class _V2:
    """What the hooks see of vLLM's V2 runner: a request has a slot as long as it is not preempted."""

    def __init__(self, asked: Mapping[str, Asked], slots: int, draw: Random) -> None:
        self.asked = asked
        self.requests: dict[str, Any] = {}
        self.model_state = SimpleNamespace(
            add_request=lambda slot, new: None, remove_request=lambda name: None, prepare_inputs=lambda batch, _: None
        )
        self.execute_model_state: Any = None
        self._free = draw.sample(range(slots), slots)
        self._prepared: Any = None

    def begin(self, step: Any) -> None:
        gone = [*sorted(step.finished_req_ids), *sorted(step.preempted_req_ids or ())]
        for name in [*gone, *(new.req_id for new in step.scheduled_new_reqs)]:
            if name in self.requests:
                self._free.append(self.requests.pop(name).slot)
                self.model_state.remove_request(name)
        for new in step.scheduled_new_reqs:
            self.requests[new.req_id] = one = SimpleNamespace(slot=self._free.pop(0))
            _know(one, new.num_computed_tokens, len(new.prefill_token_ids))
            self.model_state.add_request(one.slot, new)
        for name, computed, said in _going_on(step):
            _know(self.requests[name], computed, self.asked[name].prompt + said)

    def batch(self, step: Any) -> list[str]:
        scheduled = step.num_scheduled_tokens
        return sorted(scheduled, key=lambda name: (scheduled[name], self.requests[name].slot))

    def prepare(self, step: Any, batch: list[str], tokens: list[int]) -> None:
        ones = [self.requests[name] for name in batch]
        starts = np.cumsum([0, *(step.num_scheduled_tokens[name] for name in batch)]).astype(np.int32)
        self._prepared = SimpleNamespace(
            req_ids=batch,
            num_reqs=len(batch),
            num_tokens=len(tokens),
            idx_mapping=torch.tensor([one.slot for one in ones], dtype=torch.int32),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            num_computed_tokens_np=np.array([one.num_computed_tokens for one in ones]),
            input_ids=torch.tensor(tokens, dtype=torch.int32),
        )
        self.model_state.prepare_inputs(self._prepared, None)

    def launched(self, hidden: torch.Tensor) -> None:
        self.execute_model_state = SimpleNamespace(input_batch=self._prepared, hidden_states=hidden)


def _going_on(step: Any) -> Iterator[tuple[str, int, int]]:
    """Requests that are not new: the computed tokens of each, and those that it has been given."""
    found = step.scheduled_cached_reqs
    return zip(found.req_ids, found.num_computed_tokens, found.num_output_tokens, strict=True)


def _know(one: Any, computed: int, tokens: int) -> None:
    """What a runner knows of a request before a step: its computed tokens, and all that it has."""
    one.num_computed_tokens, one.tokens = computed, tokens


class Worker:
    """One worker of a stage, with all hooks.

    Args:
        engine: of the stage.
        v2: which of vLLM's runners it has.
        asked: all requests, by id.
        draw: decides about slots.
    """

    def __init__(self, engine: Engine, *, v2: bool, asked: Mapping[str, Asked], draw: Random) -> None:
        self.engine, self.asked = engine, asked
        self.steering = Steering(engine)
        self.runner: Any
        if v2:
            self.runner = second = _V2(asked, engine.max_rows, draw)
            worker._wrap_v2(second, second.model_state, self.steering)
        else:
            self.runner = _V1(asked)
            worker._wrap_v1(self.runner, self.steering)
        self._made: Any = None
        self._place = SimpleNamespace(
            sample_tokens=lambda _: self._made, model_runner=self.runner, is_driver_worker=True
        )
        counts.attach(self._place, self.steering)

    def launch(self, step: Any) -> tuple[Any, dict[str, Span]]:
        """Run a step: what it returns, and the positions of each request whose tokens hold; guesses may not."""
        self.runner.begin(step)
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT, {}
        names = self.runner.batch(step)
        tokens, positions, rows, hidden = list[int](), list[int](), list[Any](), list[Any]()
        sampled, spans = list[list[int]](), {}
        for name in names:
            one, known = self.asked[name], self.runner.requests[name]
            first = known.num_computed_tokens
            guessed = [*step.scheduled_spec_decode_tokens.get(name, ())]
            end = first + step.num_scheduled_tokens[name]
            sure = end - len(guessed)
            assert sure <= known.tokens, (name, sure, known.tokens)
            truth = zip(guessed, one.ids[sure:], strict=False)
            holds = sure + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], truth))
            # A step samples where it has all tokens: the next one, and one for each guess that holds.
            sampled.append(one.ids[sure : holds + 1] if sure == known.tokens else [])
            spans[name] = first, holds
            tokens += one.ids[first:sure] + guessed
            positions += range(first, end)
            for each, wrong, taken in ((one.rows, 3e5, rows), (one.hidden, 1e5, hidden)):
                taken += [each[first:holds], each[holds:end] * 1e6 + wrong]
        self._forward(step, names, tokens, positions, torch.cat(rows), torch.cat(hidden))
        places = {name: place for place, name in enumerate(names)}
        made = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        self._made = made if self.engine.is_last else None
        return self._place.sample_tokens(None), spans

    def _forward(self, step: Any, names: list[str], tokens: Any, positions: Any, rows: Any, hidden: Any) -> None:
        """Everything of a forward pass that saesteer has ops for."""
        engine = self.engine
        engine.positions[: len(positions)] = torch.tensor(positions)
        self.runner.prepare(step, names, tokens)
        self.runner.launched(hidden)
        for number, name in enumerate(SITES):
            if name in engine.sites:
                engine.edit(engine.sites[name], rows + number)
        last = next(iter(engine.sites.values()))
        ops.publish_(engine.counts, last.index, engine.steps, engine.published)
