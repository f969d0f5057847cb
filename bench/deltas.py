"""What modes cost over stock vLLM: each run against the stock runs around it, medians and spread, aims and marks.

Knows figures and when they were taken; no engine and no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

METRICS = ("ttft", "per_token", "end_to_end")
TITLES = {"ttft": "time to first token", "per_token": "time per token", "end_to_end": "end to end"}


class Figures(NamedTuple):
    """Of one run, means over its requests in ms. Some begin in a step in which another one begins, so the median of
    their first tokens would jump from the one kind of step to the other."""

    ttft: float
    per_token: float
    end_to_end: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a mode, or of stock."""

    mode: str
    at: float  # its middle, in seconds
    figures: Figures


# By model, then by mode and requests at a time: percent over stock, at most. Per token it is for bench.steps to show:
# stock itself differs by more from run to run.
TARGETS: Mapping[str, Mapping[tuple[str, int], Mapping[str, float]]] = {
    "gemma-3-4b": {
        ("idle", 16): {"per_token": 0.1},
        ("clamp", 16): {"per_token": 0.3},
        ("named", 16): {"per_token": 2.5},
        ("clamps-32", 64): {"ttft": 12.0},
    },
    "gemma-3-27b": {
        ("idle", 16): {"per_token": 0.1},
        ("clamp", 16): {"per_token": 0.2},
        ("named", 16): {"per_token": 1.5},
        ("clamps-32", 64): {"ttft": 12.0},
    },
}
# Percent over stock that another engine's modes took, on an A100.
PUBLISHED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "gemma-3-4b": {"ttft": (37.8, 56.3), "per_token": (2.5, 5.6), "end_to_end": (5.4, 7.8)},
    "gemma-3-27b": {"ttft": (45.0, 64.0), "per_token": (0.5, 1.3), "end_to_end": (1.7, 2.7)},
}


def figures(first: Sequence[float], whole: Sequence[float], tokens: int) -> Figures:
    """Those of a run.

    Args:
        first: seconds to the first token of each request.
        whole: seconds to its last.
        tokens: of each answer.
    """
    steps = max(1, tokens - 1)
    # Never nothing: on a busy machine all of a short answer may come at once.
    rest = [max(end - begin, 1e-6) / steps for begin, end in zip(first, whole, strict=True)]
    return Figures(*(1e3 * statistics.mean(times) for times in (first, rest, whole)))


_STOCK = "stock"  # mode of the runs that all others are compared with


def paired(runs: Sequence[Run]) -> dict[str, list[tuple[Figures, Figures]]]:
    """By mode, the figures of each of its runs, with stock's at the same moment: drawn as a line between the stock runs
    before and after it, so what drifts evenly falls out.

    Args:
        runs: in the order of time, the first and the last one stock's.
    """
    found: dict[str, list[tuple[Figures, Figures]]] = {}
    for place, run in enumerate(runs):
        if run.mode == _STOCK:
            continue
        before = next(one for one in reversed(runs[:place]) if one.mode == _STOCK)
        after = next(one for one in runs[place:] if one.mode == _STOCK)
        part = (run.at - before.at) / (after.at - before.at)
        base = Figures(*(a + part * (b - a) for a, b in zip(before.figures, after.figures, strict=True)))
        found.setdefault(run.mode, []).append((run.figures, base))
    return found


def summary(
    pairs: Sequence[tuple[Figures, Figures]], aims: Mapping[str, float], published: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Medians and spread of a mode's runs, for each metric; where it has an aim also whether that is reached."""
    found: dict[str, Any] = {"runs": len(pairs)}
    for number, metric in enumerate(METRICS):
        ours, stock = [own[number] for own, _ in pairs], [base[number] for _, base in pairs]
        deltas = [100 * (a / b - 1) for a, b in zip(ours, stock, strict=True)]
        delta = statistics.median(deltas)
        row: dict[str, Any] = {
            "stock_ms": round(statistics.median(stock), 4),
            "ms": round(statistics.median(ours), 4),
            "delta_percent": round(delta, 3),
            "min_percent": round(min(deltas), 3),
            "max_percent": round(max(deltas), 3),
            "each_ms": [round(value, 4) for value in ours],
            "each_percent": [round(value, 3) for value in deltas],
        }
        if metric in aims:
            row |= {"aim_percent": aims[metric], "reached": delta <= aims[metric]}
        if metric in published:
            row["published_percent"] = published[metric]
        found[metric] = row
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summaries for people: of each metric stock, ours, and the difference with its spread and verdict."""
    lines = [f"{'':21}" + "".join(f"{TITLES[metric] + ', ms':^48}" for metric in METRICS)]
    lines.append(f"{'mode':11}{'at':>4}{'out':>6}" + f"{'stock':>9}{'ours':>9}   {'delta, least to most, %':27}" * 3)
    for row in rows:
        line = f"{row['mode']:11}{row['at_once']:>4}{row.get('tokens', ''):>6}"
        for metric in METRICS:
            one = row[metric]
            verdict = "" if "aim_percent" not in one else " ok" if one["reached"] else f" MISSED {one['aim_percent']:g}"
            digits = 3 if metric == "per_token" else 1
            delta = f"{one['delta_percent']:+.2f} ({one['min_percent']:+.1f} {one['max_percent']:+.1f}){verdict}"
            line += f"{one['stock_ms']:9.{digits}f}{one['ms']:9.{digits}f}   {delta:27}"
        lines.append(line.rstrip())
    marks = [rows[0][metric].get("published_percent") for metric in METRICS] if rows else []
    if any(marks):
        told = "".join(f"{'':21}{f'+{low:g} to +{high:g}':27}" for low, high in marks)
        lines.append(f"{'published':21}{told}".rstrip())
    return "\n".join(lines)
