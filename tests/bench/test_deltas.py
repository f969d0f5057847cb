"""What modes cost over stock: the statistics, on made-up figures."""

import pytest

from bench.deltas import METRICS, PUBLISHED, Figures, Run, paired, summary, table


def run(mode: str, at: float, value: float) -> Run:
    return Run(mode, at, Figures(value, value / 10, value * 2))


def test_a_mode_is_compared_with_the_line_between_the_stock_runs_around_it() -> None:
    # Stock drifts by 10 each second; ours is 1 % slower at any moment.
    runs = [run("stock", 0, 100), run("a", 1, 111.1), run("b", 3, 131.3), run("stock", 4, 140), run("a", 5, 151.5)]
    found = paired([*runs, run("stock", 6, 160)])
    assert [base.ttft for _, base in found["a"]] == pytest.approx([110, 150])
    assert [base.end_to_end for _, base in found["b"]] == pytest.approx([260])
    told = summary(found["a"], {}, {})
    for metric in METRICS:
        assert told[metric]["delta_percent"] == pytest.approx(1.0)
        assert told[metric]["each_percent"] == pytest.approx([1.0, 1.0])


def test_medians_and_spread_are_of_the_paired_differences() -> None:
    base = [100.0, 200.0, 50.0]
    pairs = [(Figures(b * f, b, b), Figures(b, b, b)) for b, f in zip(base, (1.02, 0.99, 1.5), strict=True)]
    aims, published = {"ttft": 3.0, "per_token": 1.0}, PUBLISHED["gemma-3-4b"]
    told = summary(pairs, aims, published)
    one = told["ttft"]
    assert told["runs"] == 3
    assert (one["delta_percent"], one["min_percent"], one["max_percent"]) == pytest.approx((2.0, -1.0, 50.0))
    assert (one["ms"], one["stock_ms"]) == pytest.approx((102.0, 100.0))
    assert one["reached"] and one["aim_percent"] == 3.0
    worse = [(Figures(1.031 * b, 1.02 * b, b), Figures(b, b, b)) for b in base]
    row = {"mode": "idle", "at_once": 16, **summary(worse, aims, published)}
    assert [row[metric].get("reached") for metric in METRICS] == [False, False, None]
    shown = table([row])
    assert shown.count("MISSED") == 2 and " ok" in table([row | told]) and "+37.8 to +56.3" in shown
    assert "MISSED" not in table([{"mode": "idle", "at_once": 16, **summary(worse, {}, {})}])
