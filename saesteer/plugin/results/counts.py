"""Counts and doses on their way from the device into an answer's ``saesteer``. Knows no text and no HTTP.

They travel with vLLM's own outputs, since a question to a worker would wait for its engine between two steps:
    device     a step's last op writes the counters of all rows into host memory (ops.publish_)
    worker     sample_tokens: a snapshot of the steered requests' counters leaves with the step's output
    scheduler  update_from_output: a request's last output carries its counters, in kv_transfer_params
    front end  OutputProcessor: moves them into ``saesteer`` of the request's CompletionOutput

Each request that has failed on the worker sends a word along (failures.py). A step without a steered request copies
nothing, unless --fail-fast looks at all of them (health.py), and outputs of other requests do not change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.engine import FinishReason

from saesteer.config.config import KEY
from saesteer.consumers.feed import Feed
from saesteer.engine import doses
from saesteer.engine.brought import Brought, Sent, sendable
from saesteer.engine.published import Published
from saesteer.engine.table import Row
from saesteer.errors import SpecError
from saesteer.kernels import layout
from saesteer.planning.answers import Reported, Rows, spooled
from saesteer.planning.applied import count
from saesteer.planning.plan import END
from saesteer.planning.rules import flags
from saesteer.plugin.reasoning import Border, found_in
from saesteer.plugin.results import consuming, drafts, earlier, failures, health, metrics, reads, rules, sending
from saesteer.plugin.results.drafts import Guessed, Guesses
from saesteer.plugin.results.kept import Room
from saesteer.plugin.results.spools import Spool
from saesteer.plugin.wrap import Original, around, around_method_of


class Table(NamedTuple):
    """What leaves with a step's output, in the form that is sent between processes."""

    names: list[str]  # the steered requests
    counted: NDArray[np.int32]  # [requests, 1 + counters]: each request's cached tokens, then its counters
    failed: Mapping[str, str]  # failed request → word
    stops: frozenset[str]  # requests with stop strings: the front end finds these, so any output may be the last
    read: Brought | None = None  # what requests have read of this step
    guessed: Mapping[str, Guessed] = {}  # what requests' guessed tokens have counted, beside that
    watched: int = 0  # tokens of repetition after which --fail-fast ends an answer; 0: it is off


@dataclass(frozen=True, slots=True)
class SteeredBatch:
    """The steered requests of a batch; the same object for as long as the batch is the same."""

    names: list[str]
    cached: list[int]  # tokens of the prompt that came from the prefix cache
    rows: list[int]  # their rows of the table; none where no site is
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
    guesses: Mapping[str, Guesses] = field(default_factory=dict)  # of the step
    watched: int = 0  # as in Table
    look: health.Look | None = None  # what was seen of the step then

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
        lost = self.lost if self.look is None else self.look.failed | dict(self.lost)
        limited = self.batch.limited
        if limited is None or not (above := self.counted[limited]).any():
            return lost
        return {self.names[number]: failures.DOSE for number in limited[0][above > 0]} | dict(lost)

    @property
    def counted(self) -> NDArray[np.int32]:
        """As in Table."""
        batch = self.batch
        table = np.zeros((len(batch.names), 1 + batch.width), dtype=np.int32)
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

    @property
    def guessed(self) -> Mapping[str, Guessed]:
        """As in Table."""
        found = {}
        for name, row in zip(self.names, self.batch.contents, strict=True) if self.guesses else ():
            if name in self.guesses:
                position, rows = self.guesses[name]
                found[name] = Guessed(position, row.edits, self.published.read(self.step, [*rows], row.counters))
        return found

    def __reduce__(self) -> Sent:
        return sendable(lambda: (Table, tuple(getattr(self, name) for name in Table._fields)))


def attach(worker: Any, steering: Any) -> None:
    """Makes the counters leave with the output of each step of this worker.

    On an earlier stage of a pipeline they are the output (earlier.py): gathering.py adds them to that of the last one.
    """
    engine = steering.engine
    if not (engine.is_last or engine.sites):
        return
    # If the tokens are still on their way, this is the object that vLLM will put them into.
    made_of = "model_runner_output" if hasattr(worker.model_runner, "model_state") else "_model_runner_output"

    @around_method_of(worker)
    def sample_tokens(original: Original, *args: Any, **kwargs: Any) -> Any:
        watched = steering.health is not None
        if not steering.any and not steering.failed and not watched:
            return original(*args, **kwargs)
        # Now, since the next step may be prepared before this one's tokens arrive. Each rank has the whole tensors. The
        # executor takes the first one's output, and under torchrun each rank has a scheduler that takes its own.
        snapshot = steering.snapshot(steering.read() if worker.is_driver_worker else None)
        ran = None if engine.is_last else earlier.mark(engine.device)
        output = original(*args, **kwargs)
        if watched:
            snapshot.watched, snapshot.look = engine.config.fail_fast_after, steering.health.take()
        if not engine.is_last:
            return earlier.told(snapshot, ran)
        made = getattr(output, made_of, output)
        if made is not None and made.req_ids:  # all steps share vLLM's empty output
            made.saesteer, snapshot.look = snapshot, snapshot.look and snapshot.look.held(made)
            if snapshot.guesses:
                steering.settle(snapshot.guessed, made)
        return output


