"""The worker's side: dictionaries loaded with the model, rows filled as requests come, a work list before each forward.

Wraps, on instances after the worker has built its runner:
    runner.load_model                dictionaries and ops, counted with the weights in vLLM's memory budget
    worker.compile_or_warm_up_model  graphs for each set of sites (graphs.py), and every op must have been hit: a stale
                                     compiled graph is a failed start
    worker.sample_tokens             its output carries where the step's counts will be (counts.py)
    V2 runner: model_state.add_request, remove_request, prepare_inputs
    V1 runner: _update_states, _prepare_inputs, _dummy_run
"""

import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from saesteer import __version__
from saesteer.config.assets import Assets
from saesteer.engine.engine import Engine
from saesteer.engine.memory import described
from saesteer.errors import ConfigError
from saesteer.kernels import ops
from saesteer.models.families import other_widths
from saesteer.plugin import contract, stages, unservable
from saesteer.plugin.assets import assets_of, fingerprint
from saesteer.plugin.names import rpc
from saesteer.plugin.reasoning import cached_tokens, known_tokens
from saesteer.plugin.worker import counts, drafts, graphs, health, layers
from saesteer.plugin.worker.slots import Rows
from saesteer.plugin.worker.steering import Launched, Steering
from saesteer.plugin.wrap import Original, around, around_method_of

logger = logging.getLogger("vllm.saesteer")


def status(self: Any) -> dict[str, str]:
    """What this worker runs, for the handshake; called by name over collective_rpc."""
    assets = assets_of(self.vllm_config) if hasattr(self, "saesteer") else None
    return {"version": __version__, "fingerprint": "" if assets is None else fingerprint(assets)}


@around
def _attaching(original: Original, self: Any) -> None:
    original(self)
    assets = assets_of(self.vllm_config)
    if assets is not None:
        # Whoever made the config, and whoever answers: a front end without Python checks nothing.
        unservable.refuse(self.vllm_config, assets.config)
        attach(self.worker, assets)


