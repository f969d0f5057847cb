"""Counts of edited tokens on their way from the device into an answer's ``saesteer``. Knows no text and no HTTP.

They ride home with what travels anyway, since asking a worker would wait for its engine between two steps:
    worker     sample_tokens: the counts of the step's steered requests leave with its output, copied beside the tokens
    scheduler  update_from_output: a request's last output takes its own along, in kv_transfer_params
    front end  OutputProcessor: they are taken out of there, into ``saesteer`` of the request's CompletionOutput

A step in which nobody is steered copies nothing, and an output that is not steered is left as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.applied import count
from saesteer.config import KEY
from saesteer.plugin import hooks, metrics

_Table = tuple[list[str], NDArray[np.int32]]  # requests, and for each of them its cached tokens, then its counts


_DEPTH = 4  # steps whose counts may be on their way at once; vLLM has two in flight at most


@dataclass(frozen=True, slots=True)
class Listed:
    """The steered requests of a batch."""

    names: list[str]
    cached: list[int]  # tokens of the prompt that they did not compute themselves
    rows: list[int]  # of the table
    width: int  # changes of the request that has the most


class Ring:
    """Places on the host for the counts of the last steps, made once: a step costs one copy, and no small kernel.

    Args:
        counts: of all rows, on the device; int32 [rows, counters].
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        shape, pinned = counts.shape, counts.is_cuda
        self._places = [torch.empty(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(_DEPTH)]
        self._events: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(_DEPTH)]  # type: ignore[no-untyped-call]
        self._next = 0

    def copy(self, rows: int) -> tuple[NDArray[np.int32], Any]:
        """The first rows as they stand now on the device's clock, and an event to wait for first, if there is one."""
        at, self._next = self._next, (self._next + 1) % _DEPTH
        place, event = self._places[at], self._events[at]
        place[:rows].copy_(self._counts[:rows], non_blocking=True)
        if event is not None:
            event.record()
        return place.numpy(), event


class Snapshot:
    """Counts as they stand when this is made, on the device's clock; the host has not waited for them yet.

    Args:
        listed: whose counts.
        ring: of the counts.
        kept: what some of them had counted in other rows.
    """

    def __init__(self, listed: Listed, ring: Ring, kept: Mapping[str, Tensor]) -> None:
        self._listed = listed
        self._kept = kept
        self._counts, self._ready = ring.copy(max(listed.rows, default=-1) + 1)

    def table(self) -> _Table:
        """Wait for the counts: names, and a row for each."""
        if self._ready is not None:
            self._ready.synchronize()
        listed = self._listed
        table = np.empty((len(listed.names), 1 + listed.width), dtype=np.int32)
        table[:, 0] = listed.cached
        table[:, 1:] = self._counts[listed.rows, : listed.width]
        for name, more in self._kept.items():
            table[listed.names.index(name), 1 : 1 + len(more)] += more.cpu().numpy()
        return listed.names, table


def attach(worker: Any, steering: Any) -> None:
    """Let what is counted leave with each step's output of this worker."""
    sample = worker.sample_tokens

    @wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if steering.kinds is not None:
            _put(output, steering.snapshot())
        return output

    worker.sample_tokens = sample_tokens


def _put(output: Any, snapshot: Snapshot) -> None:
    wait = getattr(output, "get_output", None)
    if wait is None:
        if getattr(output, "req_ids", None):  # vLLM's empty output is one object for all
            output.saesteer = snapshot.table()
        return

    @wraps(wait)
    def get_output() -> Any:
        made = wait()
        made.saesteer = snapshot.table()
        return made

    output.get_output = get_output


def install() -> None:
    """Put the wraps of scheduler and front end in place."""
    hooks.wrap("Scheduler.update_from_output", _sending)
    hooks.wrap("OutputProcessor.add_request", _expecting)
    hooks.wrap("OutputProcessor.process_outputs", _receiving)
    hooks.wrap("RequestState._new_completion_output", _telling)


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
        table: _Table | None = getattr(model_runner_output, KEY, None)
        if table is not None:
            numbers = {name: number for number, name in enumerate(table[0])}
            for batch in outputs.values():
                for one in batch.outputs:
                    number = numbers.get(one.request_id)
                    if number is not None and (one.finish_reason is not None or _may_end_later(self, one.request_id)):
                        one.kv_transfer_params = {**(one.kv_transfer_params or {}), KEY: table[1][number].tobytes()}
        return outputs

    return update_from_output


def _may_end_later(scheduler: Any, request: str) -> bool:
    """Stop strings are found by the front end: any output may turn out to be the last."""
    known = scheduler.requests.get(request)
    return known is None or bool(known.sampling_params.stop)


def expect(params: Any, applied: Sequence[Mapping[str, Any]]) -> None:
    """Remember what an answer will say beside the parameters that it is made with; this does not leave the process.

    Args:
        params: vLLM's own copy of a request's SamplingParams.
        applied: as saesteer.applied makes it.
    """
    params.saesteer_applied = applied


def _expecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_request(
        self: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        made = original(self, request, prompt, parent_req, request_index, queue, *args, **kwargs)
        # Of n answers each has a copy of the parameters, which leaves our part behind.
        params = request.sampling_params if parent_req is None else parent_req.sampling_params
        applied = getattr(params, "saesteer_applied", None)
        if applied is not None:
            self.request_states[request.request_id].saesteer = {"applied": [dict(one) for one in applied]}
        return made

    return add_request


def _receiving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for one in engine_core_outputs:
            if one.kv_transfer_params is not None and KEY in one.kv_transfer_params:
                found = dict(one.kv_transfer_params)
                cached, *counts = np.frombuffer(found.pop(KEY), dtype=np.int32).tolist()
                one.kv_transfer_params = found or None
                said = getattr(self.request_states.get(one.request_id), "saesteer", None)
                if said is not None:
                    count(said["applied"], counts, cached)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, token_ids, finish_reason, *args, **kwargs)
        said = getattr(self, "saesteer", None)
        if said is not None:
            # One object for all pieces of a stream: vLLM merges pieces that wait, and keeps the first.
            made.saesteer = said
            if finish_reason is not None:
                metrics.edited(said["applied"])
        return made

    return _new_completion_output
