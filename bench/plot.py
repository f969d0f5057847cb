"""Draws times from the JSON lines of a run: the kernels' against edits and tokens, steps' against requests.

    python -m bench.plot --results bench/results/kernels.jsonl --out bench/results/kernels.png
    python -m bench.plot --results bench/results/steps.jsonl --out bench/results/steps.png

It measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Curve of bench/cases.py: the panel's title, what runs along its x axis, and the axis' name.
PANELS = {
    "edits": ("16 tokens", "edits", "clamps of each token"),
    "tokens, 1": ("1 clamp a token", "tokens", "tokens, of 16 requests"),
    "tokens, 32": ("32 clamps a token", "tokens", "tokens, of 16 requests"),
}
COLOURS = ("#1f6fb4", "#c8550f", "#3d7d3a", "#7a4ea3")
INK, FAINT = "#222222", "#d9d9d9"


def read(path: Path) -> list[Row]:
    """The rows of one run."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def points(rows: Sequence[Row], curve: str, width: int) -> list[Row]:
    """A curve's rows at one width, along its x axis.

    Raises:
        SystemExit: the run did not measure it.
    """
    found = [row for row in rows if row.get("curve") == curve and row["width"] == width]
    if not found:
        raise SystemExit(f"the results have no curve {curve!r} at width {width}, expected a run without --no-curves")
    return sorted(found, key=lambda row: row[PANELS[curve][1]])


def draw(rows: Sequence[Row], out: Path) -> None:
    """One panel for each curve; solid lines are measured, with their p20 to p80, dashed ones are floors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    widths = sorted({row["width"] for row in rows if row.get("curve")})
    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.9), sharey=True, layout="constrained")
        for axis, (curve, (title, along, label)) in zip(axes, PANELS.items(), strict=True):
            for width, colour in zip(widths, COLOURS, strict=False):
                line = points(rows, curve, width)
                xs = [row[along] for row in line]
                axis.fill_between(
                    xs, [row["p20"] for row in line], [row["p80"] for row in line], color=colour, alpha=0.15, lw=0
                )
                axis.plot(xs, [row["us"] for row in line], color=colour, marker="o", ms=4, label=f"width {width}")
                floors = [row["floor_us"] for row in line]
                axis.plot(xs, floors, color=colour, ls=(0, (4, 3)), lw=1.2, label=f"floor at {width}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis.grid(color=FAINT, lw=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("µs for one site")
        axes[0].legend(frameon=False, fontsize=9, loc="upper left")
        first = rows[0]
        figure.suptitle(
            f"One site's edits on one {first['gpu']}: bf16, norm included, weights from memory, CUDA graph replay",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def latest(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of steps.jsonl, which grows, by model: those of the commit that each was last measured at."""
    commits = {row["model"]: row["commit"] for row in rows}
    return {
        model: [row for row in rows if (row["model"], row["commit"]) == (model, commits[model])] for model in commits
    }


def draw_steps(rows: Sequence[Row], out: Path) -> None:
    """One panel for each model; solid lines are what is served, with the smallest and largest round, dashed ones what
    the same step would take with all ops."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = latest(rows)
    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(1, len(found), figsize=(5.5 * len(found), 3.9), squeeze=False, layout="constrained")
        for axis, (model, own) in zip(axes[0], found.items(), strict=True):
            every = max(row["sites"] for row in own)
            for mode, colour in zip(dict.fromkeys(row["mode"] for row in own), COLOURS, strict=False):
                line = sorted((row for row in own if row["mode"] == mode), key=lambda row: row["requests"])
                served, whole = [r for r in line if r["served"]], [r for r in line if r["sites"] == every]
                xs = [row["requests"] for row in served]
                low, high = ([row[end] for row in served] for end in ("low", "high"))
                axis.fill_between(xs, low, high, color=colour, alpha=0.15, lw=0)
                axis.plot(xs, [row["percent"] for row in served], color=colour, marker="o", ms=4, label=mode)
                axis.plot(xs, [row["percent"] for row in whole], color=colour, ls=(0, (4, 3)), lw=1.2)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{model}, ops at {every} sites", loc="left", fontsize=10, fontweight="bold")
            axis.set_xlabel("requests that decode")
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.grid(color=FAINT, lw=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][0].set_ylabel("% over a step without ops")
        axes[0][0].legend(frameon=False, fontsize=9)
        title = f"GPU time that ops add to a step on one {rows[-1]['gpu']}; dashed: with all ops in the graph"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def main() -> None:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench/results/kernels.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernels.png"))
    options = parser.parse_args()
    rows = read(options.results)
    (draw_steps if "base_us" in rows[0] else draw)(rows, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
