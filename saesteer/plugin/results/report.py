"""Counts, doses and read-outs as they come into an answer's ``saesteer``, in the front end. Knows no HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.engine import FinishReason

from saesteer.consumers.feed import Feed
from saesteer.engine import doses
from saesteer.errors import SpecError
from saesteer.language.fields import Json
from saesteer.planning.answers import Reported, Rows
from saesteer.planning.applied import count
from saesteer.planning.plan import END
from saesteer.planning.rules import flags
from saesteer.plugin.reasoning import Border, found_in
from saesteer.plugin.results import consuming, errors, metrics, sending
from saesteer.plugin.results.forms import COUNTED, FAILED, FIRED, READ
from saesteer.plugin.results.spools import Spool
from saesteer.plugin.wrap import Original, around


@dataclass(slots=True)
class Report:
    """What a request's answer will report; kept on its parameters, which vLLM owns, and never sent on."""

    applied: Callable[[], Sequence[Json]]  # makes what an answer says, without counts
    sites: tuple[str, ...] | None = None  # whose doses are reported (doses.sites_of); None: doses are not reported
    limit: float | None = None  # the server's limit for a dose
    counted: bytes = b""  # from the last output that had counters
    by_token: tuple[int, Sequence[bytes]] = (0, ())  # if that had several tokens: those before, and counters at each
    readouts: Sequence[Reported] = ()  # what it reads
    messages: Sequence[Json] | None = None  # where the chat's messages stand, if it reads
    # For what its choices keep, which take theirs one after the other.
    rooms: list[Spool] = field(default_factory=list)
    # Of choices that have ended; all of them share this list, and so do all prompts of an HTTP body.
    kept: list[Spool] = field(default_factory=list)
    read: Rows | None = None  # of a choice, what has come of that
    unwritten: SpecError | None = None  # why a choice has failed to keep something
    border: Callable[[], Border] | None = None  # what makes one, if it reads or edits parts of the answer
    parts: Border | None = None  # of a choice
    watches: bool = False  # it has rules
    fired: list[Sequence[Any]] = field(default_factory=list)  # of a choice, as planning/rules.py has it
    fields: Json = field(default_factory=dict)  # of the answer
    wanted: consuming.Wanted | None = None  # what consumers get
    feed: Feed | None = None  # of a choice, what goes to them
    silent: bool = False  # the answer says nothing: only the operator has asked for it

    def of_choice(self) -> "Report":
        """The report of one choice, with fields of its own."""
        fields: Json = {"applied": []}
        # "dose" stays empty if there is no site.
        fields = fields if self.sites is None else fields | {"dose": []}
        fields = fields if self.messages is None else fields | {"messages": [*self.messages]}
        fields = fields | {"flags": []} if self.watches else fields
        shown = [one for one in self.readouts if one.readout.shown]
        kept = sum(not one.readout.inline for one in shown)
        rooms, self.rooms[:kept] = self.rooms[:kept], []
        fed = self.wanted is not None
        read = Rows(self.readouts, fields, rooms, fed=fed) if shown or fed else None
        parts = self.border and self.border()
        return replace(self, fields=fields, read=read, rooms=rooms, parts=parts, fired=[])

    def add(self, blobs: Sequence[Sequence[Any]]) -> None:
        """Adds what has been read."""
        if self.read is not None:
            self.read.add(blobs)

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
            self.fields["applied"] += [dict(one) for one in self.applied()]

    def fill(self, border: int = END, end: int = END) -> None:
        """Adds the counts and doses. Arguments as of ``count``."""
        self.begin()
        if self.counted:
            found = np.frombuffer(self.counted, dtype=np.int32)
            cached, counters, edits = int(found[0]), found[1:], len(self.applied())
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
            state.saesteer.feed = report.wanted.feed(state, state.saesteer.read)
    return made


@around
def _receiving(original: Original, self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    failed, keeping = [], []
    for one in engine_core_outputs:
        if records := sending.carried(one):
            found = dict(records)
            counted, word, fired = found.get(COUNTED), found.get(FAILED), found.get(FIRED, ())
            state = self.request_states.get(one.request_id)
            answer: Report | None = getattr(state, "saesteer", None)
            if answer is not None:
                if answer.rooms:
                    keeping.append((state, answer))
                if counted:
                    answer.keep(counted, state.detokenizer.num_output_tokens())
                answer.add([blob for kind, blobs in records if kind == READ for blob in blobs])
                if answer.feed is not None:
                    consuming.give(state, answer.feed, found_in(answer.parts, state))
                answer.fired += fired
                if fired and one.stop_reason == fired[-1][1]:
                    keep_last_text(state.detokenizer)
                if word is not None:
                    answer.fill()
                    failed.append((state, errors.reason(word, answer.fields.get("dose", ()), answer.limit)))
            elif word is not None and state is not None:
                failed.append((state, errors.reason(word, (), None)))  # it asks for nothing of saesteer's
    if not failed and not keeping:
        return original(self, engine_core_outputs, *args, **kwargs)
    errors.raise_there(self, failed)
    made = original(self, engine_core_outputs, *args, **kwargs)
    unwritten = [(state, answer.unwritten) for state, answer in keeping if answer.unwritten is not None]
    errors.raise_there(self, unwritten)
    for state, _ in (*failed, *unwritten):
        if (report := getattr(state, "saesteer", None)) is not None:
            report.forget()
    made.reqs_to_abort.extend(errors.end_with(self, [*failed, *unwritten]))
    return made


def keep_last_text(detokenizer: Any) -> None:
    """Makes the last token's text stand in the answer: vLLM takes the token before a stop for a stop token."""
    update = detokenizer.update
    detokenizer.update = lambda new_token_ids, stop_terminated: update(new_token_ids, False)


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
        generated = self.detokenizer.num_output_tokens()
        final = finish_reason not in (None, FinishReason.ABORT, FinishReason.ERROR)  # and its client still waits for it
        if answer.feed is not None:
            consuming.give(self, answer.feed, border)
        if answer.read is not None:
            try:
                answer.read.tell(self.prompt_len, generated, final=final, border=border, cached=self.num_cached_tokens)
            except OSError as error:
                answer.unwritten = errors.unwritten(error)
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
                    fill_prompt_logprobs(self)
            if answer.feed is not None:
                consuming.finish(self, answer.feed, finish_reason, border)
    return made


def fill_prompt_logprobs(state: Any) -> None:
    """Gives each token of a prompt that a stop has ended a place among its logprobs; those not computed have none.

    vLLM has logprobs of whole prompts alone, and a route that echoes one looks for its last token's.

    Args:
        state: vLLM's RequestState, without a generated token.
    """
    found = state.logprobs_processor.prompt_logprobs
    for _ in range(0 if found is None else state.prompt_len - len(found)):
        found.append(None)
