"""Times of reading the strongest features of rows on a GPU, in CUDA graph replay, next to the product alone and next to
the product with torch.topk. Knows no engine.

    python -m bench.read --out DIR        every case; what is wrong is not timed

The encoder of each case is larger than the GPU's cache, so its weights come from memory. ``choose`` is what comes
behind the product. torch.topk neither knows thresholds nor promises an order of ties. The floor is the encoder's bytes
at the rate of a copy in this run, or the product's operations at that of a large product.
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
from saesteer.kernels.read.features import Encoder, dots, read_features, read_features_ref

ACTIVE = 64  # of a row, about


@dataclass(frozen=True, slots=True)
class Case:
    """How many rows of which dictionary are read."""

    rows: int
    features: int
    top_k: int = 8
    named: int = 0
    kind: str = "jumprelu"  # or topk, groupmax
    width: int = 2560


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
)


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


def timed(case: Case, ceiling: Ceilings) -> list[dict[str, Any]] | str:
    """A line for each op of the case, or what is wrong."""
    from saesteer.kernels.read.select import choose  # Triton need not be there before

    torch.manual_seed(0)
    one, x = encoder(case), torch.randn(case.rows, case.width, device=DEVICE, dtype=DTYPE)
    named = torch.randint(case.features, (case.named,), device=DEVICE)
    found = read_features(x, one, case.top_k, named)
    expected = read_features_ref(x[:64], one, case.top_k, named)
    if case.rows * case.features <= 1 << 24:
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            return f"{case}: differs from the definition"
    else:  # which works on fewer rows at once, so its products have other last digits
        same = (found[0][:64] == expected[0]).float().mean().item()
        if same < 0.95 or not torch.allclose(found[1][:64], expected[1], rtol=1e-3):
            return f"{case}: differs from the definition, {same:.1%} of the indices are equal"
    few = x[: max(1, (1 << 26) // case.features)]  # what is chosen from at once
    products = dots(few, one.w_enc)
    out = [part[: len(few)].clone() for part in found]

    def ours() -> None:
        choose(products, one.b_enc, one, named, *out)

    def topk() -> Tensor:
        return dots(x, one.w_enc).topk(case.top_k, dim=1).values

    ops: dict[str, Callable[[], object]] = {
        "read": lambda: read_features(x, one, case.top_k, named),
        "choose": ours,
        "mm": lambda: dots(x, one.w_enc),
        "mm + topk": topk,
    }
    bytes_us = one.w_enc.nbytes / ceiling.copy_gb_s / 1e3
    product_us = 2 * x.numel() * case.features / ceiling.matmul_tflop_s / 1e6
    lines = []
    for op, launch in ops.items():
        us, p20, p80 = (round(value, 3) for value in in_graph([launch] * (8 if case.rows <= 64 else 1)))
        rows = len(few) if op == "choose" else case.rows
        least = None if op == "choose" else round(max(bytes_us, product_us), 3)
        lines.append({"op": op, **asdict(case), "rows": rows, "us": us, "p20": p20, "p80": p80, "floor_us": least})
    return lines


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
