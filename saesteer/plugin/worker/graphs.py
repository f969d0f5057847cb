"""Which CUDA graphs a step replays: those without ops, those with some of them, or those with all.

vLLM's V2 runner captures a graph for each shape of a batch, and its ``run_fullgraph`` replays what it finds under the
shape. An op that nobody uses still costs its launch there. So behind vLLM's own capture every full graph is captured
once more for each smaller set of sites, and what stands under a shape chooses among them. This file does not know what
an op does. V1 and piecewise graphs have all ops.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import and_
from time import monotonic
from typing import Any, NamedTuple

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_world_group

from saesteer.engine.engine import Engine
from saesteer.engine.graph_sets import Sets, Sites, enough, smallest
from saesteer.engine.wire import decode
from saesteer.kernels import ops
from saesteer.plugin.results.sending import sent
from saesteer.plugin.wrap import Original, around_method_of

logger = logging.getLogger("vllm.saesteer")
_SPARE = 1 << 30  # bytes that stay free, beside what vLLM's longest step takes
_RECENT = 64  # plans whose need is remembered


class Choice:
    """The set of graphs for a batch, by what its requests have asked for.

    It goes by what the scheduler has sent, not by rows: all ranks of tensor parallelism must replay the same set, since
    captured all-reduces know where the others' parts lie. So a request counts even on a rank that could not give it a
    row.

    Args:
        sets: those of the engine.
    """

    def __init__(self, sets: Sets) -> None:
        self.sets = sets
        self._captured: Collection[int] = range(len(sets))
        self._all = (1 << len(sets)) - 1  # numbers of sets, as bits
        self.fits = self._all  # the same of those that will do for the last batch
        self.at = 0  # number of the set for the last batch
        self._needs: dict[str, int] = {}  # by request, the sets that will do; without those for which all will
        self._need = lru_cache(_RECENT)(self._read)

    def add(self, request: Any) -> None:
        """Remember what a new request needs."""
        self.forget(request.req_id)
        admitted = sent(request.sampling_params)
        try:
            fits = self._need(admitted["plan"]) if admitted else self._all
        except Exception:  # noqa: BLE001  # the request ends, see Steering.fail
            fits = 1 << len(self.sets) - 1
        if fits != self._all:
            self._needs[request.req_id] = fits

    def forget(self, request: str) -> None:
        """Forget a request that has ended, or is about to come anew."""
        self._needs.pop(request, None)

    def look(self, batch: Iterable[str]) -> None:
        """Choose for a batch of these requests."""
        self.fits = self._all
        if self._needs:
            self.fits = reduce(and_, (self._needs.get(request, self._all) for request in batch), self._all)
        self.at = smallest(self.fits, self._captured)

    def keep(self, captured: Collection[int]) -> None:
        """Choose from these sets alone; the last one is among them."""
        self._captured = captured
        self.at = smallest(self.fits, captured)

    def _read(self, plan: bytes) -> int:
        if not plan:
            return self._all
        sites = decode(plan).sites
        # A site without lines has nothing to do but to capture.
        reads = frozenset(site for site, groups, changed, _ in sites if not (groups or changed))
        return enough(self.sets, Sites(frozenset(site for site, *_ in sites) - reads, reads))


class Chosen(NamedTuple):
    """What stands under a shape in place of vLLM's graph."""

    choice: Choice  # of the step
    graphs: Mapping[int, Any]  # by the number of their set

    def replay(self) -> None:
        """Replay the graph of the chosen set."""
        self.graphs[self.choice.at].replay()


def attach(worker: Any, engine: Engine, choice: Choice) -> None:
    """Let vLLM capture its full graphs once for each set, from now on and whenever it captures anew.

    Call it behind vLLM's memory profiling, which captures as well.
    """
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    if manager is None or len(choice.sets) == 1 or "capture" in vars(manager):
        return
    spare = _SPARE + getattr(worker, "peak_activation_memory", 0)

    @around_method_of(manager)
    def capture(original: Original, *args: Any, **kwargs: Any) -> None:
        free = _free()
        original(*args, **kwargs)
        wanted, found = manager._capture_descs, manager.graphs
        captured = {len(choice.sets) - 1: found}
        try:
            manager._capture_descs = {mode: shapes for mode, shapes in wanted.items() if mode == CUDAGraphMode.FULL}
            for at, sites in enumerate(choice.sets[:-1] if found else ()):
                begin, before = monotonic(), _free()
                # vLLM's own took more: its piecewise graphs, and memory that all graphs share.
                if not _everywhere(before - (free - before) > spare):
                    logger.warning("saesteer captures no graphs for %s: too little GPU memory", name_of(sites))
                    break
                manager.graphs = {}
                with only(engine, sites):
                    original(*args, **kwargs)
                captured[at] = manager.graphs
                free, gib, took = before, (before - _free()) / 2**30, monotonic() - begin
                logger.info("saesteer captured graphs for %s, in %.1f s and %.2f GiB", name_of(sites), took, gib)
        finally:
            manager._capture_descs, manager.graphs = wanted, chosen(choice, captured)


def chosen(choice: Choice, captured: Mapping[int, Mapping[Any, Any]]) -> dict[Any, Any]:
    """What replaces vLLM's graphs by shape; `captured` has those of some sets by number, among them the last one's."""
    choice.keep(captured.keys())
    shapes = captured[len(choice.sets) - 1]
    return {shape: Chosen(choice, {at: graphs[shape] for at, graphs in captured.items()}) for shape in shapes}


@contextmanager
def only(engine: Engine, sites: Sites) -> Iterator[None]:
    """Until this ends, ops elsewhere launch nothing; where nobody edits, nothing is published either."""
    silent, copying = (
        [site.index for name, site in engine.sites.items() if name in names]
        for names in (engine.sites.keys() - sites.all, sites.reads)
    )
    silent += [] if sites.edits else [engine.published]
    with ops.silenced(silent), ops.copying(copying):
        yield


def name_of(sites: Sites) -> str:
    """What the log calls the steps that a set of graphs is for."""
    if not sites.ops:
        return "steps that edit nowhere"
    what = "use dictionaries" if sites.edits else "read"
    return f"steps that only {what}, at {sites.ops} sites"


def _free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _everywhere(here: bool) -> bool:
    """Whether it holds on all ranks, which must capture the same graphs."""
    agreed = torch.tensor([int(here)])
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(agreed.item())
