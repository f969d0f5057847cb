"""The threads that write rows into files: who waits for them, how often they write, and what ends them. No engine."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine import spool
from saesteer.engine.spool import Sink, Writer
from saesteer.planning.plan import END
from tests.plugin.test_spools import WIDTH, Steps, check, results, sinks_of, spool_of, told


def test_only_who_ends_a_request_waits_for_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, gate = results(tmp_path), Steps([(0, END)]), threading.Event()
    made, put = spool_of(found), spool.put
    monkeypatch.setattr(spool, "put", lambda *a: gate.wait(20) and put(*a))
    brought = steps.run(sinks_of(made), 0, 5)
    assert brought is not None
    assert brought.blobs(["another"]) == {"r": [[0, [(0, 5)]]]}, "at once"
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    brought.blobs(["r"])
    assert gate.is_set()
    timer.join()


def soon(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_step_waits_while_too_much_is_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, gate, calls = results(tmp_path), Steps([(0, END)]), threading.Event(), 0
    made, put = spool_of(found), spool.put

    def slow(*given: Any) -> None:
        nonlocal calls
        calls += 1
        gate.wait(20)
        put(*given)

    monkeypatch.setattr(spool, "put", slow)
    monkeypatch.setattr(spool, "MOST", 2 * 5 * 2 * WIDTH * 3)
    sinks = sinks_of(made)
    for step in range(2):
        steps.run(sinks, 5 * step, 5 * step + 5)
    thread = threading.Thread(target=steps.run, args=[sinks, 10, 15])
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    gate.set()
    thread.join(20)
    brought = steps.run(sinks, 15, 16)
    assert brought is not None
    brought.blobs(["r"])
    assert calls < 5, "steps that have waited are written together"
    rows, fields = told(made)
    rows.add([[0, [[0, 16]]]])
    rows.tell(16, 1, final=True)
    check(found, fields["activations"], range(16))


def test_a_file_gets_several_steps_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are enough of them, when an answer may end, and after a while when nobody asks for more."""
    steps, put, made = Steps([(0, END)]), spool.put, spool_of(results(tmp_path))
    sinks, calls = sinks_of(made), cast(Any, [])
    monkeypatch.setattr(spool, "put", lambda *given: calls.append(len(given[2])) or put(*given))
    monkeypatch.setattr(spool, "PAUSE", 20)
    for step in range(spool.TOGETHER + 3):
        brought = steps.run(sinks, step, step + 1)
        if step + 1 == spool.TOGETHER:
            soon(lambda: len(calls) == 1)
    assert calls == [spool.TOGETHER] and brought is not None
    brought.blobs(["r"])
    assert calls == [spool.TOGETHER, 3]
    monkeypatch.setattr(spool, "PAUSE", 0.05)
    steps.run(sinks, 0, 1)
    soon(lambda: len(calls) == 3)
    assert calls == [spool.TOGETHER, 3, 1]


def test_a_thread_that_has_ended_is_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a device that is lost")

    steps = Steps([(0, END)])
    monkeypatch.setattr(Sink, "write", broken)
    brought = steps.run(sinks_of(spool_of(results(tmp_path))), 0, 5)
    assert brought is not None
    with pytest.raises(RuntimeError, match="has ended"):
        brought.blobs(["r"])


def test_pieces_that_a_call_writes_in_part_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    sink, again = (Sink(str(tmp_path / "file"), 0, 100) for _ in range(2))
    assert again.lane == sink.lane, "what a preempted request computes anew is written behind what it had"
    some = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: some(file, [pieces[0][:2]], at))
    pieces = [np.full(5, n % 251, dtype=np.uint8) for n in range(900)]
    sink.write([*((5 * n, piece) for n, piece in enumerate(pieces)), (9000, pieces[0])])
    data = (tmp_path / "file").read_bytes()
    assert data[:4500] == b"".join(map(bytes, pieces)) and data[9000:] == bytes(pieces[0])


def test_a_writer_without_work_has_no_threads() -> None:
    before = threading.active_count()
    assert Writer().ticket == 0
    assert threading.active_count() == before


def test_a_file_stays_open_while_an_interpreter_ends(tmp_path: Path) -> None:
    """A thread may write until then; what runs last here was registered first."""
    place = tmp_path / "rows"
    place.touch()
    code = """
import atexit, sys
atexit.register(lambda: sink.write([(0, b"rows")]))
from saesteer.engine.spool import Sink
sink = Sink(sys.argv[1], 0, 1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True)
    assert place.read_bytes() == b"rows" and "could not be written" not in done.stderr
