"""Counts and doses on their way from the device into an answer's ``saesteer``. Knows no text and no HTTP.

They travel with vLLM's own outputs, since a question to a worker would wait for its engine between two steps:
    device     a step's last op writes the counters of all rows into host memory (ops.publish_)
    worker     sample_tokens: a snapshot of the steered requests' counters leaves with the step's output
    scheduler  update_from_output: a request's last output carries its counters, in kv_transfer_params
    front end  OutputProcessor: moves them into ``saesteer`` of the request's CompletionOutput

Each request that has failed on the worker sends a word along (failures.py). A step without a steered request copies
nothing, and outputs of other requests do not change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from saesteer.config.config import KEY
from saesteer.engine import doses
from saesteer.engine.engine import Published
from saesteer.engine.readouts import Brought
from saesteer.engine.table import Row
from saesteer.kernels import layout
from saesteer.planning.applied import count
from saesteer.plugin.results import failures, metrics, reads
from saesteer.plugin.wrap import Original, around, around_method_of


class Table(NamedTuple):
    """What leaves with a step's output, in the form that is sent between processes."""

    names: list[str]  # the steered requests
    counted: NDArray[np.int32]  # [requests, 1 + counters]: each request's cached tokens, then its counters
    failed: Mapping[str, str]  # failed request → word
    stops: frozenset[str]  # requests with stop strings: the front end finds these, so any output may be the last
    read: Brought | None = None  # what requests have read of this step


@dataclass(frozen=True, slots=True)
class SteeredBatch:
    """The steered requests of a batch; the same object for as long as the batch is the same."""

    names: list[str]
    cached: list[int]  # tokens of the prompt that came from the prefix cache
    rows: list[int]  # their rows of the table
    contents: list[Row]  # of these rows
    stops: frozenset[str]  # requests with stop strings
    refusing: bool = False  # a request with a dose above the limit fails
    width: int = field(init=False)  # the most counters that one of them has
    limited: tuple[NDArray[np.intp], NDArray[np.intp]] | None = field(init=False)  # where their counters are

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
    """A Table that is made only if somebody reads it, which in most steps nobody does.

    It can be read once the host has this step's tokens, and until layout.PUBLISHED steps later.
    """

    batch: SteeredBatch
    step: int  # the device's number of the step
    published: Published  # the counters of this step
    kept: Mapping[str, Sequence[Tensor]]  # request → its counters from rows that it had before
    lost: Mapping[str, str]  # request that failed for another reason than its counters → word
    read: Brought | None = None  # as in Table

    @property
    def names(self) -> list[str]:
        """As in Table."""
        return self.batch.names

    @property
    def stops(self) -> frozenset[str]:
        """As in Table."""
        return self.batch.stops

    @property
    def failed(self) -> Mapping[str, str]:
        """As in Table."""
        limited = self.batch.limited
        if limited is None or not (above := self.counted[limited]).any():
            return self.lost
        return {self.names[number]: failures.DOSE for number in limited[0][above > 0]} | dict(self.lost)

    @property
    def counted(self) -> NDArray[np.int32]:
        """As in Table."""
        batch = self.batch
        table = np.empty((len(batch.names), 1 + batch.width), dtype=np.int32)
        table[:, 0] = batch.cached
        if batch.rows and batch.width:
            table[:, 1:] = self.published.read(self.step, batch.rows, batch.width)
        for name, several in self.kept.items():
            number = batch.names.index(name)
            row = batch.contents[number]
            own = table[number, 1 : 1 + row.counters]
            for more in several:
                own[:] = doses.merge(more.cpu().numpy(), own, row.edits)
        return table

    def __reduce__(self) -> tuple[type[Table], tuple[Any, ...]]:
        return Table, (self.names, self.counted, self.failed, self.stops, self.read)


def attach(worker: Any, steering: Any) -> None:
    """Makes the counters leave with the output of each step of this worker."""
    # If the tokens are still on their way, this is the object that vLLM will put them into.
    made_of = "model_runner_output" if hasattr(worker.model_runner, "model_state") else "_model_runner_output"

    @around_method_of(worker)
    def sample_tokens(original: Original, *args: Any, **kwargs: Any) -> Any:
        if steering.kinds is None and not steering.failed:
            return original(*args, **kwargs)
        # Now, since the next step may be prepared before this one's tokens arrive.
        snapshot = steering.snapshot(steering.read() if worker.rank == 0 else None)
        output = original(*args, **kwargs)
        made = getattr(output, made_of, output)
        if made is not None and made.req_ids:  # all steps share vLLM's empty output
            made.saesteer = snapshot
        return output


