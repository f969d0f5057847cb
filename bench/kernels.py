"""Times of the kernels on a GPU, in CUDA graph replay, beside the ceilings of the same run. Knows no engine.

    python -m bench.kernels --out DIR                   every case; a kernel that is wrong is not timed
    python -m bench.kernels --out DIR --sweep lone      other launches of one kernel, see bench/sweep.py
    python -m bench.kernels --base main                 what is slower than in a commit or a checkout, see bench/base.py

A warm case edits with the same features again; a cold one takes others at each launch of the graph, so that the weights
come from memory as they would in a model; a dictionary that is needed whole is always cold. The floor is the larger of
an empty launch and what has to be moved or multiplied, at the rates of this run. Targets in microseconds are for the
normed form with its weights from memory; those that are factors are for every line, over its own floor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.batch import FORMS, Batches, edit, floor
from bench.cases import CASES, CURVE_FORM, CURVES, WIDTHS, Case
from bench.gate import Gate
from bench.timing import Ceilings, Launch, Timing, capture, ceilings, in_graph, machine
from saesteer.kernels import ops
from saesteer.kernels.edit.configs import TILED_ABOVE

Row = dict[str, Any]
_MAPPED = ("idle 16", "16 x 1", "256 x 1", "8192 x 1", "8 + 504 x 1")  # cases whose work list is timed, too


def launches(case: Case, calls: Sequence[tuple[Any, ...]], tuned: Any = None) -> list[Launch]:
    """The kernels once for each list of arguments, as a step of the case launches them.

    A server runs a step of many tokens outside of graphs, where the rows' kinds choose the kernel. An idle one launches
    nothing there; what is timed is the kernel with nothing to do, as in a graph.
    """
    from saesteer.kernels.edit.launch import edit_triton  # Triton need not be there before

    tiled = case.tokens > TILED_ABOVE and bool(case.steered)
    return [partial(edit_triton, *call, tuned=tuned, tiled=tiled) for call in calls]


def row(op: str, case: Case, width: int, form: str, cache: str, timing: Timing, least: float, **more: Any) -> Row:
    """One line of the results."""
    usual = form == CURVE_FORM and (cache == "cold" or not case.steered)  # an idle case has no weights
    target = case.goal.target(width, least, usual=usual) if case.goal is not None and op == "edit" else None
    us, p20, p80 = (round(value, 3) for value in timing)
    edits = case.edits if case.steered else 0
    named = {"op": op, "case": case.name, "width": width, "dtype": "bf16", "form": form, "cache": cache}
    shape = {"tokens": case.tokens, "requests": case.requests, "edits": edits, "kind": case.kind}
    return {
        **named,
        **shape,
        "us": us,
        "p20": p20,
        "p80": p80,
        "floor_us": round(least, 3),
        "ratio": round(us / least, 3),
        "target_us": None if target is None else round(target, 3),
        "reached": None if target is None else us <= target,
        "curve": case.curve,
        **more,
    }


def replayed(case: Case, *call: Any) -> None:
    """One edit out of a graph; the same kernels have run before."""
    [launch] = launches(case, [call])
    if not case.steered:
        launch()  # but outside of a graph an idle step of many tokens launches nothing
    capture([launch]).replay()
    torch.cuda.synchronize()


def fits(case: Case, width: int) -> bool:
    """Whether the case is measured at this width."""
    return width in case.widths or width not in WIDTHS


def caches(case: Case) -> tuple[str, ...]:
    """Where the weights of a case may come from."""
    if case.whole or case.curve is not None:
        return ("cold",)
    return ("warm", "cold") if case.steered else ("warm",)


def yardsticks(batches: Batches, cases: Sequence[Case]) -> Iterator[Row]:
    """What a reconstruction is compared with: the encoder's product and a sparse decode."""
    from bench.yardsticks import dense_product, sparse_decode

    for case in (case for case in cases if case.kind == "reconstruct" and fits(case, batches.width)):
        x = batches.stream(case)[0]
        dense = dense_product(x, batches.w_enc)
        sparse, active = sparse_decode(x, batches.w_enc, batches.w_dec)
        for op, timing in (("mm", dense), ("decode", sparse)):
            yield row(op, case, batches.width, "-", "cold", timing, timing.median, active=round(active, 1))


def measure(widths: Sequence[int], ceiling: Ceilings, cases: Sequence[Case]) -> Iterator[Row | str]:
    """Rows of all cases whose answer is right, and what was wrong with the others."""
    for number, width in enumerate(widths):
        batches = Batches(width)
        yield from yardsticks(batches, cases)
        for case in (case for case in cases if fits(case, width)):
            for form in (CURVE_FORM,) if case.curve is not None else FORMS:
                begin = time.monotonic()
                wrong = check(batches, case, form)
                if wrong is not None:
                    yield f"{case.name} {width} {form}: {wrong}"
                    continue
                checked = round(time.monotonic() - begin, 2)  # compilation is most of it
                for cache in caches(case):
                    timing = in_graph(launches(case, batches.calls(case, form, cache)))
                    least = floor(case, form, cache, width, ceiling)
                    yield row("edit", case, width, form, cache, timing, least, checked_in_s=checked)
        for case in (case for case in cases if not number and case.name in _MAPPED and case.curve is None):
            arguments = batches.map_arguments(case, batches.batch(case, 1, 1.0).bound[0].table)
            launch = partial(ops.map_, *arguments)
            yield row("map", case, 0, "-", "warm", in_graph([launch] * 64), ceiling.launch_us)


