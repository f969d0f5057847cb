"""What an op adds to a layer of a model, whose weights go through the caches between one op and the next.

    python -m bench.layers --out DIR        as many layers as Gemma 3 4B and 27B have, 16 requests that decode

bench.kernels times op behind op: list, table and the kernel's own code stay in the caches. Here an op stands behind a
norm and in front of a product that reads 192 MB. Graphs with ops at all layers and without take turns; a figure is the
difference of two neighbours, over the number of layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.batch import EPS, TINY, Batches, edit
from bench.cases import DECODE, THRESHOLD, Case
from bench.timing import DEVICE, DTYPE, capture, machine, spread
from saesteer.kernels import layout, ops
from tests.kernels.tables import Entry, make_table

SHAPES = ((2560, 34), (5376, 62))  # width and layers: Gemma 3 4B and 27B
BATCH = Case("decode", DECODE)
TOKENS = BATCH.tokens
READ = 192 << 20  # bytes of a layer's product: several times what the L2 holds
BARE = "no ops"
# Clamps of transcoders have a second op, which reads what goes into the MLP: at each layer, or at the first one alone.
TRANSCODER, CLT = "a transcoder's clamp at each", "a cross-layer one at 16"
ADDS = "a vector at 16"
CASES = ("nobody steered", "a clamp at one layer", "a vector at each", "a clamp at each", TRANSCODER, ADDS, CLT)
TURNS, RUN_IN = 40, 5


class Layers:
    """The layers of a model, as far as they stand between two ops.

    Args:
        width: of the stream.
        layers: of the model.
        read: bytes that a layer's product reads.
        device: of all tensors.
        dtype: of stream and weights.
    """

    def __init__(
        self, width: int, layers: int, read: int = READ, device: str = DEVICE, dtype: torch.dtype = DTYPE
    ) -> None:
        self.layers = layers
        self._own = Batches(width, device, dtype, features=layers * TOKENS)
        columns = max(1, read // dtype.itemsize // width // 64) * 64
        self._products = [torch.randn(width, columns, device=device, dtype=dtype) for _ in range(layers)]
        self.stream, self.second = self._own.stream(BATCH)
        self._came, self._gain = self.stream.clone(), 1 + self._own.norm_weight

    def steered(self, case: str) -> list[int]:
        """The layers at which each request has an edit."""
        few = list(range(min(16, self.layers)))
        return {CASES[0]: [], CASES[1]: [self.layers // 2], ADDS: few, CLT: few}.get(case, list(range(self.layers)))

    def read(self, case: str) -> list[int]:
        """The layers at which an op reads a transcoder's feature."""
        return {TRANSCODER: list(range(self.layers)), CLT: [0]}.get(case, [])

    def step(self, case: str) -> tuple[Callable[[], None], Tensor]:
        """A step of the case, and its counts: a row for each request behind the first, layer l in column l."""
        own, layers = self._own, range(self.layers)
        if case == BARE:
            return partial(self.run, lambda _: None), torch.zeros(0)
        steered, read = self.steered(case), self.read(case)
        sites = self.layers + len(read)  # those that read stand behind the others
        rows = [
            [self._groups(case, layer, at, layer in steered) for layer in layers]
            + [[[Entry(at, threshold=THRESHOLD, flags=layout.READ, gates=0)]] for _ in read]
            for at in range(TOKENS)
        ]
        mapped = own.map_arguments(BATCH, make_table(rows, sites, own.device), sites)
        ops.map_(*mapped)
        work, _, _, _, table, counts, numbers, *_ = mapped
        of_all = {
            "work": work,
            "positions": torch.arange(TOKENS, device=own.device),
            "kinds": torch.tensor([layout.KERNELS], dtype=torch.int32),
            "cells": torch.zeros(TOKENS, dtype=torch.int32, device=own.device),
            "registers": torch.zeros(TOKENS, 1, device=own.device),
        }
        bound = [own.bound(table, number, 0, **of_all) for number in numbers[:, :1]]
        written = [own.call(counts, one, "normed", (self.stream, self.second)) for one in bound[: self.layers]]
        calls = [[call] for call in written]
        for layer, one in zip(read, bound[self.layers :], strict=True):
            calls[layer].insert(0, own.call(counts, one, "bare", (self.second, self.second)))

        def edits(layer: int) -> None:
            for call in calls[layer]:
                edit(*call)

        return partial(self.run, edits), counts

    def _groups(self, case: str, layer: int, at: int, steered: bool) -> list[list[Entry]]:
        """The groups of one request at a layer, with a feature of its own."""
        slot = layer * TOKENS + at
        if not steered:
            return []
        if self.read(case):
            return [[Entry(slot, scale=0.0, shift=3.0, counter=layer, gain=TINY, flags=layout.HELD, size=0)]]
        kind = "add" if case in (CASES[2], ADDS) else "clamp"
        return [[self._own.entry(kind, slot, layer, TINY)]]

    def run(self, work: Callable[[int], object]) -> None:
        """All products, each with its norm, and behind that what is done at the layer of this number."""
        for layer, product in enumerate(self._products):
            torch.mm(self.second, product)
            self.stream.copy_(self._came)
            self.second.copy_(F.rms_norm(self.stream, self._gain.shape, self._gain, EPS))
            work(layer)


def measure(width: int, layers: int) -> list[dict[str, Any]]:
    """A line for each case.

    Raises:
        RuntimeError: a graph has not edited what it should have.
    """
    model = Layers(width, layers)
    steps = {case: model.step(case) for case in (BARE, *CASES)}
    graphs = {}
    for case, (run, _) in steps.items():
        run()  # compiled here
        graphs[case] = capture([run])
    times: dict[str, list[float]] = {case: [] for case in steps}
    for _ in range(TURNS):
        for case, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            graph.replay()
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[case].append(begin.elapsed_time(end) * 1e3 / 2 / layers)
    found = []
    for case in CASES:
        expected = (1 + 3 * TURNS) * TOKENS * len(model.steered(case))
        if int(steps[case][1].sum()) != expected:
            raise RuntimeError(f"{case}: {int(steps[case][1].sum())} tokens were edited, expected {expected}")
        pairs = zip(times[case][RUN_IN:], times[BARE][RUN_IN:], strict=True)
        us, p20, p80 = (round(value, 3) for value in spread([ours - bare for ours, bare in pairs]))
        named = {"case": case, "width": width, "layers": layers, "tokens": TOKENS, "form": "normed"}
        found.append({**named, "us": us, "p20": p20, "p80": p80, "bare_us": round(spread(times[BARE]).median, 2)})
    return found


def main() -> int:
    """Measure, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of layers.jsonl")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args()
    about = machine(given.commit)
    print(about)
    rows = []
    for shape in SHAPES:
        rows += measure(*shape)
        torch.cuda.empty_cache()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "layers.jsonl").write_text("".join(json.dumps({**about, **row}) + "\n" for row in rows))
    print(f"{'each layer':30}{'width':>6}{'us more':>9}{'p20':>7}{'p80':>7}{'without':>9}")
    for row in rows:
        figures = f"{row['us']:9.2f}{row['p20']:7.2f}{row['p80']:7.2f}{row['bare_us']:9.2f}"
        print(f"{row['case']:30}{row['width']:6}{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
