"""Draws the kernels' times against edits and tokens from the JSON lines of a run; measures nothing.

python -m bench.plot --results bench/results/kernels.jsonl --out bench/results/kernels.png
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


def main() -> None:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench/results/kernels.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernels.png"))
    options = parser.parse_args()
    draw(read(options.results), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