@around
def _sending(
    original: Original, self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any
) -> Any:
    found: Table | Snapshot | None = getattr(model_runner_output, KEY, None)
    if found is None:
        outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
        reads.send(self, outputs, None, frozenset())  # somebody for whom it was kept may have been aborted
        return outputs
    failed, stops = found.failed, found.stops
    ended = failures.end(self, failed) if failed else []
    outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
    reads.send(self, outputs, found.read, stops)
    if self.finished_req_ids or stops:  # most steps have none
        made = (one for batch in outputs.values() for one in batch.outputs)
        last = [one for one in made if one.finish_reason is not None or one.request_id in stops]
        ending = {one.request_id for one in last} | {request.request_id for request, _ in ended}
        counted = found.counted
        brought = {name: counted[number].tobytes() for number, name in enumerate(found.names) if name in ending}
        for one in last:
            if one.request_id in brought:
                one.kv_transfer_params = {**(one.kv_transfer_params or {}), KEY: brought[one.request_id]}
        failures.add_outputs(outputs, ended, brought)
    return outputs


@dataclass(slots=True)
class Report:
    """What a request's answer will report; kept on its parameters, which vLLM owns, and never sent on."""

    applied: Sequence[dict[str, Any]]  # as saesteer.planning.applied makes it
    sites: tuple[str, ...] | None = None  # whose doses are reported (doses.sites_of); None: doses are not reported
    limit: float | None = None  # the server's limit for a dose
    counted: bytes = b""  # from the last output that had counters
    readouts: Sequence[reads.Reported] = ()  # what it reads
    read: reads.Rows | None = None  # of a choice, what has come of that
    fields: dict[str, Any] = field(default_factory=dict)  # of the answer

    def of_choice(self) -> "Report":
        """The report of one choice, with fields of its own."""
        fields: dict[str, Any] = {"applied": [dict(one) for one in self.applied]}
        # "dose" stays empty if there is no site.
        fields = fields if self.sites is None else fields | {"dose": []}
        return replace(self, fields=fields, read=reads.Rows(self.readouts, fields) if self.readouts else None)

    def fill(self) -> None:
        """Adds the counts and doses."""
        if self.counted:
            found = np.frombuffer(self.counted, dtype=np.int32)
            cached, counters, edits = int(found[0]), found[1:], len(self.applied)
            count(self.fields["applied"], counters[:edits].tolist(), cached)
            if self.sites is not None:
                self.fields["dose"] = doses.report(counters, edits, self.sites, limited=self.limit is not None)


@around
def _expecting(
    original: Original, self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
) -> Any:
    made = original(self, request, prompt, parent_req, *args, **kwargs)
    # Each of n answers has a copy of the parameters, without our part.
    params = request.sampling_params if parent_req is None else parent_req.sampling_params
    report: Report | None = getattr(params, "saesteer_report", None)
    if report is not None:
        self.request_states[request.request_id].saesteer = report.of_choice()
    return made


@around
def _receiving(original: Original, self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    failed = []
    for one in engine_core_outputs:
        sent = one.kv_transfer_params
        if sent is not None and (KEY in sent or failures.FAILED in sent or reads.READ in sent):
            found = dict(sent)
            counted, word = found.pop(KEY, None), found.pop(failures.FAILED, None)
            blobs = found.pop(reads.READ, ())
            one.kv_transfer_params = found or None
            state = self.request_states.get(one.request_id)
            answer: Report | None = getattr(state, "saesteer", None)
            if answer is not None:
                answer.counted = counted or answer.counted
                if answer.read is not None:
                    answer.read.add(blobs)
                if word is not None:
                    answer.fill()
                    failed.append((state, failures.reason(word, answer.fields.get("dose", ()), answer.limit)))
    if not failed:
        return original(self, engine_core_outputs, *args, **kwargs)
    failures.raise_there(self, failed)
    made = original(self, engine_core_outputs, *args, **kwargs)
    made.reqs_to_abort.extend(failures.end_with(self, failed))
    return made


@around
def _telling(original: Original, self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(self, token_ids, finish_reason, *args, **kwargs)
    answer: Report | None = getattr(self, "saesteer", None)
    if answer is not None:
        # One object for all pieces of a stream: vLLM merges waiting pieces and keeps the first one's.
        made.saesteer = answer.fields
        if answer.read is not None:
            answer.read.tell(self.prompt_len, self.detokenizer.num_output_tokens(), final=finish_reason is not None)
        if finish_reason is not None:
            answer.fill()
            metrics.edited(answer.fields["applied"])
    return made
