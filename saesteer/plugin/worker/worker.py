"""The worker's side: dictionaries loaded with the model, rows filled as requests come, a work list before each forward.

Wraps, on instances after the worker has built its runner:
    runner.load_model                dictionaries and ops, inside vLLM's own accounting of weights
    worker.compile_or_warm_up_model  graphs for each set of sites (graphs.py), and every op must have been hit: a stale
                                     compiled graph is a failed start
    worker.sample_tokens             its output carries where the step's counts will be (counts.py)
    V2 runner: model_state.add_request, remove_request, prepare_inputs
    V1 runner: _update_states, _prepare_inputs, _dummy_run
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer import __version__
from saesteer.config.assets import Assets
from saesteer.config.config import KEY
from saesteer.engine.engine import Engine, Row
from saesteer.engine.readouts import Brought, Reading, Segment
from saesteer.engine.registry import Gone
from saesteer.errors import ConfigError
from saesteer.kernels import ops
from saesteer.models.families import other_widths
from saesteer.plugin import contract
from saesteer.plugin.door import frontend
from saesteer.plugin.names import rpc
from saesteer.plugin.results import counts, failures
from saesteer.plugin.worker import graphs, layers
from saesteer.plugin.worker.slots import Rows
from saesteer.plugin.wrap import Original, around, around_method_of

logger = logging.getLogger("vllm.saesteer")
_RECENT = 64  # rows that are remembered; one with a vector for every layer of a 27B model holds 1.3 MB


def status(self: Any) -> dict[str, str]:
    """What this worker runs, for the handshake; called by name over collective_rpc."""
    assets = frontend.assets_of(self.vllm_config) if hasattr(self, "saesteer") else None
    return {"version": __version__, "fingerprint": "" if assets is None else frontend.fingerprint(assets)}


@around
def _attaching(original: Original, self: Any) -> None:
    original(self)
    assets = frontend.assets_of(self.vllm_config)
    if assets is not None:
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
        worker.saesteer = steering = _build(runner, assets)
        if hasattr(runner, "model_state"):
            _wrap_v2(runner, runner.model_state, steering)
        else:
            _wrap_v1(runner, steering)
        counts.attach(worker, steering)
        return loaded

    @around_method_of(worker)
    def compile_or_warm_up_model(original: Original, *args: Any, **kwargs: Any) -> Any:
        graphs.attach(worker, worker.saesteer.engine, worker.saesteer.choice)
        times = original(*args, **kwargs)
        _check_hits(runner, worker.saesteer.engine)
        return times

    # Called by name over collective_rpc.
    worker.saesteer_status, worker.saesteer_names = partial(status, worker), partial(rpc.change_pins, worker)


def _build(runner: Any, assets: Assets) -> "Steering":
    model_config, scheduler = runner.vllm_config.model_config, runner.vllm_config.scheduler_config
    for said in assets.memory(model_config.dtype.itemsize):
        logger.info("saesteer loads %s", said)
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
    )
    layers.attach(runner.get_model(), engine)
    layers.warm_up(runner.get_model(), engine)
    engine.warm_reads()
    logger.info("saesteer %s edits at %s", __version__, ", ".join(engine.sites) or "no site")
    return Steering(engine)


def _check_hits(runner: Any, engine: Engine) -> None:
    if not engine.sites:
        return
    needed = {name: site.index for name, site in engine.sites.items()} | {"the end of a step": engine.published}
    if not any(tensor.data_ptr() in ops.hits for tensor in needed.values()):
        runner._dummy_run(1)  # an eager start warms nothing up
    missed = [name for name, tensor in needed.items() if tensor.data_ptr() not in ops.hits]
    if missed:
        raise ConfigError(
            f"saesteer's op never ran at {', '.join(missed)}: a stale compiled graph, or an unknown layer"
        )


class Steering:
    """The running requests that are steered, by id, and their last batch.

    Most steps of a server decode one more token for the requests of the previous step. What depends only on requests
    is computed when they change, so such a step only has to compare two lists.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.choice = graphs.Choice(engine.graph_sets)
        self.rows: dict[str, Row] = {}  # of steered requests only
        self._recent: dict[bytes, Row] = {}  # by plan
        self._places: dict[str, int] = {}  # table rows, by request
        self._holders: dict[int, str] = {}  # the same, by row
        self.failed: dict[str, str] = {}  # requests that cannot be served as they were admitted, and why
        self._kept: dict[str, list[Tensor]] = {}  # counters from rows that were given up
        self._cached: dict[str, int] = {}  # tokens that a request did not compute itself, when last admitted
        self._stops: set[str] = set()  # steered requests with stop strings
        self._listed: counts.SteeredBatch | None = None  # the last batch's steered requests, once requested
        self._batch: list[str] | None = None  # None: something has changed since
        self._tokens = 0  # in that batch
        self._readers: list[tuple[int, str, Sequence[Reading]]] = []  # of the last batch, with their places in it
        # What a runner knows of the step that it has launched, from its ExecuteModelState: where each request's tokens
        # begin, the positions of the first ones, and what lm_head multiplies.
        self.step: Callable[[], tuple[NDArray[Any], NDArray[Any], Tensor]] | None = None
        self.kinds: NDArray[np.int32] | None = None  # of the last batch's rows, by site; None: none of them is steered

    def add(self, request: Any) -> Row | None:
        """Remember a new request and return its row's content, or None if it is not steered."""
        self.forget(request.req_id)
        try:
            row = self._row_of(request)
        except Exception as exc:  # noqa: BLE001  # it ends this request, see fail
            self.fail(request.req_id, exc)
            return None
        if row is not None:
            self._batch = None
            self.rows[request.req_id] = row
            self._cached[request.req_id] = request.num_computed_tokens
            if request.sampling_params.stop:
                self._stops.add(request.req_id)
        return row

    def _row_of(self, request: Any) -> Row | None:
        """Make the row only if no recent request had the same plan."""
        admitted = (request.sampling_params.extra_args or {}).get(KEY)
        if admitted is None:
            return None
        plan = admitted["plan"]
        row = self._recent.pop(plan, None) or self.engine.make_row(admitted)
        if row is not None:
            self._recent[plan] = row  # the last used stands last
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return row

    def restart(self, request: str, computed: int) -> None:
        """A preempted request resumes after `computed` cached tokens: it holds no row, and its counts start again."""
        if request in self.rows:
            self._batch = None
            self._drop(request)
            self._cached[request] = computed

    def fail(self, request: str, exc: Exception) -> None:
        """End a request for which something went wrong here; an exception that leaves here ends the engine for all."""
        gone = isinstance(exc, Gone)
        logger.error("request %s could not be steered (%s)", request, exc, exc_info=None if gone else exc)
        self.forget(request)
        self.failed[request] = failures.GONE if gone else f"{failures.BROKEN}: {type(exc).__name__}: {exc}"[:500]

    def fill(self, request: str, row: int) -> None:
        """Give a table row to a request that is about to run: its own content, or none if it is not steered."""
        content = self.rows.get(request)
        try:
            if content is not None:
                self.place(request, row)
            self.engine.fill(row, content)
        except Exception as exc:  # noqa: BLE001  # it ends this request, see fail
            self.fail(request, exc)
            self.engine.fill(row, None)

    def place(self, request: str, row: int) -> None:
        """Assign a table row to a steered request; the request that held it before keeps its counts."""
        if row in self._holders:
            self._keep(self._holders[row])
        if request in self._places:
            self._keep(request)  # it returns to a different row
        self._places[request], self._holders[row] = row, request

    def _keep(self, request: str) -> None:
        row = self._leave(request)
        self._kept.setdefault(request, []).append(self.engine.counted(row, self.rows[request].counters))

    def _drop(self, request: str) -> None:
        self._kept.pop(request, None)
        if request in self._places:
            self._leave(request)

    def _leave(self, request: str) -> int:
        row = self._places.pop(request)
        del self._holders[row]
        self.engine.release(row)
        return row

    def forget(self, request: str) -> None:
        """Forget a request that has ended or will start again."""
        self.failed.pop(request, None)
        if request in self.rows:
            self._batch = None
            self._drop(request)
            del self.rows[request], self._cached[request]
            self._stops.discard(request)

    def read(self) -> Brought | None:
        """What the requests of the last batch read of its step, which has been launched."""
        if not self._readers or self.step is None:
            return None
        starts, positions, hidden = self.step()
        segments = [
            Segment(name, readings, int(starts[at]), int(positions[at]), int(starts[at + 1] - starts[at]))
            for at, name, readings in self._readers
            if name in self.rows
        ]
        return self.engine.captures.read(segments, hidden)

    def snapshot(self, read: Brought | None = None) -> counts.Snapshot:
        """What was counted so far for the steered requests of the last batch, with what they read of its step."""
        if self._listed is None:
            names = [request for request in self._batch or () if request in self._places]
            self._listed = counts.SteeredBatch(
                names,
                [self._cached[name] for name in names],
                [self._places[name] for name in names],
                [self.rows[name] for name in names],
                frozenset(self._stops.intersection(names)),
                refusing=self.engine.config.max_dose_action == "refuse",
            )
        # Copies, since they are read later.
        kept = {name: [*self._kept[name]] for name in self._listed.names if name in self._kept} if self._kept else {}
        return counts.Snapshot(self._listed, *self.engine.last_published(), kept, dict(self.failed), read)

    def look(self, batch: list[str], tokens: int) -> bool:
        """Whether this step differs from the last look's in more than its positions; `kinds` then holds its kinds.

        It is the same when the same requests, steered as before, have one token each again.
        """
        before, self._tokens = self._tokens, tokens
        if batch == self._batch:
            return not before == tokens == len(batch)
        self._batch, self._listed = list(batch), None
        found = [self.rows[request].kinds for request in batch if request in self.rows]
        self.kinds = reduce(or_, found) if found else None
        rows = ((at, name, self.rows.get(name)) for at, name in enumerate(batch))
        self._readers = [(at, name, row.readings) for at, name, row in rows if row is not None and row.readings]
        return True


