"""Counts and doses as they leave the worker with a step's output. The way on is in results/.

A step's last op writes the counters of all rows into host memory (ops.publish_), and a snapshot of the steered
requests' counters leaves with the step's output. A step without a steered request copies nothing, unless --fail-fast
looks at all of them (health.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine import doses
from saesteer.engine.brought import Brought, Sent, sendable
from saesteer.engine.published import Published
from saesteer.engine.table import Row
from saesteer.kernels import layout
from saesteer.plugin.results.forms import DOSE, Counters, Guessed, Table
from saesteer.plugin.worker import earlier, health
from saesteer.plugin.worker.drafts import Guesses
from saesteer.plugin.wrap import Original, around_method_of


@dataclass(slots=True)
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
        self.width = max((row.counters for row in self.contents), default=0)
        places = [
            (number, 1 + row.edits + layout.DOSE_WORDS * site + layout.DOSE_LIMITED)
            for number, row in enumerate(self.contents if self.refusing else ())
            for site in range(row.doses)
        ]
        numbers, columns = np.array(places, dtype=np.intp).reshape(-1, 2).T
        self.limited = (numbers, columns) if places else None


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
        return {self.names[number]: DOSE for number in limited[0][above > 0]} | dict(lost)

    @property
    def counted(self) -> Counters:
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
            snapshot.watched, snapshot.look = engine.config.fail_fast_after, steering.health.seen
        if not engine.is_last:
            return snapshot if ran is None else earlier.Told(snapshot, ran)
        made = getattr(output, made_of, output)
        if made is not None and made.req_ids:  # all steps share vLLM's empty output
            made.saesteer, snapshot.look = snapshot, snapshot.look and snapshot.look.held(made)
            if snapshot.guesses:
                steering.settle(snapshot.guessed, made)
        return output
