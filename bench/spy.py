"""Where a mode's host time goes: py-spy samples all processes of its engine while a load runs (`bench.modes --spy`).

The times of a run that is sampled are no results. What is compared is what each function takes of a step, mode by mode,
in the threads that steps wait for: the main thread of each process. Knows py-spy's words, and no engine.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TypeVar

RATE = 200  # samples a second
ROWS = 40  # functions of a table
_LINE = re.compile(r":\d+\)$")

T = TypeVar("T")
Shares = Mapping[str, float]  # of the run's time, by process and function


def refuse_without() -> None:
    """Refuse what cannot be sampled before a minute is spent on starting engines.

    Raises:
        SystemExit: there is no py-spy.
    """
    if shutil.which("py-spy") is None:
        raise SystemExit("--spy is given and there is no py-spy; expected it on the path, as by pip install py-spy")


def sampled(pid: int, place: Path, work: Callable[[], T]) -> tuple[T, Shares]:
    """Do something while a process and those that it has started are sampled.

    Args:
        pid: of the process.
        place: where the samples go, in the form that flame graphs are drawn from.
        work: what is done meanwhile.

    Returns:
        What the work returns, and the shares of its time.

    Raises:
        SystemExit: py-spy may not look into the process, or failed otherwise.
    """
    command = ["py-spy", "record", "--pid", str(pid), "--subprocesses", "--threads", "--nonblocking", "--idle"]
    command += ["--format", "raw", "--rate", str(RATE), "--duration", "unlimited", "--output", str(place)]
    spy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert spy.stdout is not None
    said = spy.stdout.readline()  # once it samples
    begin = perf_counter()
    done = work()
    seconds = perf_counter() - begin
    spy.send_signal(signal.SIGINT)  # it writes what it has
    said += spy.communicate(timeout=60)[0]
    if not place.exists():
        raise SystemExit(f"py-spy has written no samples: {said[-500:]}")
    return done, shares(place.read_text().splitlines(), seconds)


def shares(lines: Iterable[str], seconds: float) -> Shares:
    """How much of a time each function was on the stack of a main thread.

    Args:
        lines: stacks from the outermost frame, with the number of their samples.
        seconds: in which they were taken.
    """
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, number = line.rpartition(" ")
        frames = stack.split(";")
        main = next((at for at, frame in enumerate(frames) if "MainThread" in frame), None)
        if main is None:
            continue
        process = _process(frames[:main])
        for frame in {_LINE.sub(")", frame) for frame in frames[main + 1 :]}:
            found[f"{process} {frame}"] += int(number)
    return {name: count / RATE / seconds for name, count in found.items()}


def _process(frames: Sequence[str]) -> str:
    """A short name of a sampled process: vLLM gives its own theirs."""
    about = frames[-1] if frames else ""
    return next((name for name in ("EngineCore", "Worker") if name in about), "front end")


def table(steps: Mapping[str, tuple[float, Shares]], base: str) -> str:
    """For people: ms of a step in each function, those first that differ most from a mode of which nothing is asked.

    Args:
        steps: of each mode the ms of a step, and the shares.
        base: the mode that the others are compared with.
    """
    ms = {mode: {name: step * share for name, share in found.items()} for mode, (step, found) in steps.items()}
    names = {name for found in ms.values() for name in found}
    most = sorted(names, key=lambda name: -max(ms[mode].get(name, 0.0) - ms[base].get(name, 0.0) for mode in ms))
    lines = ["".join(f"{mode:>12}" for mode in ms) + "  ms of a step in"]
    lines += ["".join(f"{ms[mode].get(name, 0.0):12.3f}" for mode in ms) + f"  {name}" for name in most[:ROWS]]
    return "\n".join(lines)
