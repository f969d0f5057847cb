"""How long a launch takes on a GPU, in replays of a CUDA graph, and what the device reaches; knows no case."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

DEVICE = "cuda"
DTYPE = torch.bfloat16

Launch = Callable[[], object]


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


def spread(times: Sequence[float]) -> Timing:
    """Median, p20 and p80 of at least one time."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def capture(launches: Sequence[Launch]) -> Any:
    """A CUDA graph of all of them; each must have run before, since nothing may be compiled while capturing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def in_graph(launches: Sequence[Launch], replays: int | None = None) -> Timing:
    """Time of one launch, from replays of a graph that holds them all; the first of them runs once before."""
    launches[0]()
    graph = capture(launches)
    replays = replays or max(9, min(25, 4000 // len(launches)))
    marks: list[tuple[Any, Any]] = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        for _ in range(replays)
    ]
    for _ in range(3):
        graph.replay()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return spread([begin.elapsed_time(end) * 1e3 / len(launches) for begin, end in marks])


def ceilings() -> Ceilings:
    """Measure them."""
    from bench.yardsticks import empty_launch

    a = torch.randn(1 << 28, device=DEVICE)
    b = torch.empty_like(a)
    copy = in_graph([lambda: torch.mul(a, 1, out=b)] * 2, 10).median  # a copy becomes a slower memcpy node
    # Random data: on zeros the product is a tenth faster.
    m = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(m)
    matmul = in_graph([lambda: torch.mm(m, m, out=out)] * 2, 10).median
    launch = in_graph([empty_launch(a)] * 512).median
    return Ceilings(2 * a.nbytes / copy / 1e3, 2 * 8192**3 / matmul / 1e6, launch)


def machine(commit: str = "") -> dict[str, str]:
    """What the numbers belong to; the commit is asked of git unless it is given, as for a copy without history."""

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or ask("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": time.strftime("%Y-%m-%d"),
    }
