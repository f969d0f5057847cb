"""Counts and doses on their way from the device into an answer's ``saesteer``. Knows no text and no HTTP.

They ride home with what travels anyway, since asking a worker would wait for its engine between two steps:
    device     a step's last op writes the counters of all rows into memory of the host (ops.publish_)
    worker     sample_tokens: where those of the step's steered requests are leaves with its output
    scheduler  update_from_output: a request's last output takes its own along, in kv_transfer_params
    front end  OutputProcessor: they are taken out of there, into ``saesteer`` of the request's CompletionOutput

Beside them goes a word for each request that has failed on the worker (failures.py). A step in which nobody is steered
copies nothing, and an output that is not steered is left as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from saesteer.config.config import KEY
from saesteer.engine import doses
from saesteer.engine.engine import Published
from saesteer.engine.table import Row
from saesteer.kernels import layout
from saesteer.planning.applied import count
from saesteer.plugin.results import failures, metrics


class Table(NamedTuple):
    """What leaves with a step's output, as it is sent from process to process."""

    names: list[str]  # of the steered requests
    counted: NDArray[np.int32]  # [requests, 1 + counters]: cached tokens, and then the counters of each
    failed: Mapping[str, str]  # a word for each request that has failed
    stops: frozenset[str]  # requests with stop strings, which the front end finds: any output may be the last


@dataclass(frozen=True, slots=True)
class Listed:
    """The steered requests of a batch; it stays the same while they do."""

    names: list[str]
    cached: list[int]  # tokens of the prompt that they did not compute themselves
    rows: list[int]  # of the table
    contents: list[Row]  # of these rows
    stops: frozenset[str]  # those with stop strings
    refusing: bool = False  # a request with a dose above the limit fails
    width: int = field(init=False)  # counters of the request that has the most
    limited: tuple[NDArray[np.intp], NDArray[np.intp]] | None = field(init=False)  # where such doses are counted

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", max((row.counters for row in self.contents), default=0))
        places = [
            (number, 1 + row.edits + layout.DOSE_WORDS * site + layout.DOSE_LIMITED)
            for number, row in enumerate(self.contents if self.refusing else ())
            for site in range(row.doses)
        ]
        numbers, columns = np.array(places, dtype=np.intp).reshape(-1, 2).T
        object.__setattr__(self, "limited", (numbers, columns) if places else None)


@dataclass(slots=True)
class Snapshot:
    """A Table that is made when somebody asks for it, which in most steps nobody does.

    To be read when the host has this step's tokens, and layout.PUBLISHED steps later at the latest.
    """

    listed: Listed  # whose counters
    step: int  # as the device numbers it
    published: Published  # of this step
    kept: Mapping[str, Sequence[Tensor]]  # what some of them had counted in other rows
    lost: Mapping[str, str]  # a word for each request that has failed for another reason than its counters

    @property
    def names(self) -> list[str]:
        """As in Table."""
        return self.listed.names

    @property
    def stops(self) -> frozenset[str]:
        """As in Table."""
        return self.listed.stops

    @property
    def failed(self) -> Mapping[str, str]:
        """As in Table."""
        limited = self.listed.limited
        if limited is None or not (above := self.counted[limited]).any():
            return self.lost
        return {self.names[number]: failures.DOSE for number in limited[0][above > 0]} | dict(self.lost)

    @property
    def counted(self) -> NDArray[np.int32]:
        """As in Table."""
        listed = self.listed
        table = np.empty((len(listed.names), 1 + listed.width), dtype=np.int32)
        table[:, 0] = listed.cached
        if listed.rows:
            table[:, 1:] = self.published.read(self.step, listed.rows, listed.width)
        for name, several in self.kept.items():
            number = listed.names.index(name)
            row = listed.contents[number]
            own = table[number, 1 : 1 + row.counters]
            for more in several:
                own[:] = doses.merge(more.cpu().numpy(), own, row.edits)
        return table

    def __reduce__(self) -> tuple[type[Table], tuple[Any, ...]]:
        return Table, (self.names, self.counted, self.failed, self.stops)