def _wrap_v2(runner: Any, state: Any, steering: Steering) -> None:
    """The V2 runner: a request's state slot, plus one, is its row; slots and positions are on the device already."""
    engine = steering.engine
    warm: list[bool] = []  # the first batch is a dummy one, before any request

    def step() -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        launched = runner.execute_model_state
        batch = launched.input_batch
        return batch.query_start_loc_np, batch.num_computed_tokens_np, launched.hidden_states

    steering.step = step

    @around_method_of(state)
    def add_request(original: Original, req_index: int, new_req_data: Any) -> None:
        original(req_index, new_req_data)
        steering.choice.add(new_req_data)
        steering.add(new_req_data)
        steering.fill(new_req_data.req_id, req_index + 1)

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
            warm.append(True)
        changed = steering.look(batch.req_ids, tokens)
        if changed:
            steering.choice.look(batch.req_ids)
        if steering.kinds is None:
            engine.rest()
        else:
            engine.schedule(slots, 1, starts, batch.num_reqs, tokens, steering.kinds, changed=changed)
        return original(input_batch, req_states)


def _wrap_v1(runner: Any, steering: Steering) -> None:
    """The V1 runner: batch slots move, so rows are our own, and their numbers come with what is new."""
    engine = steering.engine
    rows = Rows(engine.table.shape[0] - 1)
    numbers: list[int] = []  # rows of the last batch
    warm: list[bool] = []

    def step() -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        launched, batch = runner.execute_model_state, runner.input_batch
        return runner.query_start_loc.np, batch.num_computed_tokens_cpu, launched.hidden_states

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
            steering.fill(request, by_id[request])
        return [by_id.get(request, 0) for request in batch]

    @around_method_of(runner)
    def _prepare_inputs(original: Original, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        prepared = original(scheduler_output, *args, **kwargs)
        batch = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        tokens = scheduler_output.total_num_scheduled_tokens
        changed = steering.look(batch, tokens)
        if steering.kinds is None:
            engine.rest()
            return prepared
        if changed:
            numbers = number(batch)
        starts: Tensor = runner.query_start_loc.gpu
        engine.schedule(numbers, 0, starts, len(batch), tokens, steering.kinds, changed=changed)
        return prepared

    @around_method_of(runner)
    def _dummy_run(original: Original, *args: Any, **kwargs: Any) -> Any:
        if not warm:
            engine.warm_map(torch.zeros(1, dtype=torch.int32, device=engine.device), runner.query_start_loc.gpu)
            warm.append(True)
        engine.rest()
        return original(*args, **kwargs)
