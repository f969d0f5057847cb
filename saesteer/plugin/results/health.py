"""--fail-fast: whether what each step computes is sound. Ends no request itself, and knows no edit.

worker     next to each step's logits, two reductions over the rows that lm_head gets: one of what it reads, one of
           what it makes. Their results go to the host with the step's tokens, and nothing waits for them
scheduler  a request with a row that is not finite fails (failures.py) before its token counts, and one whose answer
           has collapsed fails behind the step

An answer has collapsed once each of its last N tokens (--fail-fast-after) is the token that stands p before it, for
one period p of up to 16 tokens; N counts as p where it is less, so that a period stands there twice at least.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from saesteer.errors import UnsupportedError
from saesteer.plugin.results import failures, sending
from saesteer.plugin.wrap import Original, around_method_of

PERIODS = 16  # tokens of the longest period


@dataclass(slots=True)
class Look:
    """What was seen of one step. It can be read once the host has the step's tokens."""

    names: Sequence[str]  # the request of each row; with rejected drafts a request has several
    seen: Tensor  # [2, rows] fp32, in host memory or on its way: finite where what lm_head reads and makes is

    @property
    def failed(self) -> dict[str, str]:
        """The word for each request that has failed."""
        read, made = self.seen.isfinite().tolist()
        words = {True: "logits", False: "hidden states"}
        rows = zip(self.names, read, made, strict=True)
        return {name: f"{failures.NON_FINITE}: {words[hidden]}" for name, hidden, all_ in rows if not (hidden and all_)}

    def held(self, output: Any) -> "Look":
        """Without the rows of wrong guesses: each token of a step comes from a row, and those behind do not count.

        Args:
            output: vLLM's ModelRunnerOutput, whose tokens are on the host if the step had guesses.
        """
        if len(self.names) <= len(output.req_ids):
            return self
        tokens = dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=True))
        first: dict[str, int] = {}
        for at, name in enumerate(self.names):
            first.setdefault(name, at)
        rows = [at for at, name in enumerate(self.names) if at - first[name] < max(1, tokens.get(name, 0))]
        return Look([self.names[at] for at in rows], self.seen[:, rows])


def look(names: Sequence[str], hidden: Tensor, logits: Tensor) -> Look:
    """Look at a step's rows, without waiting for the device.

    NaN and infinity reach a sum. Of logits the largest is enough: NaN reaches it, and a model may give −∞ to tokens
    that it forbids, but not to all of them.

    Args:
        names: the request of each row.
        hidden: [rows, d], what lm_head reads.
        logits: [rows, vocabulary], what it makes.
    """
    seen = torch.stack((hidden.sum(-1, dtype=torch.float32), logits.amax(-1).float()))
    return Look(names, seen.to("cpu", non_blocking=True))


class Health:
    """The present step of a worker."""

    def __init__(self) -> None:
        self._names: Sequence[str] | None = None  # of the step whose logits have not come yet
        self._look: Look | None = None

    def begin(self, names: Sequence[str], rows: Iterable[int]) -> None:
        """A step of these requests is about to run.

        Args:
            names: of its batch, in order.
            rows: that lm_head gets of each.
        """
        self._names = [name for name, several in zip(names, rows, strict=False) for _ in range(several)]
        self._look = None

    def see(self, hidden: Tensor, logits: Tensor | None) -> None:
        """lm_head has run; all but its first call in a step is for the logprobs of prompts, or a dry run."""
        if self._names is not None and logits is not None and len(self._names) == len(hidden):
            self._look = look(self._names, hidden, logits)
        self._names = None

    def take(self) -> Look | None:
        """What was seen of the step; None on a rank without logits."""
        return self._look


def attach(runner: Any, health: Health) -> None:
    """See each call of lm_head.

    Raises:
        UnsupportedError: an option of vLLM lets each rank make other logits.
    """
    if getattr(runner.parallel_config, "enable_batch_sharded_sampling", False):
        raise UnsupportedError("saesteer cannot serve --fail-fast with batch-sharded sampling; switch one of them off")

    @around_method_of(runner.get_model())
    def compute_logits(original: Original, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = original(hidden_states, *args, **kwargs)
        health.see(hidden_states, logits)
        return logits


def lengths(scheduler: Any, scheduler_output: Any) -> list[tuple[Any, int]]:
    """Return vLLM's requests of a step and the lengths of their answers, before the scheduler takes the step."""
    known = map(scheduler.requests.get, scheduler_output.num_scheduled_tokens)
    return [(one, one.num_output_tokens) for one in known if one is not None]


def end(scheduler: Any, outputs: dict[int, Any], before: Sequence[tuple[Any, int]], after: int) -> None:
    """End the requests whose answers have collapsed in this step: their output of it carries the word.

    Args:
        scheduler: the engine's, once it has taken the step.
        outputs: of the step, by client.
        before: as ``lengths`` returned it.
        after: as of ``collapse``.
    """
    periods = {one.request_id: of for one, start in before if (of := collapse(one.output_token_ids, start, after))}
    if not periods:
        return
    running = [one.request_id for one, _ in before if one.request_id in periods and not one.is_finished()]
    scheduler.finish_requests(running, RequestStatus.FINISHED_ERROR)
    for output in [one for one in sending.of(outputs) if one.request_id in periods]:
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason, output.stop_reason = FinishReason.ERROR, None
        sending.carry(output, failures.FAILED, f"{failures.COLLAPSED}: {periods[output.request_id]}")


def collapse(ids: Any, start: int, after: int) -> int:
    """Return the shortest period with which an answer has collapsed at one of its last tokens; 0: it has not.

    For most tokens this is one look at the 16 before it, since a token that is not among them repeats nothing.

    Args:
        ids: the answer's tokens, a list or vLLM's ConstantList.
        start: the index of the first token to look at.
        after: tokens of repetition, --fail-fast-after.
    """
    for stop in range(max(start, after) + 1, len(ids) + 1):
        near = ids[max(0, stop - 1 - PERIODS) : stop]
        if (token := near.pop()) in near:
            for period, one in enumerate(reversed(near), 1):
                begin = stop - max(after, period)
                if one == token and begin >= period and ids[begin:stop] == ids[begin - period : stop - period]:
                    return period
    return 0