def check(batches: Batches, case: Case, form: str) -> str | None:
    """What is wrong with the kernel's answer, outside of a graph and in one; None when nothing is."""
    gate = Gate(batches, case, form)
    try:
        return gate.wrong(edit) or gate.wrong(partial(replayed, case))
    except compile_errors() as exc:
        return failed(exc)


def compile_errors() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that it cannot compile or launch; of its passes that is a RuntimeError."""
    from triton.errors import TritonError

    return (TritonError, RuntimeError)


def failed(exc: Exception) -> str:
    """Its message; the device's own errors, behind which nothing can run, are raised instead."""
    torch.cuda.synchronize()
    return f"{type(exc).__name__}: {str(exc)[:200]}"


def compile_ahead(widths: Sequence[int], cases: Sequence[Case]) -> None:
    """Fill Triton's cache from a process for each width and form: it compiles one kernel at a time in each."""
    command = [sys.executable, "-m", "bench.kernels", "--compile", "--cases", *(case.name for case in cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}  # for the references
    with ThreadPoolExecutor() as pool:
        for width, form in itertools.product(widths, FORMS):
            one = [*command, "--widths", str(width), "--form", form]
            # What is wrong with a kernel is said when it is measured.
            pool.submit(subprocess.run, one, env=environment, capture_output=True, check=False)


def table(rows: Sequence[Row]) -> str:
    """For people; lines with a target come last."""
    lines = [
        f"{'op':7}{'case':22}{'width':>6} {'form':7}{'cache':6}"
        f"{'us':>9}{'p20':>9}{'p80':>9}{'floor':>9}{'ratio':>7}{'target':>9}  reached"
    ]
    for r in sorted(rows, key=lambda r: r["target_us"] is not None):
        target = "" if r["target_us"] is None else f"{r['target_us']:.2f}"
        reached = {None: "", True: "yes", False: "MISSED"}[r["reached"]]
        lines.append(
            f"{r['op']:7}{r['case']:22}{r['width']:6} {r['form']:7}{r['cache']:6}{r['us']:9.2f}{r['p20']:9.2f}"
            f"{r['p80']:9.2f}{r['floor_us']:9.2f}{r['ratio']:7.2f}{target:>9}  {reached}".rstrip()
        )
    return "\n".join(lines)


def main() -> int:
    """Parse, measure, write each line as it comes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the JSON lines")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="all when left out")
    parser.add_argument("--no-curves", action="store_true", help="leave out what only the plot needs")
    parser.add_argument("--sweep", choices=["edit", "lone", "many", "encode"], help="time other launches instead")
    parser.add_argument("--grid", nargs="+", default=[], metavar="FIELD=V,V", help="of the sweep")
    parser.add_argument("--form", choices=FORMS, default="normed", help="of the sweep")
    parser.add_argument("--compile", action="store_true", help="check the cases of the first width and form, no more")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    parser.add_argument("--seconds", type=float, default=480, help="most time of the sweep")
    parser.add_argument("--base", metavar="COMMIT", help="run it and this tree in turn, and print what got slower")
    options = parser.parse_args()
    if options.base is not None:
        from bench.base import compare

        chosen = ["--widths", *map(str, options.widths)]
        return compare(options.base, [*chosen, "--cases", *options.cases] if options.cases else chosen)
    begin = time.monotonic()
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    if options.compile:
        batches = Batches(options.widths[0])
        for case in cases:
            if fits(case, batches.width):
                check(batches, case, options.form)
        return 0
    if not options.sweep:
        compile_ahead(options.widths, cases)
    about, ceiling = machine(options.commit), ceilings()
    torch.cuda.empty_cache()
    print(f"{about}\n{ceiling}\ncompiled in {time.monotonic() - begin:.0f} s")
    name, found = "kernels", measure(options.widths, ceiling, cases)
    if options.sweep:
        from bench.sweep import sweep

        name, found = f"kernels-sweep-{options.sweep}", sweep(options, ceiling, cases if options.cases else None)
    elif options.cases is None and not options.no_curves:
        found = measure(options.widths, ceiling, [*cases, *CURVES])
    rows, red = [], []
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{name}.jsonl").open("w") as file:
        for line in found:
            if isinstance(line, str):
                red.append(line)
                continue
            rows.append(line)
            file.write(json.dumps({**about, **asdict(ceiling), **line}) + "\n")
            file.flush()
    shown = table([line for line in rows if line["curve"] is None])
    if not options.sweep:
        print(shown)
        (options.out / f"{name}.txt").write_text(f"{about}\n{ceiling}\n\n{shown}\n")
    asked = [line["reached"] for line in rows if line["reached"] is not None]
    print(f"{sum(asked)} of {len(asked)} targets reached, {time.monotonic() - begin:.0f} s")
    for wrong in red:
        print(f"WRONG, not timed: {wrong}")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
