"""Other launches of one kernel, timed: every combination of a few fields of its config. Tells which rows to paste.

    python -m bench.kernels --sweep lone --grid num_warps=4,8 at_once=1,2 programs=2,3 --widths 2304

A field that the grid does not name keeps what kernels/edit/configs.py has; without a grid it is the one below. A
combination that the compiler refuses, or whose answer is wrong, is said and left out.
"""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bench.batch import Batches, floor
from bench.cases import CASES, Case
from bench.gate import Gate
from bench.kernels import Row, compile_errors, failed, fits, launches, row
from bench.timing import Ceilings, in_graph
from saesteer.kernels.edit.configs import Configs, configs, for_tokens

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is timed for one kernel when nothing else is asked for."""

    cases: tuple[str, ...]
    grid: Grid


SWEEPS = {
    "edit": Sweep(
        ("16 x 1", "256 x 1", "16 x 32", "16 x 256"),
        {"num_warps": (2, 4, 8), "chunk": (2, 4, 8), "programs": (2, 4, 8)},
    ),
    "lone": Sweep(
        ("8192 x 1", "8192 x 1, one in ten"),
        {"num_warps": (2, 4, 8), "at_once": (1, 2), "stages": (2, 3, 5), "programs": (1, 2, 3, 4)},
    ),
    "many": Sweep(
        ("8192 x 4", "8192 x 32"),
        {"num_warps": (4, 8), "tokens": (16, 32, 64), "block_k": (64, 128), "block_n": (64, 128), "stages": (2, 3)},
    ),
    "encode": Sweep(
        ("16 x reconstruct", "8192 x reconstruct"),
        {"num_warps": (4, 8), "block_m": (16, 64, 128), "block_n": (64, 128, 256), "block_k": (64, 128)},
    ),
}


def parse(grid: Sequence[str]) -> Grid:
    """``["tokens=2,4", "at_once=1"]`` → values by field."""
    found = {}
    for one in grid:
        field, _, values = one.partition("=")
        found[field] = [ast.literal_eval(value) for value in values.split(",")]
    return found


def combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each field."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def tuned(kernel: str, width: int, tokens: int, values: Mapping[str, Any]) -> Configs:
    """The launches of this width with other values for one kernel, and these for every number of tokens."""
    now = configs(width)
    given = getattr(now, kernel)
    changed: Any = {
        kernel: ((1 << 30, replace(for_tokens(given, tokens), **values)),)
        if isinstance(given, tuple)
        else replace(given, **values)
    }
    return replace(now, **changed)


def sweep(options: Any, ceiling: Ceilings, cases: Sequence[Case] | None) -> Iterator[Row | str]:
    """Cold times of every combination, until the time is up, and what was wrong; the best of each case are printed."""
    kernel, form = options.sweep, options.form
    grid = parse(options.grid) or SWEEPS[kernel].grid
    chosen = cases or [case for case in CASES if case.name in SWEEPS[kernel].cases]
    begin = time.monotonic()
    for number, width in enumerate(options.widths):
        batches = Batches(width)
        mine = [case for case in chosen if fits(case, width)]
        prepared = [(case, Gate(batches, case, form), batches.calls(case, form, "cold")) for case in mine]
        best: dict[str, list[tuple[float, str]]] = {case.name: [] for case in mine}
        for values in combinations(grid):
            if time.monotonic() - begin > options.seconds * (number + 1) / len(options.widths):
                print(f"width {width}: stopped before {values}, the time is up")
                break
            for case, gate, calls in prepared:
                config = tuned(kernel, width, case.tokens, values)
                try:
                    wrong = gate.wrong(partial(_once, case, config))
                    timing = None if wrong is not None else in_graph(launches(case, calls, config), replays=5)
                except compile_errors() as exc:  # such as more memory than a multiprocessor has
                    wrong, timing = failed(exc), None
                if timing is None:
                    yield f"{case.name} {width} {values}: {wrong}"
                    continue
                least = floor(case, form, "cold", width, ceiling)
                shown = _shown(config, kernel)
                best[case.name].append((timing.median, str(shown)))
                yield {**row("edit", case, width, form, "cold", timing, least), "config": {kernel: shown}}
        for name, timed in best.items():
            for us, shown_as in sorted(timed)[:4]:
                print(f"{name:22}{width:6} {form:7}{us:9.2f}  {shown_as}")


def _once(case: Case, config: Configs, *call: Any) -> None:
    launches(case, [call], config)[0]()


def _shown(config: Configs, kernel: str) -> dict[str, Any]:
    given = getattr(config, kernel)
    one: Any = given[0][1] if isinstance(given, tuple) else given
    return asdict(one)