def attach(worker: Any, assets: Assets) -> None:
    """Wrap this worker and its runner; the model is not loaded yet.

    Raises:
        UnsupportedError: a hook is missing or changed.
    """
    contract.install("worker")
    runner = worker.model_runner

    @around_method_of(runner)
    def load_model(original: Original, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        before = torch.cuda.memory_allocated()  # of this worker's device; 0 on a CPU
        worker.saesteer = steering = _build(runner, assets)
        # As in counts.py, no other rank reads. A read might find no room on one of them, and nothing would report
        # it: its request would go on, unsteered on this rank alone.
        steering.engine.answers = worker.is_driver_worker
        # Under torchrun each rank has a scheduler of its own, which no other one hears.
        parallel = runner.vllm_config.parallel_config
        apart = parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1
        steering.heard = worker.is_driver_worker and not apart
        if steering.engine.answers:
            steering.engine.warm_reads()
        if hasattr(runner, "model_state"):
            _wrap_v2(runner, runner.model_state, steering)
        else:
            _wrap_v1(runner, steering)
        counts.attach(worker, steering)
        if steering.health is not None:
            health.attach(runner, steering.health)
        # vLLM 0.26 plans the KV cache with this figure: memory_profiling(weights_memory=...) measures nothing else that
        # was there before its profiling run. Later releases subtract all memory in use, and only report the figure.
        if allocated := torch.cuda.memory_allocated() - before:
            runner.model_memory_usage += allocated
        return loaded

    @around_method_of(worker)
    def compile_or_warm_up_model(original: Original, *args: Any, **kwargs: Any) -> Any:
        graphs.attach(worker, worker.saesteer.engine, worker.saesteer.choice)
        times = original(*args, **kwargs)
        _check_hits(runner, worker.saesteer.engine)
        return times

    # Called by name over collective_rpc.
    worker.saesteer_status, worker.saesteer_names = partial(status, worker), partial(rpc.change_pins, worker)


def _build(runner: Any, assets: Assets) -> Steering:
    model_config, scheduler = runner.vllm_config.model_config, runner.vllm_config.scheduler_config
    speculative = runner.vllm_config.speculative_config
    for said in assets.memory(model_config.dtype.itemsize):
        logger.info("saesteer loads %s", said)
    for name, found in assets.vectors.items():
        for warning in (note for about, note in found.notes if about == "warning"):
            logger.warning("vector %s: %s", name, warning)
    engine = Engine(
        assets,
        width=model_config.get_hidden_size(),
        layers=model_config.hf_text_config.num_hidden_layers,
        other_widths=other_widths(model_config.hf_text_config),
        dtype=model_config.dtype,
        device=torch.device(runner.device),
        max_rows=scheduler.max_num_seqs,
        max_tokens=scheduler.max_num_batched_tokens,
        positions=runner.input_buffers.positions if hasattr(runner, "model_state") else runner.positions,
        drafts=0 if speculative is None else speculative.num_speculative_tokens,
        stages=stages.begins(runner.vllm_config),
        stage=stages.number(),
    )
    layers.attach(runner.get_model(), engine)
    layers.warm_up(runner.get_model(), engine)
    logger.info("saesteer holds %s", described(engine))
    logger.info("saesteer %s edits at %s", __version__, ", ".join(engine.sites) or "no site")
    return Steering(engine)


def _check_hits(runner: Any, engine: Engine) -> None:
    needed = {name: site.index for name, site in engine.sites.items()}
    needed |= {"the end of a step": engine.published} if needed else {}
    warm = any(tensor.data_ptr() in ops.hits for tensor in needed.values())
    if not warm and (needed or stages.number()):
        # An eager start warms nothing up, and on a later stage leaves no room for what the one before it sends.
        runner._dummy_run(1)
    missed = [name for name, tensor in needed.items() if tensor.data_ptr() not in ops.hits]
    if missed:
        raise ConfigError(
            f"saesteer's op never ran at {', '.join(missed)}: a stale compiled graph, or an unknown layer"
        )


def _wrap_v2(runner: Any, state: Any, steering: Steering) -> None:
    """The V2 runner: a request's state slot, plus one, is its row; slots and positions are on the device already."""
    engine = steering.engine
    warm: list[bool] = []  # the first batch is a dummy one, before any request

    def step() -> Launched | None:
        launched = runner.execute_model_state  # an ExecuteModelState
        if launched is None:
            return None
        batch = launched.input_batch
        return batch.query_start_loc_np, batch.num_computed_tokens_np, launched.hidden_states

    steering.step = step

    @around_method_of(state)
    def add_request(original: Original, req_index: int, new_req_data: Any) -> None:
        original(req_index, new_req_data)
        steering.choice.add(new_req_data)
        steering.add(new_req_data)
        steering.fill(new_req_data.req_id, req_index + 1, partial(cached_tokens, new_req_data))

    @around_method_of(state)
    def remove_request(original: Original, req_id: str) -> None:
        original(req_id)
        steering.choice.forget(req_id)
        steering.forget(req_id)

    @around_method_of(state)
    def prepare_inputs(original: Original, input_batch: Any, req_states: Any) -> Any:
        # A dummy batch has made-up ids but slots of live requests, so the ids decide.
        batch = input_batch
        slots, starts, tokens = batch.idx_mapping, batch.query_start_loc, batch.num_tokens
        if not warm:
            engine.warm_map(slots, starts)
            engine.find_borders(slots, 1, starts, 1, batch.input_ids)
            warm.append(True)
        changed = steering.look(batch.req_ids, tokens)
        if steering.health is not None:
            steering.health.begin(batch.req_ids, np.diff(batch.cu_num_logits_np))
        if changed:
            steering.choice.look(batch.req_ids)
        if steering.kinds is None:
            engine.rest()
        else:
            engine.schedule(
                slots, 1, starts, batch.num_reqs, tokens, steering.kinds, changed=changed, counting=steering.counting
            )
            if steering.parts:
                engine.find_borders(slots, 1, starts, batch.num_reqs, batch.input_ids)
        return original(input_batch, req_states)


def _wrap_v1(runner: Any, steering: Steering) -> None:
    """The V1 runner: batch slots move, so rows are our own, and their numbers come with what is new."""
    engine = steering.engine
    rows = Rows(engine.max_rows)
    numbers: list[int] = []  # rows of the last batch
    warm: list[bool] = []

    def step() -> Launched | None:
        launched, batch = runner.execute_model_state, runner.input_batch  # the first is V1's ExecuteModelState
        if launched is None and engine.is_last:
            return None
        hidden = launched.hidden_states if engine.is_last else None
        return runner.query_start_loc.np, batch.num_computed_tokens_cpu, hidden

    steering.step = step

    @around_method_of(runner)
    def _update_states(original: Original, scheduler_output: Any) -> Any:
        for request in scheduler_output.finished_req_ids:
            steering.forget(request)
            rows.release(request)
        for request in scheduler_output.scheduled_new_reqs:
            rows.release(request.req_id)
            steering.add(request)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request in cached.resumed_req_ids:
                    rows.release(request)
                    steering.restart(request, computed)
        return original(scheduler_output)

    def number(batch: list[str]) -> list[int]:
        """Give rows to the steered requests of a batch."""
        steered = [request for request in batch if request in steering.rows]
        taken, fresh = rows.take(steered)
        by_id = dict(zip(steered, taken, strict=True))
        for request in fresh:
            steering.fill(request, by_id[request], partial(known_tokens, runner.requests[request]))
        return [by_id.get(request, 0) for request in batch]

    @around_method_of(runner)
    def _prepare_inputs(original: Original, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        prepared = original(scheduler_output, *args, **kwargs)
        batch = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        tokens = scheduler_output.total_num_scheduled_tokens
        changed = steering.look(batch, tokens)
        guessed, steering.guesses = scheduler_output.scheduled_spec_decode_tokens, {}
        if steering.health is not None:
            steering.health.begin(batch, [1 + len(guessed.get(name, ())) for name in batch])
        if changed and steering.any:
            numbers = number(batch)
            steering.look(batch, tokens)  # once more: a request without its row has failed, and is steered no longer
        rows, starts = numbers, runner.query_start_loc.gpu
        if guessed and steering.any:  # also where nobody does anything at a site: hidden states are read
            begins, positions = runner.query_start_loc.np, runner.input_batch.num_computed_tokens_cpu
            rows, starts, steering.guesses = drafts.spread(engine, batch, numbers, begins, positions, guessed)
        if steering.kinds is None:
            engine.rest()
            return prepared
        engine.schedule(rows, 0, starts, len(rows), tokens, steering.kinds, changed=changed, counting=steering.counting)
        if steering.parts:
            engine.find_borders(numbers, 0, runner.query_start_loc.gpu, len(batch), runner.input_ids.gpu)
        return prepared

    @around_method_of(runner)
    def _dummy_run(original: Original, *args: Any, **kwargs: Any) -> Any:
        if not warm:
            nobody = torch.zeros(1, dtype=torch.int32, device=engine.device)
            engine.warm_map(nobody, runner.query_start_loc.gpu)
            engine.find_borders(nobody, 0, runner.query_start_loc.gpu, 1, runner.input_ids.gpu)
            warm.append(True)
        engine.rest()
        return original(*args, **kwargs)