@around
def _sending(
    original: Original, self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any
) -> Any:
    found: Table | Snapshot | None = getattr(model_runner_output, KEY, None)
    failures.forget_left(self, scheduler_output)
    if found is None:
        outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
        # Somebody for whom something was kept may have been aborted.
        rules.look(self, outputs, ())
        reads.hold(self, outputs, reads.send(self, outputs, None, frozenset()))
        return outputs
    failed, stops = found.failed, found.stops
    ended = failures.end(self, failed) if failed else []
    watching = rules.watched(self, found.read) if found.read is not None else []
    before = health.lengths(self, scheduler_output) if found.watched else []
    outputs = original(self, scheduler_output, model_runner_output, *args, **kw)
    rules.look(self, outputs, watching)
    health.end(self, outputs, before, found.watched)
    guessed = found.guessed
    tokens = drafts.tokens_of(sending.of(outputs), guessed) if guessed else {}
    ends = {name: guessed[name].end(count) for name, count in tokens.items()}
    owed = reads.send(self, outputs, found.read, stops, ends)
    if self.finished_req_ids or stops:  # most steps have none
        last = [one for one in sending.of(outputs) if one.finish_reason is not None or one.request_id in stops]
        ending = {one.request_id for one in last} | {request.request_id for request, _ in ended}
        counted = found.counted
        brought = {
            name: drafts.by_token(counted[number], guessed.get(name), tokens.get(name, 0), each=name in stops)
            for number, name in enumerate(found.names)
            if name in ending
        }
        for one in last:
            if one.request_id in brought:
                sending.carry(one, KEY, brought[one.request_id])
        failures.add_outputs(outputs, ended, brought)
    reads.hold(self, outputs, owed)
    return outputs


_OURS = frozenset({KEY, failures.FAILED, reads.READ, rules.FIRED})  # in kv_transfer_params


@dataclass(slots=True)
class Report:
    """What a request's answer will report; kept on its parameters, which vLLM owns, and never sent on."""

    applied: Sequence[dict[str, Any]]  # as saesteer.planning.applied makes it
    sites: tuple[str, ...] | None = None  # whose doses are reported (doses.sites_of); None: doses are not reported
    limit: float | None = None  # the server's limit for a dose
    counted: bytes = b""  # from the last output that had counters
    by_token: tuple[int, Sequence[bytes]] = (0, ())  # if that had several tokens: those before, and counters at each
    readouts: Sequence[Reported] = ()  # what it reads
    messages: Sequence[dict[str, Any]] | None = None  # where the chat's messages stand, if it reads
    # For what its choices keep, which take theirs one after the other.
    rooms: list[Room | Spool] = field(default_factory=list)
    # Of choices that have ended; all of them share this list, and so do all prompts of an HTTP body.
    kept: list[Room | Spool] = field(default_factory=list)
    read: Rows | None = None  # of a choice, what has come of that
    unwritten: SpecError | None = None  # why a choice has failed to keep something
    border: Callable[[], Border] | None = None  # what makes one, if it reads or edits parts of the answer
    parts: Border | None = None  # of a choice
    watches: bool = False  # it has rules
    fired: list[Sequence[Any]] = field(default_factory=list)  # of a choice, as planning/rules.py has it
    fields: dict[str, Any] = field(default_factory=dict)  # of the answer
    wanted: consuming.Wanted | None = None  # what consumers get
    feed: Feed | None = None  # of a choice, what goes to them
    silent: bool = False  # the answer says nothing: only the operator has asked for it

    def of_choice(self) -> "Report":
        """The report of one choice, with fields of its own."""
        fields: dict[str, Any] = {"applied": []}
        # "dose" stays empty if there is no site.
        fields = fields if self.sites is None else fields | {"dose": []}
        fields = fields if self.messages is None else fields | {"messages": [*self.messages]}
        fields = fields | {"flags": []} if self.watches else fields
        shown = [one for one in self.readouts if one.readout.shown]
        kept = sum(1 if spooled(one) else 1 + len(one.beside) for one in shown if not one.readout.inline)
        rooms, self.rooms[:kept] = self.rooms[:kept], []
        keep = [room.keep if isinstance(room, Room) else room for room in rooms]
        read = Rows(self.readouts, fields, keep) if shown else None
        parts = self.border and self.border()
        return replace(self, fields=fields, read=read, rooms=rooms, parts=parts, fired=[])

    def add(self, blobs: Sequence[Sequence[Any]]) -> None:
        """Adds what has been read."""
        if self.read is not None:
            self.read.add(blobs)
        if self.feed is not None:
            self.feed.add(blobs)

    def keep(self, counted: bytes | Sequence[bytes], tokens: int) -> None:
        """Keeps the counters of an output, or those at each of its tokens; the answer had so many before it."""
        several = [counted] if isinstance(counted, bytes) else counted
        self.counted, self.by_token = several[-1], (tokens, several)

    def cut(self, tokens: int) -> None:
        """The answer has ended with so many tokens: vLLM drops those behind a stop string."""
        before, several = self.by_token
        if len(several) > 1:
            self.counted = several[max(1, tokens - before) - 1]

    def forget(self) -> None:
        """Deletes what its request has kept, of which nobody will learn, and gives its own rooms up.

        They would be given up as soon as nobody holds them, but an exception's frames may, until garbage is collected.
        """
        for room in (*self.kept, *self.rooms):
            room.remove()
        self.kept.clear()

    def begin(self) -> None:
        """Says what was applied; with the answer's first piece, as no request waits for it."""
        if not self.fields["applied"]:
            self.fields["applied"] += [dict(one) for one in self.applied]

    def fill(self, border: int = END, end: int = END) -> None:
        """Adds the counts and doses. Arguments as of ``count``."""
        self.begin()
        if self.counted:
            found = np.frombuffer(self.counted, dtype=np.int32)
            cached, counters, edits = int(found[0]), found[1:], len(self.applied)
            count(self.fields["applied"], counters[:edits].tolist(), cached, border, end)
            if self.sites is not None:
                self.fields["dose"] = doses.report(counters, edits, self.sites, limited=self.limit is not None)


