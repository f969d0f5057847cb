"""Which CUDA graphs a step replays: those without ops, those with the dictionaries' ops, or those with all of them.

vLLM's V2 runner captures a graph for each shape of a batch, and its ``run_fullgraph`` replays what it finds under the
shape. An op that nobody uses still costs its launch there. So behind vLLM's own capture every full graph is captured
once more for each smaller set of sites, and what stands under a shape chooses among them. This file does not know what
an op does. V1 and piecewise graphs have all ops.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from time import monotonic
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_world_group

from saesteer.config.config import KEY
from saesteer.engine.engine import Engine
from saesteer.engine.graph_sets import Sets, smallest
from saesteer.engine.wire import decode
from saesteer.kernels import ops
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
        self.at = 0  # index of the set for the last batch
        self._needs: dict[str, int] = {}  # by request; without those that need only the first set
        self._need = lru_cache(_RECENT)(self._read)

    def add(self, request: Any) -> None:
        """Remember what a new request needs."""
        self.forget(request.req_id)
        admitted = (request.sampling_params.extra_args or {}).get(KEY)
        try:
            need = 0 if admitted is None else self._need(admitted["plan"])
        except Exception:  # noqa: BLE001  # the request ends, see Steering.fail
            need = len(self.sets) - 1
        if need:
            self._needs[request.req_id] = need

    def forget(self, request: str) -> None:
        """Forget a request that has ended, or is about to come anew."""
        self._needs.pop(request, None)

    def look(self, batch: Iterable[str]) -> None:
        """Choose for a batch of these requests."""
        self.at = max((self._needs.get(request, 0) for request in batch), default=0) if self._needs else 0

    def _read(self, plan: bytes) -> int:
        return smallest(self.sets, {site for site, *_ in decode(plan).sites}) if plan else 0


class Chosen:
    """What stands under a shape in place of vLLM's graph.

    Args:
        choice: of the step.
        graphs: one for each set; a set that was not captured has that of the next larger one.
    """

    def __init__(self, choice: Choice, graphs: Sequence[Any]) -> None:
        self._choice = choice
        self.graphs = graphs

    def replay(self) -> None:
        """Replay the graph of the chosen set."""
        self.graphs[self._choice.at].replay()


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
                    logger.warning("saesteer captures no graphs for %s: too little GPU memory", _named(sites))
                    break
                manager.graphs = {}
                with only(engine, sites):
                    original(*args, **kwargs)
                captured[at] = manager.graphs
                free, gib, took = before, (before - _free()) / 2**30, monotonic() - begin
                logger.info("saesteer captured graphs for %s, in %.1f s and %.2f GiB", _named(sites), took, gib)
        finally:
            manager._capture_descs, manager.graphs = wanted, chosen(choice, captured)


def chosen(choice: Choice, captured: Mapping[int, Mapping[Any, Any]]) -> dict[Any, Any]:
    """What replaces vLLM's graphs by shape; `captured` has those of some sets by index, among them the last one's."""
    every = range(len(choice.sets))
    serving = [next(captured[larger] for larger in every[at:] if larger in captured) for at in every]
    return {shape: Chosen(choice, [graphs[shape] for graphs in serving]) for shape in serving[-1]}


def only(engine: Engine, sites: frozenset[str]) -> AbstractContextManager[None]:
    """Until this ends, ops elsewhere launch nothing; without any site, nothing is published either."""
    others = [site.index for name, site in engine.sites.items() if name not in sites]
    return ops.silenced(others if sites else [*others, engine.published])


def _named(sites: frozenset[str]) -> str:
    return f"steps that edit at {len(sites)} sites of dictionaries" if sites else "steps that edit nowhere"


def _free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _everywhere(here: bool) -> bool:
    """Whether it holds on all ranks, which must capture the same graphs."""
    agreed = torch.tensor([int(here)])
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(agreed.item())
