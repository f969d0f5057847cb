"""How near the hardware lets any kernel come to what is asked for: each case with kernels that do no more than needed.

    python -m bench.limits --out DIR          all cases, and a kernel at each layer; the kernels are in bench/least.py
    python -m bench.limits --only "16 x 32"   those whose name begins so

Weights come from memory and norms are included, as in bench.kernels' cold lines. An answer that should be right and is
not is not timed; a kernel that leaves out what the answer needs (programs that do not wait for each other) is marked
`part`, and its time is a floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.batch import EPS, TINY
from bench.cases import WIDTHS
from bench.layers import BARE, CASES, TOKENS, Layers
from bench.limiting import EARLY, Limit, Weights, fews, ones, reconstructs, shared, turns
from bench.timing import Launch, in_graph, machine
from saesteer.kernels.edit.configs import block

LAYERS = (2560, 5376)  # widths of the models whose layers are imitated: 4B, 27B
DEEP = 12  # layers of each
CHAIN = 4096  # rows of their weights, of which each launch takes others


def all_limits(width: int, only: str = "") -> Iterator[Limit]:
    """Those of a width whose case begins so."""
    own = Weights(width)
    cases = (
        ("16 x 1", ones),
        ("16 x 32", fews),
        ("8192 x 32", turns),
        ("8 + 504 x 32", shared),
        ("16 x reconstruct", reconstructs),
    )
    for name, of in cases:
        if name.startswith(only):
            yield from of(own)


def layers_limits(width: int) -> dict[str, Launch]:
    """Steps of DEEP layers as in bench.layers: without ops, with ours, and with the least kernel."""
    from bench.least import one_kernel

    model = Layers(width, DEEP)
    own = Weights(width, CHAIN)
    warps = 4 if width <= 3072 else 8

    def kernel(layer: int, at: int = warps, **kind: Any) -> object:
        return one_kernel[(TOKENS,)](
            *(model.stream, model.second, own.norm_weight, own.chain, own.w_enc, own.w_dec, layer * TOKENS, TINY, EPS),
            **{"WIDTH": width, "BLOCK": block(at), "num_warps": at, "ABSENT": False, **kind, **EARLY},
        )

    steps: dict[str, Launch] = {BARE: model.step(BARE)[0]}
    for case in (CASES[0], CASES[2], CASES[3]):
        steps[f"ours: {case}"] = model.step(case)[0]
    for hops in (0, 3):
        steps[f"nothing behind {hops} hops"] = partial(
            model.run, partial(kernel, HOPS=hops, ENCODES=False, ABSENT=True)
        )
        steps[f"a vector, {hops} hops"] = partial(model.run, partial(kernel, HOPS=hops, ENCODES=False))
        steps[f"a clamp, {hops} hops"] = partial(model.run, partial(kernel, HOPS=hops, ENCODES=True))
    twice = 2 * warps
    steps[f"a vector, 3 hops, {twice} warps"] = partial(model.run, partial(kernel, at=twice, HOPS=3, ENCODES=False))
    return steps


def main() -> int:
    """Check, time in turns, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of limits.jsonl")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--only", default="", help="cases that begin so")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args()
    about, rows = machine(given.commit), []
    for width in given.widths:
        for limit in all_limits(width, given.only):
            wrong = limit.check()
            named = {"case": limit.case, "width": limit.width, "how": limit.how}
            if wrong is not None:
                rows.append({**about, **named, "wrong": wrong})
                continue
            us = in_graph(limit.launches())
            rows.append({**about, **named, "us": round(us.median, 3), "p20": round(us.p20, 3), "p80": round(us.p80, 3)})
        torch.cuda.empty_cache()
    for width in LAYERS if "layers".startswith(given.only) else ():
        found = {how: in_graph([step]).median / DEEP for how, step in layers_limits(width).items()}
        bare = found.pop(BARE)
        rows += [
            {**about, "case": "layers", "width": width, "how": how, "us": round(us - bare, 3)}
            for how, us in found.items()
        ]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "limits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(f"{row['case']:18}{row['width']:6}{row.get('us', 'WRONG')!s:>10}  {row['how']} {row.get('wrong', '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
