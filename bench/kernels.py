"""Times of the kernels on a GPU, in CUDA graph replay, beside the ceilings of the same run. Knows no engine.

    python -m bench.kernels --out DIR            every case; a kernel that is wrong is not timed
    python -m bench.kernels --out DIR --sweep    the launch configs of kernels/configs.py, best first

A warm case edits the same streams with the same features again; a cold one takes others at each launch of the graph,
so that the weights come from memory as they would in a model. The floor is the larger of an empty launch and the bytes
that have to move, at the copy bandwidth of this run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bench.cases import CASES, FEATURES, SWEEP, SWEEP_CASES, WIDTHS, Case
from saesteer.kernels import ops  # noqa: F401  (registers them)
from saesteer.kernels.configs import EditConfig, edit_config
from saesteer.kernels.edit import edit_triton
from saesteer.kernels.layout import BARE, NORMED
from saesteer.kernels.reference import edit_ref_
from saesteer.testing import Entry, make_table, make_work, relative_error

DEVICE = "cuda"
DTYPE = torch.bfloat16
FORMS = {"bare": (BARE, 2), "normed": (NORMED, 3)}  # form, tensors that pass through memory for an edited token
EPS = 1e-6
EDIT: Any = edit_triton  # its arguments come as one list


class Timing(NamedTuple):
    """Microseconds of one launch."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches in this run."""

    copy_gb_s: float  # read and written bytes
    matmul_tflop_s: float
    launch_us: float  # an empty kernel in a graph


@triton.jit
def _empty_kernel(x):  # type: ignore[no-untyped-def]
    pass


