"""Times of reading features and probes of rows on a GPU, in CUDA graph replay, next to the product alone and next to
the product with torch.topk. Knows no engine.

    python -m bench.read --out DIR        every case; what is wrong is not timed

The encoder of each case is larger than the GPU's cache, so its weights come from memory. ``named`` is what features
that are named take alone, from their own rows of the encoder. torch.topk neither knows thresholds nor promises an order
of ties. The floor is the encoder's bytes at the rate of a copy in this run, or the product's operations at that of a
large product.

A case of probes has so many of them at so many sites. ``whole`` is all that a step queues for them: the indices there,
the rows out of the bank of captures, the scores, and these on their way to the host. ``scores`` and ``gather`` are its
parts, ``fp32`` the same scores from rows widened to fp32. The floor is the bytes of rows and probes, or a launch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import DEVICE, DTYPE, Ceilings, ceilings, in_graph, machine
from saesteer.kernels.read.features import Encoder, dots, read_features
from saesteer.kernels.read.rows import Probes, read_probes

ACTIVE = 64  # of a row, about


@dataclass(frozen=True, slots=True)
class Case:
    """How many rows of which dictionary are read."""

    rows: int
    features: int
    top_k: int = 8
    named: int = 0
    kind: str = "jumprelu"  # or topk, groupmax; probes, of which there are `features`
    width: int = 2560
    sites: int = 1  # of probes


CASES = (
    Case(64, 16384),
    Case(64, 16384, 32),
    Case(64, 16384, named=8),
    Case(64, 16384, named=8, kind="topk"),
    Case(64, 16384, named=8, kind="groupmax"),
    Case(1, 16384),
    Case(64, 65536),
    Case(64, 1 << 20, width=256),
    Case(8192, 16384),
    Case(64, 100, 0, kind="probes", sites=10),
    Case(64, 1, 0, kind="probes"),
)
STEP = 8192  # rows of a site in the bank of captures


def encoder(case: Case) -> Encoder:
    """A random one with about ACTIVE active features for each row of ``stream``."""
    w_enc = torch.randn(case.features, case.width, device=DEVICE, dtype=DTYPE)
    zeros = torch.zeros(case.features, device=DEVICE)
    if case.kind == "topk":
        return Encoder(w_enc, zeros, zeros, groups=1, k=ACTIVE)
    if case.kind == "groupmax":
        return Encoder(w_enc, zeros, zeros, groups=ACTIVE, k=1)
    rare = torch.special.ndtri(torch.tensor(1 - ACTIVE / case.features, dtype=torch.float64))
    return Encoder(w_enc, zeros, zeros + rare.item() * case.width**0.5)


def scored(case: Case, ceiling: Ceilings) -> list[dict[str, Any]] | str:
    """``timed`` for probes."""
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    bank = torch.randn(case.sites * STEP, case.width, device=device, dtype=DTYPE)
    at = sorted(number % case.sites for number in range(case.features))
    v, bias = torch.randn(case.features, case.width), [0.5] * case.features
    probes, plain = (Probes.of(v, bias, at, device, dtype) for dtype in (DTYPE, torch.float32))
    index = (torch.arange(case.rows)[:, None] + STEP * torch.arange(case.sites)).flatten().pin_memory()
    there, home = index.to(device), torch.empty(case.rows, case.features).pin_memory()
    rows = bank[there].view(case.rows, case.sites, case.width)
    expected = torch.einsum("nkd,kd->nk", rows.double()[:, at], v.to(device).double()) + 0.5
    for one in (probes, plain):
        if not torch.allclose(read_probes(rows, one).double(), expected, rtol=1e-4, atol=1e-3):
            return f"{case}: differs from the definition"

    def whole() -> None:
        there.copy_(index, non_blocking=True)
        own = bank.index_select(0, there).view(rows.shape)
        home.copy_(read_probes(own, probes), non_blocking=True)

    ops: dict[str, Callable[[], object]] = {
        "whole": whole,
        "gather": lambda: bank.index_select(0, there),
        "scores": lambda: read_probes(rows, probes),
        "fp32": lambda: read_probes(rows, plain),
    }
    least = max((rows.nbytes + v.nbytes) / ceiling.copy_gb_s / 1e3, ceiling.launch_us)
    return [_line(case, op, launch, case.rows, round(least, 3)) for op, launch in ops.items()]


def _line(case: Case, op: str, launch: Callable[[], object], rows: int, least: float | None) -> dict[str, Any]:
    us, p20, p80 = (round(value, 3) for value in in_graph([launch] * (8 if case.rows <= 64 else 1)))
    return {"op": op, **asdict(case), "rows": rows, "us": us, "p20": p20, "p80": p80, "floor_us": least}


def timed(case: Case, ceiling: Ceilings) -> list[dict[str, Any]] | str:
    """A line for each op of the case, or what is wrong."""
    if case.kind == "probes":
        return scored(case, ceiling)
    torch.manual_seed(0)
    one, x = encoder(case), torch.randn(case.rows, case.width, device=DEVICE, dtype=DTYPE)
    named = torch.randint(case.features, (case.named,), device=DEVICE)
    indices, activations, values = read_features(x, one, case.top_k, named)
    if not torch.equal(activations, _every(x, one).gather(1, indices.clamp_min(0).long()) * (indices >= 0)):
        return f"{case}: lists other activations than the product has"
    if not torch.allclose(values, read_features(x, one, 0, named)[2], rtol=1e-3, atol=1e-3):
        return f"{case}: named features differ from those that are read alone"

    def topk() -> Tensor:
        return dots(x, one.w_enc).topk(case.top_k, dim=1).values

    ops: dict[str, Callable[[], object]] = {
        "read": lambda: read_features(x, one, case.top_k, named),
        "mm": lambda: dots(x, one.w_enc),
        "mm + topk": topk,
    }
    if case.named and not one.groups:
        ops["named"] = lambda: read_features(x, one, 0, named)
    bytes_us = one.w_enc.nbytes / ceiling.copy_gb_s / 1e3
    product_us = 2 * x.numel() * case.features / ceiling.matmul_tflop_s / 1e6
    least = round(max(bytes_us, product_us), 3)
    return [_line(case, op, launch, case.rows, None if op == "named" else least) for op, launch in ops.items()]


def _every(x: Tensor, one: Encoder) -> Tensor:
    """All activations of a few rows, in parts as ``read_features`` takes them."""
    every = torch.arange(one.features, device=DEVICE)
    return read_features(x, one, 0, every)[2]


def main() -> int:
    """Parse, measure, write each line as it comes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the JSON lines")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of the cases, from 0; all when left out")
    options = parser.parse_args()
    about, ceiling = machine(options.commit), ceilings()
    torch.cuda.empty_cache()
    print(f"{about}\n{ceiling}")
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with (options.out / "reads.jsonl").open("w") as file:
        for number, case in enumerate(CASES):
            if options.cases is not None and number not in options.cases:
                continue
            lines = timed(case, ceiling)
            torch.cuda.empty_cache()
            if isinstance(lines, str):
                wrong += 1
                print(f"WRONG, not timed: {lines}")
                continue
            for line in lines:
                file.write(json.dumps({**about, **asdict(ceiling), **line}) + "\n")
                file.flush()
                spread = f"{line['us']:10.2f} us ({line['p20']:.2f} to {line['p80']:.2f})"
                print(f"{line['op']:10} {case}\n{spread}   floor {line['floor_us']}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