@around
def _expecting(
    original: Original, self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
) -> Any:
    known = request.request_id in self.request_states
    made = original(self, request, prompt, parent_req, *args, **kwargs)
    # Each of n answers has a copy of the parameters, without our part.
    params = request.sampling_params if parent_req is None else parent_req.sampling_params
    report: Report | None = getattr(params, "saesteer_report", None)
    if report is not None and not known:  # else it ends a session of streaming inputs
        state = self.request_states[request.request_id]
        state.saesteer = report.of_choice()
        if report.wanted is not None:
            state.saesteer.feed = report.wanted.feed(state)
    return made


@around
def _receiving(original: Original, self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    failed, keeping = [], []
    for one in engine_core_outputs:
        sent = one.kv_transfer_params
        if sent is not None and not _OURS.isdisjoint(sent):
            found = dict(sent)
            counted, word = found.pop(KEY, None), found.pop(failures.FAILED, None)
            blobs, fired = found.pop(reads.READ, ()), found.pop(rules.FIRED, ())
            one.kv_transfer_params = found or None
            state = self.request_states.get(one.request_id)
            answer: Report | None = getattr(state, "saesteer", None)
            if answer is not None:
                if answer.rooms:
                    keeping.append((state, answer))
                if counted:
                    answer.keep(counted, state.detokenizer.num_output_tokens())
                answer.add(blobs)
                if answer.feed is not None:
                    consuming.give(state, answer.feed, found_in(answer.parts, state))
                answer.fired += fired
                if fired and one.stop_reason == fired[-1][1]:
                    rules.keep_last_text(state.detokenizer)
                if word is not None:
                    answer.fill()
                    failed.append((state, failures.reason(word, answer.fields.get("dose", ()), answer.limit)))
            elif word is not None and state is not None:
                failed.append((state, failures.reason(word, (), None)))  # it asks for nothing of saesteer's
    if not failed and not keeping:
        return original(self, engine_core_outputs, *args, **kwargs)
    failures.raise_there(self, failed)
    made = original(self, engine_core_outputs, *args, **kwargs)
    unwritten = [(state, answer.unwritten) for state, answer in keeping if answer.unwritten is not None]
    failures.raise_there(self, unwritten)
    for state, _ in (*failed, *unwritten):
        if (report := getattr(state, "saesteer", None)) is not None:
            report.forget()
    made.reqs_to_abort.extend(failures.end_with(self, [*failed, *unwritten]))
    return made


def _is_whole(finish_reason: Any) -> bool:
    """Whether an answer has ended, and its client still waits for it."""
    return finish_reason is not None and finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)


@around
def _telling(original: Original, self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(self, token_ids, finish_reason, *args, **kwargs)
    answer: Report | None = getattr(self, "saesteer", None)
    if answer is not None:
        answer.begin()
        # One object for all pieces of a stream: vLLM merges waiting pieces and keeps the first one's.
        if not answer.silent:
            made.saesteer, made.saesteer_feed = answer.fields, answer.feed
            if answer.feed is not None:
                made.saesteer_forget = answer.forget
        border = found_in(answer.parts, self)
        generated, final = self.detokenizer.num_output_tokens(), _is_whole(finish_reason)
        if answer.read is not None:
            try:
                answer.read.tell(self.prompt_len, generated, final=final, border=border, cached=self.num_cached_tokens)
            except OSError as error:
                answer.unwritten = failures.unwritten(error)
            if final:
                answer.kept += answer.rooms
        if finish_reason is not None:
            answer.cut(generated)
            # The last token was no input; an answer without a token ends in its prompt.
            end = self.prompt_len + max(0, generated - 1)
            answer.fill(border, end)
            metrics.edited(answer.fields["applied"])
            if answer.watches:
                answer.fields["flags"] += flags(answer.fired, end)
                metrics.fired(op for op, _, position in answer.fired if position < end)
                if not generated:
                    rules.fill_prompt_logprobs(self)
            if answer.feed is not None:
                consuming.finish(self, answer.feed, finish_reason, border)
    return made
