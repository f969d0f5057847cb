"""What an op at z costs when nobody is steered and the heads are spread over two GPUs: each op gathers all heads.

    python -m bench.heads --model gemma-3-4b --out DIR        on two GPUs

Three engines with two ranks each take turns on the same requests: stock vLLM, saesteer with an op at every resid_post,
and saesteer with an op at every z. Each run stands between two runs of stock. Knows no kernel.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import engines
from bench.asks import Load
from bench.deltas import Run, figures, paired
from bench.dummy import MODELS
from bench.timing import machine

AT_ONCE, PROMPT, TOKENS = 16, 256, 128
SITES = {"stock": [], "resid_post": ["resid_post.all"], "z": ["z.all"]}


def start(model: str, folder: Path, ranks: int) -> dict[str, engines.Engine]:
    """The three engines, each with a folder of its own, on the same GPUs."""
    shared = engines.options(model, folder, at_once=AT_ONCE, length=PROMPT + TOKENS)
    own = engines.settings(model, folder) | {"modules": {}}
    running: dict[str, engines.Engine] = {}
    for name, sites in SITES.items():
        place = folder / name
        place.mkdir()
        kind = "saesteer" if sites else "stock"
        given = shared | {"tensor_parallel_size": ranks}
        running[name] = engines.Offline(kind, model, given, own | {"sites": sites}, place)
    return running


def rounds(running: dict[str, engines.Engine], count: int) -> list[Run]:
    """Runs in turn, a run of stock before and after each of ours."""
    found: list[Run] = []
    seed = 0
    for turn in range(count + 1):
        for name in ("stock", "resid_post", "stock", "z", "stock"):
            seed += 1
            requests = 4 * AT_ONCE if turn else AT_ONCE  # the first round warms up
            begin = time.monotonic()
            times = running[name].run(Load("stock", seed, requests, AT_ONCE, PROMPT, TOKENS))
            at = (begin + time.monotonic()) / 2
            if turn:
                found.append(Run(name, at, figures(times.first, times.whole, TOKENS)))
    return found


def main() -> None:
    """Measure, print, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of heads.jsonl, which grows; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # engines are stopped on the way
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = start(given.model, Path(folder), given.ranks)
        try:
            for engine in running.values():
                engine.ready()
            for name, pairs in paired(rounds(running, given.rounds)).items():
                each = [100 * (ours.per_token / stock.per_token - 1) for ours, stock in pairs]
                stock_ms = statistics.median(stock.per_token for _, stock in pairs)
                row = {"model": given.model, "ranks": given.ranks, "sites": name, "stock_ms": round(stock_ms, 4)}
                rows.append(row | {"percent": round(statistics.median(each), 2), "each": [round(x, 2) for x in each]})
                spread = f"{min(each):+.1f} to {max(each):+.1f}"
                print(f"{name:12} {statistics.median(each):+.1f} % a token ({spread}), stock {stock_ms:.3f} ms")
        finally:
            engines.stop(list(running.values()))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "heads.jsonl").open("a") as file:
            file.writelines(json.dumps({**machine(given.commit), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
