"""The charts: drawn from made-up rows, from what is stored, and shown on the page. Nothing is measured."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench import plot
from bench.asks import VARIED
from bench.cases import CASES, CURVES, WIDTHS
from bench.kernels import caches, row
from bench.timing import Timing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
SERVED = {"idle": 0, "clamp": 1}  # the set by mode; else that with all ops


def stored(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))


def kernels() -> list[dict[str, Any]]:
    about = {"gpu": "none", "copy_gb_s": 4200.0, "matmul_tflop_s": 800.0}
    return [
        about | row("edit", case, width, "normed", cache, Timing(2.0, 1.9, 2.2), 1.0)
        for width in WIDTHS
        for case in (*CASES, *CURVES)
        for cache in caches(case)
    ]


def steps() -> list[dict[str, Any]]:
    """Both models at an old commit, and at a new one a few modes of one model with one number of requests. Of a clamp
    two sets have one op, of which the smaller one is served."""
    curves = product(("4b", "27b"), ("idle", "clamp", "named", *VARIED), (1, 16, 64))
    few = product(("4b",), ("idle", "clamp", "named"), (16,))
    return [
        {"gpu": "none", "model": model, "commit": commit, "mode": mode, "requests": requests, "set": number}
        | {"sites": sites, "served": number == SERVED.get(mode, 3), "percent": 1.0 + number, "low": 0.9, "high": 4.2}
        for commit, each in (("old", curves), ("new", few))
        for model, mode, requests in each
        for number, sites in enumerate((0, 1, 1, 34))
        if number == 0 or number >= SERVED.get(mode, 3)
    ]


def modes() -> list[dict[str, Any]]:
    ends = {"per_token": {"stock_ms": 3.8, "ms": 3.9, "each_ms": [3.85, 3.9, 4.0]}}
    return [
        {"gpu": "none", "model": "4b", "commit": "new", "mode": mode, "tokens": tokens, "at_once": at_once}
        | {"way": "llm", "eager": eager, **ends}
        for mode in ("idle", "named")
        for eager in (False, True)
        for tokens, at_once in ((64, 16), (256, 16), (2048, 16), (256, 1), (256, 256))
    ]


def test_every_chart_is_drawn(tmp_path: Path) -> None:
    for name, rows in (("kernels.jsonl", kernels()), ("steps.jsonl", steps()), ("modes.jsonl", modes())):
        stored(tmp_path, name, rows)
    drawn = plot.draw(tmp_path, tmp_path / "out")
    assert [path.name for path in drawn] == list(plot.CHARTS)
    texts = {path.stem: path.read_text() for path in drawn}
    assert all(len(text) > 10_000 for text in texts.values())
    assert "16 x reconstruct" in texts["roofline"] and "floor at 5376" in texts["kernels"]
    assert "27b: % over a step without ops" in texts["costs"] and "dashed: without CUDA graphs" in texts["lengths"]


def test_no_stored_chart_has_a_curve_of_one_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is empty: a panel without a curve is left out."""
    drawn: list[tuple[Any, set[float]]] = []
    original = plot.line

    def line(axis: Any, rows: list[dict[str, Any]], along: str, *rest: Any, **how: Any) -> None:
        drawn.append((axis, {row[along] for row in rows}))
        original(axis, rows, along, *rest, **how)

    monkeypatch.setattr(plot, "line", line)
    for name in ("kernels", "costs", "lengths"):
        drawn.clear()
        source, needed, draw = plot.CHARTS[f"{name}.svg"]
        draw([row for row in plot.read(RESULTS / source) if needed(row)], tmp_path / f"{name}.svg")
        shown = [points for axis, points in drawn if axis.get_visible()]
        assert shown and all(len(points) > 1 for points in shown), name


def test_the_page_shows_the_charts_of_what_is_stored(tmp_path: Path) -> None:
    names = {path.name for path in plot.draw(RESULTS, tmp_path)}
    page = (ROOT / "docs" / "performance.md").read_text()
    assert names == {name for name in plot.CHARTS if f"(../bench/results/{name})" in page}
    for name in names:
        shapes = [(folder / name).read_text().count("<use") for folder in (RESULTS, tmp_path)]
        assert shapes[0] == shapes[1], "it is older than its rows: `make plots`"
