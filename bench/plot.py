"""Draws what is stored in JSON lines: every chart for which a folder of results has the rows. It measures nothing.

    python -m bench.plot --results bench/results

| file | shows | rows |
| --- | --- | --- |
| kernels.svg | one site's time against edits and tokens, with floors | kernels.jsonl |
| roofline.svg | what the kernels reach of the memory's and the tensor cores' rates | kernels.jsonl |
| costs.svg | what a step takes longer against requests, sites and edits | steps.jsonl |
| lengths.svg | time per token against tokens of an answer and requests, with graphs and without | modes.jsonl |
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from bench.cases import CASES, WIDTHS, Case, moved, sums

Row = dict[str, Any]

# Curve of bench/cases.py: the panel's title, what runs along its x axis, and the axis' name.
PANELS = {
    "edits": ("16 tokens", "edits", "clamps of each token"),
    "tokens, 1": ("1 clamp a token", "tokens", "tokens, of 16 requests"),
    "tokens, 32": ("32 clamps a token", "tokens", "tokens, of 16 requests"),
}
COLOURS = ("#1f6fb4", "#c8550f", "#3d7d3a", "#7a4ea3")
INK, FAINT = "#222222", "#d9d9d9"
DASHED = (0, (4, 3))
NO_CURVES = "the results have no curve {!r} at width {}, expected a run without --no-curves"
PROMPT = 256  # tokens in front of a step that counts among costs
# Cases of the roofline, with where the name stands: points to the right of the dot.
ROOF = {
    **dict.fromkeys(("16 x 1", "16 x 32", "8192 x 4", "8 + 504 x 32", "8192 x 32", "16 x 256"), 6),
    **dict.fromkeys(("256 x 1", "8192 x 1", "16 x reconstruct", "8192 x reconstruct"), -6),
}
MANY = 16  # requests of a step whose sites or edits are varied
LENGTHS = {"tokens": "tokens of an answer, {} requests", "at_once": "requests, {} tokens out"}  # along the x axes
COSTS = ("idle", "clamp", "named")  # modes of a step whose requests are varied


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
        raise SystemExit(NO_CURVES.format(curve, width))
    return sorted(found, key=lambda row: row[PANELS[curve][1]])


@contextmanager
def sheet(
    out: Path, title: str, panels: int, lines: int = 1, *, height: float = 3.6, logarithmic: bool = False
) -> Iterator[Any]:
    """The panels of a chart, by line and column; drawn to a file at the end.

    Args:
        out: of the file; its suffix is the format.
        title: of the whole.
        panels: next to each other.
        lines: of panels.
        height: of a line in inches; the whole is 11 wide.
        logarithmic: the y axes are, and all panels share one.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    # Text stays text, and the same rows give the same bytes.
    style |= {"svg.fonttype": "none", "svg.hashsalt": "bench"}
    with mpl.rc_context(style):
        size = (11, height * lines + 0.3)
        figure, axes = plt.subplots(
            lines, panels, figsize=size, squeeze=False, layout="constrained", sharey=logarithmic
        )
        for axis in axes.flat:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log" if logarithmic else "linear")
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis.grid(color=FAINT, lw=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        yield axes
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
        plt.close(figure)


def line(axis: Any, rows: Sequence[Row], along: str, value: str, ends: tuple[str, str], **how: Any) -> None:
    """A curve with its spread behind it."""
    xs = [row[along] for row in rows]
    low, high = ([row[end] for row in rows] for end in ends)
    axis.fill_between(xs, low, high, color=how["color"], alpha=0.15, lw=0)
    axis.plot(xs, [row[value] for row in rows], marker="o", ms=4, **how)


def named(axis: Any, title: str, label: str) -> None:
    """A panel's title, and the name of its x axis."""
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel(label)


def draw_kernels(rows: Sequence[Row], out: Path) -> None:
    """One panel for each curve; solid lines are measured, with their p20 to p80, dashed ones are floors."""
    widths = sorted({row["width"] for row in rows if row.get("curve")})
    form = "bf16, norm included, weights from memory, CUDA graph replay"
    with sheet(out, f"One site's edits on one {rows[0]['gpu']}: {form}", len(PANELS), logarithmic=True) as [axes]:
        for axis, (curve, (title, along, label)) in zip(axes, PANELS.items(), strict=True):
            for width, colour in zip(widths, COLOURS, strict=False):
                own = points(rows, curve, width)
                line(axis, own, along, "us", ("p20", "p80"), color=colour, label=f"width {width}")
                floors = [row["floor_us"] for row in own]
                xs = [row[along] for row in own]
                axis.plot(xs, floors, color=colour, ls=DASHED, lw=1.2, label=f"floor at {width}")
            named(axis, title, label)
        axes[0].set_ylabel("µs for one site")
        axes[0].legend(frameon=False, fontsize=9, loc="upper left")


def draw_roofline(rows: Sequence[Row], out: Path) -> None:
    """One panel for each width: a dot is what a case reaches, the tick above it what its floor would, for a small
    one an empty launch; the roof is the rate of memory, then that of the tensor cores. Orange: all features encoded."""
    cases: Mapping[str, Case] = {case.name: case for case in CASES}
    first = rows[0]
    copy, most = first["copy_gb_s"] / 1e3, first["matmul_tflop_s"]
    roof = f"a copy's {copy:.1f} TB/s and a product's {most:.0f} TFLOP/s"
    widths = [width for width in WIDTHS if any(row["width"] == width for row in rows)]
    title = f"The kernels on one {first['gpu']}, norm included; the roof is {roof}"
    with sheet(out, title, len(widths), height=4.6, logarithmic=True) as [axes]:
        for axis, width in zip(axes, widths, strict=True):
            for row in rows:
                shape = row["op"], row["width"], row["form"], row["cache"], row["curve"]
                side = ROOF.get(row["case"])
                if shape != ("edit", width, "normed", "cold", None) or side is None:
                    continue
                case = cases[row["case"]]
                work = sums(case, width)
                x = work / moved(case, "normed", "cold", width)
                reached, limit = (work / row[time] / 1e6 for time in ("us", "floor_us"))
                axis.plot([x, x], [reached, limit], color=FAINT, lw=1.2, zorder=1)
                axis.plot([x], [limit], color=INK, marker="_", ms=8, zorder=2)
                axis.plot([x], [reached], color=COLOURS[1 if case.whole else 0], marker="o", ms=5, zorder=3)
                place = {"xytext": (side, -3), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
                axis.annotate(case.name, (x, reached), fontsize=7, **place)
            xs = sorted([*(2.0**power for power in range(-3, 13)), most / copy])
            axis.plot(xs, [min(copy * x, most) for x in xs], color=INK, lw=1.2)
            named(axis, f"width {width}", "operations for each byte that must move")
        axes[0].set_ylabel("TFLOP/s")


def last(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Of rows that are equal in these keys the last: a file that grows may hold a case twice."""
    return list({tuple(row.get(key) for key in keys): row for row in rows}.values())


def latest(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Of rows that are equal in these keys those of the commit, and of the GPU, that were measured last: the order of
    the lines tells. Where a commit has a case twice, see ``last``."""
    newest = {tuple(row[key] for key in keys): (row["commit"], row["gpu"]) for row in rows}
    return [row for row in rows if newest[tuple(row[key] for key in keys)] == (row["commit"], row["gpu"])]


def size(row: Row) -> tuple[int, int]:
    """Sorts sets of graphs, that with all ops comes last; two may have as many sites."""
    return row["sites"], row.get("set", 0)


def _commits(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(f"{row['commit']} on one {row['gpu']}" for row in rows))


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each model."""
    return {model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(r["model"] for r in rows)}


def several(rows: Sequence[Row], along: str) -> bool:
    """Whether rows are a curve: one point is a figure for a table, and its panel stays empty."""
    return len({row[along] for row in rows}) > 1


def varied(rows: Sequence[Row], first: str, prefix: str, last: str = "") -> list[Row]:
    """Served rows of `MANY` requests by the number in their modes' names; that of `first` is 1, of `last` all sites."""
    found = []
    for row in rows:
        name, dash, number = row["mode"].partition("-")
        if row["requests"] == MANY and row["served"]:
            if row["mode"] in (first, last):
                found.append(row | {"varied": 1 if row["mode"] == first else row["sites"]})
            elif name == prefix and dash:
                found.append(row | {"varied": int(number)})
    return sorted(found, key=lambda row: row["varied"])


def _varied(rows: Sequence[Row], kind: str) -> list[Row]:
    return varied(rows, "", "vectors", "named") if kind == "sites" else varied(rows, "clamp", "clamps")


def _curves(rows: Sequence[Row]) -> dict[str, bool]:
    served = [row for row in rows if row["served"] and row["mode"] in COSTS]
    return {
        "requests": several(served, "requests"),
        **{kind: several(_varied(rows, kind), "varied") for kind in ("sites", "edits")},
    }


def draw_costs(rows: Sequence[Row], out: Path) -> None:
    """A line for each model, with panels for requests, sites and edits; solid is what is served, with the smallest and
    largest round, dashed what the same step would take with all ops. Each point is the newest of its kind, so a curve
    may have points of several commits: the title names all."""
    usual = [row for row in rows if row.get("prompt_tokens", PROMPT) == PROMPT]
    edited = [row for row in usual if row["requests"] == MANY and row["mode"].startswith(("clamps-", "vectors-"))]
    shown = [row for row in usual if row["mode"] in COSTS] + edited
    found = last(latest(shown, "model", "mode", "requests"), "model", "mode", "requests", "set", "sites")
    curves = {model: _curves(own) for model, own in by_model(found).items()}
    found = [row for row in found if any(curves[row["model"]].values())]
    title = (
        f"What a step takes longer with edits, GPU time; dashed: with all ops in the graph\nMeasured: {_commits(found)}"
    )
    with sheet(out, title, 3, len({row["model"] for row in found})) as axes:
        for (requests, sites, edits), (model, own) in zip(axes, by_model(found).items(), strict=True):
            modes = [name for name in COSTS if any(row["mode"] == name for row in own)]
            for mode, colour in zip(modes, COLOURS, strict=False):
                mine = [row for row in own if row["mode"] == mode]
                mine.sort(key=lambda row: (row["requests"], *size(row)))
                served = [row for row in mine if row["served"]]
                line(requests, served, "requests", "percent", ("low", "high"), color=colour, label=mode)
                whole = last(mine, "requests")
                xs = [row["requests"] for row in whole]
                requests.plot(xs, [row["percent"] for row in whole], color=colour, marker="_", ls=DASHED, lw=1.2)
            requests.legend(frameon=False, fontsize=9)
            named(requests, "against requests", "requests that decode")
            requests.set_visible(curves[model]["requests"])
            for axis, kind, colour, label in (
                (sites, "sites", COLOURS[2], "layers at which each adds a vector"),
                (edits, "edits", COLOURS[1], "clamps of each, at one layer"),
            ):
                line(axis, _varied(own, kind), "varied", "percent", ("low", "high"), color=colour)
                named(axis, f"{MANY} requests", label)
                axis.set_ylim(bottom=0)
                axis.set_visible(curves[model][kind])
            first = next(axis for axis in (requests, sites, edits) if axis.get_visible())
            first.set_ylabel(f"{model}: % over a step without ops")


def swept(row: Row) -> bool:
    """Whether a row is of the sweeps of answers and requests, through ``LLM``; older rows do not say `eager`."""
    return row["way"] == "llm" and "eager" in row


def draw_lengths(rows: Sequence[Row], out: Path) -> None:
    """A line for each model: time per token against tokens of an answer and against requests; dashed is eager. Each
    point is the newest of its kind."""
    kind = ("model", "mode", "tokens", "at_once", "eager")
    sides = {model: _sides(own) for model, own in by_model(last(latest(rows, *kind), *kind)).items()}
    sides = {model: own for model, own in sides.items() if own}
    measured = _commits(row for own in sides.values() for mine in own.values() for row in mine)
    title = f"Time per token; dashed: without CUDA graphs\nMeasured: {measured}"
    with sheet(out, title, 2, len(sides)) as axes:
        for pair, (model, own) in zip(axes, sides.items(), strict=True):
            for axis, (along, words) in zip(pair, LENGTHS.items(), strict=True):
                mine = own.get(along, [])
                axis.set_visible(bool(mine))
                for eager, (mode, colour) in product(
                    (False, True), zip(("stock", "idle", "named"), (INK, *COLOURS), strict=False)
                ):
                    shown = [
                        row | _token(row["per_token"], mode)
                        for row in mine
                        if row["eager"] == eager and row["mode"] == ("named" if mode == "stock" else mode)
                    ]
                    if shown:
                        how = {"ls": DASHED} if eager else {"label": mode}
                        line(axis, shown, along, "ms", ("low", "high"), color=colour, **how)
                if mine:
                    named(axis, model, words.format(mine[0]["at_once" if along == "tokens" else "tokens"]))
                    axis.set_ylabel("ms per token")
                    axis.legend(frameon=False, fontsize=9)


def _sides(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = {}
    for along, fixed in (("tokens", "at_once"), ("at_once", "tokens")):
        counted = [row[fixed] for row in rows]
        usual = max(counted, key=counted.count)
        mine = sorted((row for row in rows if row[fixed] == usual), key=lambda row: row[along])
        if several(mine, along):
            found[along] = mine
    return found


def _token(found: Row, mode: str) -> Row:
    """A mode's time per token with its smallest and largest; of stock only the median is known."""
    if mode == "stock":
        return dict.fromkeys(("ms", "low", "high"), found["stock_ms"])
    return {"ms": found["ms"], "low": min(found["each_ms"]), "high": max(found["each_ms"])}


# File that is drawn → the file of its rows, which of them it needs, and what draws it.
CHARTS: Mapping[str, tuple[str, Callable[[Row], bool], Callable[[Sequence[Row], Path], None]]] = {
    "kernels.svg": ("kernels.jsonl", lambda row: True, draw_kernels),
    "roofline.svg": ("kernels.jsonl", lambda row: True, draw_roofline),
    "costs.svg": ("steps.jsonl", lambda row: True, draw_costs),
    "lengths.svg": ("modes.jsonl", swept, draw_lengths),
}


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every chart for which there are rows; the files that were written."""
    drawn = []
    for name, (source, needed, function) in CHARTS.items():
        rows = [row for row in read(results / source) if needed(row)] if (results / source).exists() else []
        if rows:
            function(rows, out / name)
            drawn.append(out / name)
    return drawn


def main() -> None:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of the JSON lines")
    parser.add_argument("--out", type=Path, help="folder of the charts; that of the results unless said otherwise")
    given = parser.parse_args()
    for path in draw(given.results, given.out or given.results):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
