"""From a case to the arguments of the op: dictionary, tables, work list, streams. Knows layouts, and times nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bench.cases import CAP, FEATURES, THRESHOLD, TOP_K, Case, moved, sums
from bench.timing import DEVICE, DTYPE, Ceilings
from saesteer.kernels import layout, ops
from saesteer.kernels.bound import Bound, bind
from saesteer.kernels.edit.configs import TILED_ABOVE
from saesteer.kernels.step.updates import News
from tests.kernels.tables import Entry, make_table, make_work

FORMS = {"bare": layout.BARE, "normed": layout.NORMED}
EPS = 1e-6
# Timed edits are applied in full, and so small that the stream keeps its bits from launch to launch.
TINY = 2.0**-40
_MOST_LAUNCHES = 8192  # of a graph
_DENSE_TOKENS = 2048  # encoded whole at once, as the engine has it
_COUNTERS = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """What all launches of a case share, and what is bound at the site for each of those that come round."""

    bound: tuple[Bound, ...]  # each with a table of its own, all of one shape and with features of their own
    counts: Tensor


def edit(
    stream: Tensor, second: Tensor | None, norm_weight: Tensor | None, counts: Tensor, bound: Bound, *norm: Any
) -> None:
    """One edit through the op, with arguments of Batches.call."""
    bind(bound)
    torch.ops.saesteer.edit_(stream, second, norm_weight, counts, bound.index, *norm)


class Batches:
    """One width: its dictionary, and what the op is called with for each case.

    Args:
        width: of the stream.
        device: of the tensors.
        dtype: of stream and weights.
        features: of the dictionary.
    """

    def __init__(self, width: int, device: str = DEVICE, dtype: torch.dtype = DTYPE, features: int = FEATURES) -> None:
        torch.manual_seed(width)
        self.width, self.device, self.dtype, self.features = width, device, dtype, features
        w = torch.randn(features, width, device=device)
        self.w_enc = (w / w.norm(dim=1, keepdim=True)).to(dtype)
        self.w_dec = self.w_enc.clone()
        self.exact_enc, self.exact_dec = self.w_enc.float().cpu(), self.w_dec.float().cpu()  # for the reference
        self.b_enc = torch.zeros(features, device=device)
        self.threshold = torch.full((features,), THRESHOLD, device=device)
        self.b_dec = torch.zeros(1, width, device=device)
        self.norm_weight = torch.rand(width, device=device).to(dtype)
        self.scratch = torch.zeros(layout.scratch_words(width, features, _DENSE_TOKENS), device=device)

    def entry(self, kind: str, slot: int, counter: int, gain: float) -> Entry:
        """An edit of this kind with one feature."""
        if kind == "reconstruct":
            return Entry(0, flags=layout.RECONSTRUCT, size=self.features, counter=counter, gain=gain)
        more: dict[str, Any] = {
            "clamp": {"scale": 0.0, "shift": 3.0, "threshold": THRESHOLD},
            "add": {"shift": 2.0, "threshold": -math.inf},
            "cap": {"high": CAP, "threshold": -math.inf},
            "ablate": {"scale": 0.0, "threshold": -math.inf},
            "match": {"shift": 0.3, "threshold": -math.inf, "flags": layout.MATCH},
            "topk": {
                "scale": 0.0,
                "shift": 3.0,
                "flags": layout.RANKED,
                "size": self.features,
                "k": min(TOP_K, self.features // 2),
            },
        }[kind]
        return Entry(slot, counter=counter, gain=gain, **more)

    def batch(self, case: Case, many: int, gain: float) -> Batch:
        """With `many` tables, which together go through the dictionary before a feature comes again."""
        dense = (0, self.features) if case.whole else (0, 0)
        groups = [[self.entry(case.kind, at, at, gain) for at in range(case.edits)]]
        steered = case.steered
        table = make_table([[groups] if r in set(steered) else [[]] for r in range(case.requests)], 1, dense=dense)
        kinds = 0
        for row in steered:
            kinds |= int(table[1 + row, layout.HEAD + layout.KIND]) & ~layout.GATED
        tables = table.expand(many, *table.shape).clone()
        if steered and case.kind != "reconstruct":
            wanted = many * len(steered) * case.edits
            rounds = -(-wanted // self.features)
            slots = torch.cat([torch.randperm(self.features) for _ in range(rounds)])[:wanted].int()
            rows = 1 + torch.tensor(steered)
            begin = int(table[rows[0], layout.HEAD + layout.BEGIN])
            words = begin + layout.SLOT + layout.ENTRY * torch.arange(case.edits)
            tables[:, rows[:, None], words] = slots.view(many, len(steered), case.edits)
        tables = tables.to(self.device)
        map_arguments = self.map_arguments(case, tables[0])
        ops.map_(*map_arguments)
        of_all = {
            "work": map_arguments[0],
            "positions": (1 + torch.cat([torch.arange(length) for length in case.lengths])).to(self.device),
            "kinds": torch.tensor([kinds], dtype=torch.int32),
            "cells": torch.zeros(case.tokens, dtype=torch.int32, device=self.device),
            "registers": torch.zeros(case.tokens, 1, device=self.device),
        }
        index = torch.zeros(1, dtype=torch.int32, device=self.device)
        dense_size = self.features if case.whole or case.dense else 0
        bound = (self.bound(table, index, dense_size, **of_all) for table in tables.unbind())
        return Batch(tuple(bound), self._counts(case))

    def bound(self, table: Tensor, index: Tensor, dense_size: int, **of_all: Tensor) -> Bound:
        """This width's weights with a table, a site's number, and the lists that all launches share."""
        return Bound(
            index=index,
            table=table,
            w_enc=self.w_enc,
            w_dec=self.w_dec,
            b_enc=self.b_enc,
            threshold=self.threshold,
            b_dec=self.b_dec,
            scratch=self.scratch,
            dense_size=dense_size,
            has_norms=False,
            **of_all,
        )

    def map_arguments(self, case: Case, table: Tensor, sites: int = 1) -> tuple[Any, ...]:
        """Of the op map_, with a work list that holds garbage, and a table of so many sites."""
        starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
        slots = torch.arange(case.requests, dtype=torch.int32, device=self.device)
        work = make_work([], case.tokens, self.device)
        span = layout.TILE if case.tokens > TILED_ABOVE else 1
        numbers = torch.zeros(sites, layout.SITE_STRIDE, dtype=torch.int32, device=self.device)
        rows = table, self._counts(case), numbers
        news = News(torch.zeros(1, dtype=torch.int32, device=self.device), torch.bfloat16)
        return (work, slots, 1, starts.to(self.device), *rows, news, case.requests, case.tokens, span)

    def _counts(self, case: Case) -> Tensor:
        return torch.zeros(case.requests + 1, _COUNTERS, dtype=torch.int32, device=self.device)

    def stream(self, case: Case) -> tuple[Tensor, Tensor]:
        """Stream and normed stream."""
        both = torch.randn(2, case.tokens, self.width, device=self.device).to(self.dtype)
        return both[0], both[1]

    def call(self, counts: Tensor, bound: Bound, form: str, stream: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        """Arguments of `edit`, and of the kernels' launches."""
        norm = (None, None) if form == "bare" else (stream[1], self.norm_weight)
        return (stream[0], *norm, counts, bound, FORMS[form], EPS, 1.0)

    def calls(self, case: Case, form: str, cache: str) -> list[tuple[Any, ...]]:
        """Arguments of each launch in the graph of a case.

        Cold: other features at each launch, so that their rows come from memory as in a model. Streams of many tokens
        always take turns, so that they come from memory, too.
        """
        small = case.tokens <= TILED_ABOVE
        different = 1
        if cache == "cold" and not case.whole:
            per_launch = max(1, len(case.steered) * case.edits)
            different = max(1, min(_MOST_LAUNCHES if small else 16, self.features // per_launch))
        batch = self.batch(case, different, TINY)
        streams = [self.stream(case) for _ in range(1 if small else 4)]
        launches = max(different, 64 if small else (4 if case.whole else 16))
        return [
            self.call(batch.counts, batch.bound[at % different], form, streams[at % len(streams)])
            for at in range(launches)
        ]


def floor(case: Case, form: str, cache: str, width: int, ceiling: Ceilings) -> float:
    """Microseconds that no kernel can beat: an empty launch, the bytes that must move, or the sums of the products."""
    us = moved(case, form, cache, width) / ceiling.copy_gb_s / 1e3
    return max(ceiling.launch_us, us, sums(case, width) / ceiling.matmul_tflop_s / 1e6)
