"""Shares of a run's time by function, from py-spy's samples. Runs no py-spy."""

import shutil

import pytest

from bench import spy

SAMPLES = [
    'process 7:"python -m bench.offline";thread (7): MainThread;main (bench/offline.py:9);step (llm.py:3) 30',
    'process 7:"python -m bench.offline";thread (7): MainThread;main (bench/offline.py:9);step (llm.py:4) 10',
    'process 7:"python";process 8:"VLLM::EngineCore";thread (8): MainThread;step (core.py:5);step (core.py:6) 20',
    'process 7:"python";process 8:"VLLM::EngineCore";thread (9): Thread-1 (_run);put (spool.py:6) 90',
]


def test_lines_of_a_function_count_together_and_other_threads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spy, "RATE", 10)
    assert spy.shares(SAMPLES, 8.0) == {
        "front end main (bench/offline.py)": 0.5,
        "front end step (llm.py)": 0.5,
        "EngineCore step (core.py)": 0.25,
    }


def test_the_table_begins_with_what_differs_most_from_idle() -> None:
    modes = {"idle": (4.0, {"a": 0.5, "b": 0.5}), "capture": (6.0, {"a": 0.5, "b": 0.75, "c": 0.25})}
    first, *rows = spy.table(modes, "idle").splitlines()
    assert first.split()[:2] == ["idle", "capture"]
    assert [row.split() for row in rows] == [
        ["2.000", "4.500", "b"],
        ["0.000", "1.500", "c"],
        ["2.000", "3.000", "a"],
    ]


def test_without_py_spy_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="pip install py-spy"):
        spy.refuse_without()
