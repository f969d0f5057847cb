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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.batch import EPS, TINY, Batches
from bench.timing import DEVICE, DTYPE, capture, machine, spread
from saesteer.kernels import layout, ops
from saesteer.kernels.news import News
from saesteer.testing import make_table, make_work

SHAPES = ((2560, 34), (5376, 62))  # width and layers: Gemma 3 4B and 27B
TOKENS = 16
READ = 192 << 20  # bytes of a layer's product: several times what the L2 holds
BARE = "no ops"
CASES = ("nobody steered", "a clamp at one layer", "a vector at each", "a clamp at each")
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
        self.layers, self.device = layers, device
        self._batches = Batches(width, device, dtype, features=layers * TOKENS)
        columns = max(1, read // dtype.itemsize // width // 64) * 64
        draw: Any = {"device": device, "dtype": dtype}
        self._products = [torch.randn(width, columns, **draw) for _ in range(layers)]
        self._norms = [torch.rand(width, **draw) for _ in range(layers)]
        self._came = torch.randn(TOKENS, width, **draw)
        self._stream, self._second = torch.empty_like(self._came), torch.zeros_like(self._came)
        self._positions = torch.arange(TOKENS, device=device)
        self._cells = torch.zeros(TOKENS, dtype=torch.int32, device=device)
        self._kinds = torch.tensor([layout.ANY | layout.LONE | layout.MANY], dtype=torch.int32)

    def steered(self, case: str) -> list[int]:
        """The layers at which each request has an edit."""
        return {CASES[0]: [], CASES[1]: [self.layers // 2]}.get(case, list(range(self.layers)))

    def step(self, case: str) -> tuple[Callable[[], None], Tensor]:
        """A step of the case, and its counts: a row for each request behind the first row, a column for each layer."""
        if case == BARE:
            return lambda: self._run(None), torch.zeros(0)
        kind, layers = "add" if case == CASES[2] else "clamp", self.steered(case)
        entry = self._batches.entry
        rows = [
            [
                [[entry(kind, layer * TOKENS + request, layer, TINY)]] if layer in layers else []
                for layer in range(self.layers)
            ]
            for request in range(TOKENS)
        ]
        table = make_table(rows, self.layers, self.device)
        counts = torch.zeros(self.layers, 1 + TOKENS, dtype=torch.int32, device=self.device).t()
        sites = torch.zeros(self.layers, layout.SITE_STRIDE, dtype=torch.int32, device=self.device)
        work = make_work([], TOKENS, self.device)
        order = torch.arange(TOKENS + 1, dtype=torch.int32, device=self.device)
        news = News(torch.zeros(1, dtype=torch.int32, device=self.device), torch.bfloat16)
        ops.map_(work, order, 1, order, table, counts, sites, news, TOKENS, TOKENS, 1)
        return lambda: self._run((table, work, sites, counts)), counts

    def _run(self, given: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> None:
        own = self._batches
        weights = (own.w_enc, own.w_dec, own.b_enc, own.threshold, own.b_dec)
        for layer, norm in enumerate(self._norms):
            torch.mm(self._second, self._products[layer])
            self._stream.copy_(self._came)
            self._second.copy_(F.rms_norm(self._stream, norm.shape, norm, EPS))
            if given is not None:
                table, work, sites, counts = given
                place = (table, sites[layer, :1], work, self._positions, self._kinds)
                rest: Any = (self._cells, counts, own.scratch, layout.NORMED, EPS, 0.0, 0, False)
                ops.edit_(self._stream, self._second, norm, *place, *weights, *rest)


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
    print(f"{'each layer':24}{'width':>6}{'us more':>9}{'p20':>7}{'p80':>7}{'without':>9}")
    for row in rows:
        figures = f"{row['us']:9.2f}{row['p20']:7.2f}{row['p80']:7.2f}{row['bare_us']:9.2f}"
        print(f"{row['case']:24}{row['width']:6}{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