def in_graph(launches: list[Callable[[], object]], replays: int = 25) -> Timing:
    """Time of one launch, from replays of a graph that holds them all."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 / len(launches) for begin, end in marks)
    return Timing(statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5])


def launches(arguments: list[Any], config: EditConfig | None = None) -> list[Callable[[], object]]:
    """The edit kernel, once for each list of arguments."""
    return [partial(EDIT, *args, has_topk=False, config=config) for args in arguments]


def ceilings() -> Ceilings:
    """Measure them."""
    a = torch.randn(1 << 28, device=DEVICE)
    b = torch.empty_like(a)
    copy = in_graph([lambda: torch.mul(a, 1, out=b)] * 2, 10).median  # a copy becomes a slower memcpy node
    m = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(m)
    matmul = in_graph([lambda: torch.mm(m, m, out=out)] * 2, 10).median
    launch = in_graph([lambda: _empty_kernel[(16,)](a, num_warps=4)] * 512).median
    return Ceilings(2 * a.nbytes / copy / 1e3, 2 * 8192**3 / matmul / 1e6, launch)


class Bench:
    """One width: its dictionary, and the arguments of edit_ for each case."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(width)
        self.width = width
        w = torch.randn(FEATURES, width, device=DEVICE)
        self.w_enc = (w / w.norm(dim=1, keepdim=True)).to(DTYPE)
        self.w_dec = self.w_enc.clone()
        self.b_enc = torch.zeros(FEATURES, device=DEVICE)
        self.norm_weight = torch.rand(width, device=DEVICE).to(DTYPE)
        self.site = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def tables(self, case: Case, many: int) -> list[Tensor]:
        """`many` tables of the same shape, with features of their own as far as the dictionary reaches."""
        features = itertools.cycle(torch.randperm(FEATURES).tolist())
        steered = set(case.steered)
        return [
            make_table(
                [
                    [
                        [[Entry(next(features), scale=0.0, shift=3.0) for _ in range(case.clamps)]]
                        if r in steered
                        else []
                    ]
                    for r in range(case.requests)
                ],
                1,
                DEVICE,
            )
            for _ in range(many)
        ]

    def work(self, case: Case, table: Tensor) -> Tensor:
        """The list as the map kernel writes it."""
        work = make_work([], case.tokens, DEVICE)
        torch.ops.saesteer.map_(work, *map_inputs(case), table, case.requests)
        return work

    def arguments(self, case: Case, form: str, cold: bool) -> list[Any]:
        """Arguments of each launch in the graph of a case."""
        small = case.tokens <= 256
        per_launch = max(1, len(case.steered) * case.clamps)
        different = min(512 if small else 16, FEATURES // per_launch) if cold else 1
        tables = self.tables(case, different)
        streams = [self.stream(case) for _ in range(4 if cold and not small else 1)]
        work = self.work(case, tables[0])
        return [
            self.args(*streams[at % len(streams)], form, tables[at % different], work)
            for at in range(max(different, 64 if small else 16))
        ]

    def stream(self, case: Case) -> tuple[Tensor, Tensor]:
        """Stream and normed stream."""
        shape = (case.tokens, self.width)
        return torch.randn(shape, device=DEVICE).to(DTYPE), torch.randn(shape, device=DEVICE).to(DTYPE)

    def args(self, stream: Tensor, second: Tensor, form: str, table: Tensor, work: Tensor) -> Any:
        """Arguments of edit_ but the last."""
        number = FORMS[form][0]
        norm = (None, None) if number == BARE else (second, self.norm_weight)
        weights = (self.w_enc, self.w_dec, self.b_enc)
        return (stream, *norm, table, self.site, work, *weights, number, EPS, 1.0)

    def wrong(self, case: Case, form: str) -> str | None:
        """What is wrong with the kernel's answer to this case; the gate before any timing."""
        stream, second = self.stream(case)
        table = self.tables(case, 1)[0]
        args = self.args(stream, second, form, table, self.work(case, table))
        theirs: Any = [a.cpu() if isinstance(a, Tensor) else a for a in args]  # before the kernel changes them
        torch.ops.saesteer.edit_(*args, False)
        listed = case.length * len(case.steered)
        if int(theirs[5][0, 0]) != listed:
            return f"{int(theirs[5][0, 0])} tokens are listed, expected {listed}"
        before = [None if a is None else a.clone() for a in theirs[:2]]
        edit_ref_(*theirs)
        for name, ours, want, was in zip(("stream", "second"), args[:2], theirs[:2], before, strict=True):
            if ours is None:
                continue
            same = (want == was).all(1)
            if not torch.equal(ours.cpu()[same], was[same]):
                return f"{name}: tokens without an edit have changed"
            error = relative_error(ours, want)
            if not error < 1e-3:
                return f"{name}: relative error {error:.1e} to the reference"
        return None

    def floor(self, case: Case, form: str, cold: bool, ceiling: Ceilings) -> float:
        """Microseconds that no kernel can beat."""
        passes = FORMS[form][1] * case.length * len(case.steered)
        rows = 2 * case.clamps * len(case.steered) if cold else 0
        moved = (passes + rows) * self.width * DTYPE.itemsize
        return max(ceiling.launch_us, moved / ceiling.copy_gb_s / 1e3)


def map_inputs(case: Case) -> tuple[Any, ...]:
    """slots, row_offset, query_start_loc and positions of a case."""
    slots = torch.arange(case.requests, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(0, case.tokens + 1, case.length, dtype=torch.int32, device=DEVICE)
    return slots, 1, starts, 1 + torch.arange(case.tokens, device=DEVICE) % case.length


def machine() -> dict[str, str]:
    """What the numbers belong to."""

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": ask("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": time.strftime("%Y-%m-%d"),
    }


def report(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    print(f"{'op':5}{'case':22}{'width':>6} {'form':7}{'cache':6}{'us':>9}{'p20':>9}{'p80':>9}{'floor':>8}{'ratio':>7}")
    for r in rows:
        print(
            f"{r['op']:5}{r['case']:22}{r['width']:6} {r['form']:7}{r['cache']:6}"
            f"{r['us']:9.2f}{r['p20']:9.2f}{r['p80']:9.2f}{r['floor_us']:8.2f}{r['ratio']:7.2f}"
        )


def row(op: str, case: Case, width: int, form: str, cache: str, timing: Timing, floor: float) -> dict[str, Any]:
    """One line of the results."""
    us, p20, p80 = (round(value, 3) for value in timing)
    named = {"op": op, "case": case.name, "width": width, "dtype": "bf16", "form": form, "cache": cache}
    return {**named, "us": us, "p20": p20, "p80": p80, "floor_us": round(floor, 3), "ratio": round(us / floor, 3)}


def measure(widths: list[int], ceiling: Ceilings) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all cases whose answer is right, and what was wrong with the others."""
    rows, red = [], []
    for width in widths:
        bench = Bench(width)
        for form, case in itertools.product(FORMS, CASES):
            wrong = bench.wrong(case, form)
            if wrong:
                red.append(f"{case.name} {width} {form}: {wrong}")
                continue
            for cold in (False, True) if case.steered else (False,):
                timing = in_graph(launches(bench.arguments(case, form, cold)))
                floor = bench.floor(case, form, cold, ceiling)
                found = row("edit", case, width, form, "cold" if cold else "warm", timing, floor)
                rows.append({**found, "config": asdict(edit_config(width))})
    bench = Bench(1)
    for case in CASES:
        table = bench.tables(case, 1)[0]
        work, inputs = make_work([], case.tokens, DEVICE), map_inputs(case)
        launch = partial(torch.ops.saesteer.map_, work, *inputs, table, case.requests)
        rows.append(row("map", case, 0, "-", "warm", in_graph([launch] * 64), ceiling.launch_us))
    return rows, red


def sweep(widths: list[int], form: str, ceiling: Ceilings, seconds: float) -> list[dict[str, Any]]:
    """Cold times of every launch config, until the time is up; the best of each case is printed."""
    begin, rows = time.monotonic(), []
    cases = [case for case in CASES if case.name in SWEEP_CASES]
    for width in widths:
        bench = Bench(width)
        prepared = [(c, bench.floor(c, form, True, ceiling), bench.arguments(c, form, True)) for c in cases]
        for values in itertools.product(*SWEEP.values()):
            config = EditConfig(**dict(zip(SWEEP, values, strict=True)))
            if time.monotonic() - begin > seconds * (widths.index(width) + 1) / len(widths):
                print(f"width {width}: stopped at {config}, the time is up")
                break
            for case, floor, arguments in prepared:
                timing = in_graph(launches(arguments, config), replays=5)
                rows.append({**row("edit", case, width, form, "cold", timing, floor), "config": asdict(config)})
        for case in cases:
            mine = [r for r in rows if r["case"] == case.name and r["width"] == width]
            for r in sorted(mine, key=lambda r: r["us"])[:4]:
                print(f"{case.name:12}{width:6} {form:7}{r['us']:9.2f}  {r['config']}")
    return rows


def main() -> int:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the JSON lines")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--sweep", action="store_true", help="time the launch configs instead")
    parser.add_argument("--form", choices=FORMS, default="normed", help="of the sweep")
    parser.add_argument("--seconds", type=float, default=480, help="most time of the sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.kernels needs a CUDA device", file=sys.stderr)
        return 2
    about, ceiling = machine(), ceilings()
    print("  ".join(f"{k} {v}" for k, v in about.items()))
    print("  ".join(f"{k} {v:.2f}" for k, v in asdict(ceiling).items()))
    red: list[str] = []
    if options.sweep:
        rows = sweep(options.widths, options.form, ceiling, options.seconds)
    else:
        rows, red = measure(options.widths, ceiling)
        report(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"kernels{'-sweep' * options.sweep}.jsonl").open("a") as file:
        file.writelines(json.dumps({**about, **asdict(ceiling), **r}) + "\n" for r in rows)
    for line in red:
        print(f"WRONG, not timed: {line}")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