def attach(worker: Any, steering: Any) -> None:
    """Let what is counted leave with each step's output of this worker."""
    sample = worker.sample_tokens
    # Tokens may still be on their way; then this is what vLLM will put them into.
    made_of = "model_runner_output" if hasattr(worker.model_runner, "model_state") else "_model_runner_output"

    @wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        if steering.kinds is None and not steering.failed:
            return sample(*args, **kwargs)
        snapshot = steering.snapshot()  # here, as the next step may be prepared before this one's tokens are there
        output = sample(*args, **kwargs)
        made = getattr(output, made_of, output)
        if made is not None and made.req_ids:  # vLLM's empty output is one object for all
            made.saesteer = snapshot
        return output

    worker.sample_tokens = sample_tokens


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any) -> Any:
        found: Table | Snapshot | None = getattr(model_runner_output, KEY, None)
        if found is None:
            return original(self, scheduler_output, model_runner_output, *args, **kw)
        failed, stops = found.failed, found.stops
        ended = failures.end(self, failed) if failed else []
        outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
        if self.finished_req_ids or stops:  # which most steps have not
            made = (one for batch in outputs.values() for one in batch.outputs)
            last = [one for one in made if one.finish_reason is not None or one.request_id in stops]
            ending = {one.request_id for one in last} | {request.request_id for request, _ in ended}
            counted = found.counted
            told = {name: counted[number].tobytes() for number, name in enumerate(found.names) if name in ending}
            for one in last:
                if one.request_id in told:
                    one.kv_transfer_params = {**(one.kv_transfer_params or {}), KEY: told[one.request_id]}
            failures.tell(outputs, ended, told)
        return outputs

    return update_from_output


@dataclass(slots=True)
class _Answer:
    """What a request's answer will say."""

    said: dict[str, Any]
    sites: tuple[str, ...] | None  # whose doses are told
    limit: float | None  # of a dose
    counted: bytes = b""  # as the last output with counters brought them

    def fill(self) -> None:
        """Put in what was counted."""
        if self.counted:
            found = np.frombuffer(self.counted, dtype=np.int32)
            cached, counters, edits = int(found[0]), found[1:], len(self.said["applied"])
            count(self.said["applied"], counters[:edits].tolist(), cached)
            if self.sites is not None:
                self.said["dose"] = doses.report(counters, edits, self.sites, limited=self.limit is not None)


def expect(
    params: Any,
    applied: Sequence[Mapping[str, Any]],
    sites: tuple[str, ...] | None = None,
    limit: float | None = None,
) -> None:
    """Remember what an answer will say beside the parameters that it is made with; this does not leave the process.

    Args:
        params: vLLM's own copy of a request's SamplingParams.
        applied: as saesteer.planning.applied makes it.
        sites: whose doses are measured, as saesteer.engine.doses names them; None: they are not told.
        limit: of a dose on this server.
    """
    params.saesteer_answer = _Answer({"applied": applied}, sites, limit)


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
        answer: _Answer | None = getattr(params, "saesteer_answer", None)
        if answer is not None:
            said: dict[str, Any] = {"applied": [dict(one) for one in answer.said["applied"]]}
            if answer.sites is not None:
                said["dose"] = []  # as it stays without a site
            self.request_states[request.request_id].saesteer = _Answer(said, answer.sites, answer.limit)
        return made

    return add_request


def _receiving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        failed = []
        for one in engine_core_outputs:
            brought = one.kv_transfer_params
            if brought is not None and (KEY in brought or failures.FAILED in brought):
                found = dict(brought)
                counted, word = found.pop(KEY, None), found.pop(failures.FAILED, None)
                one.kv_transfer_params = found or None
                state = self.request_states.get(one.request_id)
                answer: _Answer | None = getattr(state, "saesteer", None)
                if answer is not None:
                    answer.counted = counted or answer.counted
                    if word is not None:
                        answer.fill()
                        failed.append((state, failures.reason(word, answer.said.get("dose", ()), answer.limit)))
        if not failed:
            return original(self, engine_core_outputs, *args, **kwargs)
        failures.raise_there(self, failed)
        made = original(self, engine_core_outputs, *args, **kwargs)
        made.reqs_to_abort.extend(failures.end_with(self, failed))
        return made

    return process_outputs


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, token_ids, finish_reason, *args, **kwargs)
        answer: _Answer | None = getattr(self, "saesteer", None)
        if answer is not None:
            # One object for all pieces of a stream: vLLM merges pieces that wait, and keeps the first.
            made.saesteer = answer.said
            if finish_reason is not None:
                answer.fill()
                metrics.edited(answer.said["applied"])
        return made

    return _new_completion_output
