"""The running requests that are steered: their rows, what they count and read, and their last batch.

The worker's hooks (worker.py) say what comes and goes; of vLLM's runners only a step's facts are known here.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.brought import Brought
from saesteer.engine.engine import Engine, Row
from saesteer.engine.lanes import Lanes, whole
from saesteer.engine.parts import Border
from saesteer.engine.registry import Gone
from saesteer.engine.sinks import SPOOLS, Sinks
from saesteer.language.fields import show
from saesteer.plugin.reasoning import border_in
from saesteer.plugin.results.forms import BROKEN, GONE, Guessed
from saesteer.plugin.results.sending import sent
from saesteer.plugin.worker import counts, drafts, graphs, health

logger = logging.getLogger("vllm.saesteer")
_Known = Callable[[], tuple[Sequence[int], int]]  # of a request, token ids, and how many of them no step computes now
# What a runner knows of the step that it has launched: where each request's tokens begin, the positions of the first
# ones, and what lm_head multiplies, on the last stage of a pipeline.
Launched = tuple[NDArray[Any], NDArray[Any], Tensor | None]
_RECENT = 64  # rows that are remembered; one with a vector for every layer of a 27B model holds 1.3 MB


class Steering:
    """The running requests that are steered, by id, and their last batch.

    Most steps of a server decode one more token for the requests of the previous step. What depends only on requests
    is computed when they change, so such a step only has to compare two lists.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard = True  # whether a failure that other ranks do not share ends its request on all of them
        self.choice = graphs.Choice(engine.graph_sets)
        self.health = health.Health() if engine.config.fail_fast else None
        self.rows: dict[str, Row] = {}  # of steered requests only
        self._recent: dict[bytes, Row] = {}  # by plan
        self._places: dict[str, int] = {}  # table rows, by request
        self._holders: dict[int, str] = {}  # the same, by row
        self.failed: dict[str, str] = {}  # requests that cannot be served as they were admitted, and why
        self._kept: dict[str, list[Tensor]] = {}  # counters from rows that were given up
        self.guesses: dict[str, drafts.Guesses] = {}  # of the last batch's steered requests
        self._cached: dict[str, int] = {}  # tokens that a request did not compute itself, when last admitted
        self._stops: set[str] = set()  # steered requests with stop strings
        self._borders: dict[str, Border] = {}  # of requests that edit a part of the answer, as they were admitted
        self.parts = False  # whether one of them is in the last batch
        self._listed: counts.SteeredBatch | None = None  # the last batch's steered requests, once requested
        self._batch: list[str] | None = None  # None: something has changed since
        self._tokens = 0  # in that batch
        self._sinks = Sinks()  # of requests that read by handle
        self._lanes = Lanes()  # what requests read
        self._names: list[str] = []  # all of that batch, whatever has changed since
        self._reads = False  # whether one of them reads
        self._sorted = True  # whether the lanes know the batch
        # From a runner's ExecuteModelState. It returns None where the step has failed, of which vLLM is about to tell.
        self.step: Callable[[], Launched | None] | None = None
        self.any = False  # whether one of the last batch's requests has a row
        self.kinds: NDArray[np.int32] | None = None  # of these rows, by site; None: none does anything at a site
        self.counting = False  # whether one of those that do has counters

    def add(self, request: Any) -> Row | None:
        """Remember a new request and return its row's content, or None if it is not steered."""
        name = request.req_id
        self.forget(name)
        try:
            row = self._row_of(request)
            if row is not None:
                self._batch = None
                self.rows[name] = row
                self._cached[name] = request.num_computed_tokens
                if request.sampling_params.stop:
                    self._stops.add(name)
                if row.parts:
                    self._borders[name] = border_in(request)
                self._sinks.add(name, sent(request.sampling_params).get(SPOOLS))
        except Exception as exc:  # noqa: BLE001  # it ends this request, see fail
            self.fail(name, exc)
            return None
        return row

    def _row_of(self, request: Any) -> Row | None:
        """Make the row only if no recent request had the same plan."""
        if not (admitted := sent(request.sampling_params)):
            return None
        plan = admitted["plan"]
        row = self._recent.pop(plan, None) or self.engine.make_row(admitted)
        if row is not None:
            self._recent[plan] = row  # the last used stands last
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return row

    def _forget_reads(self, request: str) -> None:
        self._lanes.forget(request)
        self._sorted = False

    def restart(self, request: str, computed: int) -> None:
        """A preempted request resumes after `computed` cached tokens: it holds no row, and its counts start again."""
        if request in self.rows:
            self._batch = None
            self._forget_reads(request)
            self._drop(request)
            self._cached[request] = computed

    def fail(self, request: str, exc: Exception) -> None:
        """End a request for which something went wrong here; an exception that leaves here ends the engine for all.

        Raises:
            SystemExit: nobody hears of it, and the request would go on, edited on the other ranks alone.
        """
        gone = isinstance(exc, Gone)  # on all ranks, or on none
        logger.error("request %s could not be steered (%s)", show(request), exc, exc_info=None if gone else exc)
        if not gone:
            self._stop_unheard(exc)
        self.forget(request)
        self.failed[request] = GONE if gone else _broken(exc)

    def _stop_unheard(self, exc: Exception) -> None:
        """End this process, and so the engine: an exception from here vLLM would log, and let this rank go on."""
        if not self.heard:
            raise SystemExit(f"saesteer ends this rank, whose requests would no longer be those of the others ({exc})")

    def fill(self, request: str, row: int, known: _Known = lambda: ((), 0)) -> None:
        """Give a table row to a request that is about to run: its own content, or none if it is not steered."""
        content, border = self.rows.get(request), self._borders.get(request)
        try:
            if content is not None:
                self.place(request, row)
            self.engine.fill(row, content, border and border.after(*known()))
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
            self._borders.pop(request, None)
            self._sinks.forget(request)
            self._forget_reads(request)

    def read(self) -> Brought | None:
        """What the requests of the last batch read of its step, which has been launched.

        Where the device has no room for that, these requests fail, and the others of the batch go on.
        """
        if self.step is None or not self._reads or (launched := self.step()) is None:
            return None
        if not self._sorted:
            self._sort()
        starts, positions, hidden = launched
        single = self._tokens == len(self._names)
        try:
            reads, files = self._lanes.step(starts[:-1], starts[1:], positions, self._pieces, single=single)
            return self.engine.captures.bring(reads, hidden, files, self._lanes.sinks)
        except torch.OutOfMemoryError as exc:
            reading = [name for name in self._names if name in self._lanes.known]
            logger.error("no room for what %s requests read in a step (%s)", len(reading), exc)
            self._stop_unheard(exc)
            # They keep their rows until the scheduler ends them: other ranks, which read nothing, know of no failure.
            self.failed |= dict.fromkeys(reading, _broken(exc))
            return None

    def _sort(self) -> None:
        """Let the lanes know who reads in the last batch."""
        known = self._lanes.known
        for name in self._names:
            if name not in known and (row := self.rows.get(name)) is not None and row.readings:
                self._lanes.add(name, row.readings, self._sinks.of(name, row.readings), self.engine.captures.where)
        self._lanes.look(self._names, self._sinks.all())
        self._sorted = True

    def _pieces(self, name: str, tokens: int) -> Iterable[tuple[int, int]]:
        """Each guess is read by itself."""
        return drafts.pieces(self.guesses[name], tokens) if name in self.guesses else whole(name, tokens)

    def settle(self, guessed: Mapping[str, Guessed], output: Any) -> None:
        """A step has run: of its guesses, keep what those that hold have counted, and nothing of the others."""
        drafts.settle(self._kept, guessed, output)
        self.engine.forget_drafts()

    def snapshot(self, read: Brought | None = None) -> counts.Snapshot:
        """What was counted so far for the steered requests of the last batch, with what they read of its step."""
        if self._listed is None:
            names = [request for request in self._batch or () if request in self._places]
            self._listed = counts.SteeredBatch(
                names,
                [self._cached[name] for name in names],
                [self._places[name] for name in names] if self.engine.sites else [],
                [self.rows[name] for name in names],
                frozenset(self._stops.intersection(names)),
                refusing=self.engine.config.max_dose_action == "refuse",
            )
        # Copies, since they are read later.
        kept = {name: [*self._kept[name]] for name in self._listed.names if name in self._kept} if self._kept else {}
        return counts.Snapshot(self._listed, *self.engine.last_published(), kept, dict(self.failed), read, self.guesses)

    def look(self, batch: list[str], tokens: int) -> bool:
        """Whether this step differs from the last look's in more than its positions; `kinds` then holds its kinds.

        It is the same when the same requests, steered as before, have one token each again.
        """
        before, self._tokens = self._tokens, tokens
        if batch == self._batch:
            return not before == tokens == len(batch)
        self._names = self._batch = list(batch)
        self._listed = None
        rows = {*map(self.rows.get, batch)}  # requests with one plan share a row
        several = [row for row in rows if row is not None]
        self.any = bool(several)
        self.counting = any(row.listed and row.counters > 0 for row in several)
        kinds = {id(row.kinds): row.kinds for row in several if row.listed}
        self.kinds = reduce(or_, kinds.values()) if kinds else None
        self._reads = any(row.readings for row in several)
        self.parts = bool(self._borders) and not self._borders.keys().isdisjoint(batch)
        self._sorted = False
        return True


def _broken(exc: Exception) -> str:
    return f"{BROKEN}: {type(exc).__name__}: {exc}"[:500]
