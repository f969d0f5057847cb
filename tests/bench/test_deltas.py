"""What modes cost over stock: the statistics, aims and marks, on made-up figures."""

from unittest.mock import Mock

import pytest

from bench import deltas, modes
from bench.asks import MODES, VARIED
from bench.deltas import METRICS, PUBLISHED, TARGETS, Figures, Run, figures, paired, summary, table
from bench.dummy import MODELS


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


def test_times_of_requests_become_means() -> None:
    assert figures([0.1, 0.3], [1.1, 1.3], tokens=11) == pytest.approx((200.0, 100.0, 1200.0))
    assert figures([0.1], [0.1], tokens=2).per_token > 0


def test_aims_and_published_marks_are_of_models_modes_and_metrics_that_exist() -> None:
    assert TARGETS.keys() == PUBLISHED.keys() <= MODELS.keys()
    assert all(tuple(marks) == METRICS == tuple(deltas.TITLES) for marks in PUBLISHED.values())
    for aims in TARGETS.values():
        assert {name for name, _ in aims} <= (MODES | VARIED).keys()
        assert all(aim.keys() <= {*METRICS} for aim in aims.values())


def test_an_aim_is_of_its_mode_and_requests_alone() -> None:
    words = ["--modes", "idle", "named", "--concurrency", "16", "64"]
    bench = Mock(given=modes.arguments(words), _requests=lambda at_once: 4 * at_once)
    each = [run("stock", 0, 100), run("idle", 1, 110), run("named", 2, 101), run("stock", 3, 100)]
    bench.runs = {(16, 256): each, (64, 256): each}
    found = modes.Bench.rows(bench)
    told = {(row["mode"], row["at_once"]): [row[metric].get("reached") for metric in METRICS] for row in found}
    none = [None] * 3
    assert told == {
        ("idle", 16): [None, False, None],
        ("named", 16): [None, True, None],
        ("idle", 64): none,
        ("named", 64): none,
    }
    assert all("published_percent" in row["ttft"] for row in found)
