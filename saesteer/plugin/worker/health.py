"""--fail-fast on the worker: whether what each step computes is finite. Ends no request itself, and knows no edit.

Next to each step's logits run two reductions over the rows that lm_head gets: one of what it reads, one of what it
makes. Their results go to the host with the step's tokens, and nothing waits for them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saesteer.errors import UnsupportedError
from saesteer.plugin.results.forms import NON_FINITE
from saesteer.plugin.wrap import Original, around_method_of


class Look(NamedTuple):
    """What was seen of one step. It can be read once the host has the step's tokens."""

    names: Sequence[str]  # the request of each row; with rejected drafts a request has several
    seen: Tensor  # [2, rows] fp32, in host memory or on its way: finite where what lm_head reads and makes is

    @property
    def failed(self) -> dict[str, str]:
        """The word for each request that has failed."""
        read, made = self.seen.isfinite().tolist()
        words = {True: "logits", False: "hidden states"}
        rows = zip(self.names, read, made, strict=True)
        return {name: f"{NON_FINITE}: {words[hidden]}" for name, hidden, all_ in rows if not (hidden and all_)}

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
        self.seen: Look | None = None  # of the step; None on a rank without logits

    def begin(self, names: Sequence[str], rows: Iterable[int]) -> None:
        """A step of these requests is about to run.

        Args:
            names: of its batch, in order.
            rows: that lm_head gets of each.
        """
        self._names = [name for name, several in zip(names, rows, strict=False) for _ in range(several)]
        self.seen = None

    def see(self, hidden: Tensor, logits: Tensor | None) -> None:
        """lm_head has run; all but its first call in a step is for the logprobs of prompts, or a dry run."""
        if self._names is not None and logits is not None and len(self._names) == len(hidden):
            self.seen = look(self._names, hidden, logits)
        self._names = None


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
