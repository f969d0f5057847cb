"""The threads that write rows into files: who waits for them, how often they write, and what ends them. No engine."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine import spool, staging
from saesteer.engine.sinks import Sink, Sinks, address, put
from saesteer.engine.spool import Asked, Filing, Writer
from saesteer.planning.plan import END
from tests.plugin.test_spools import WIDTH, Steps, check, filed, results, sinks_of, spool_of, told

PUT = "saesteer.engine.sinks.put"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not wait on the device."""
    monkeypatch.setattr(staging, "ROOM", 0)


def test_only_who_ends_a_request_waits_for_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, gate = results(tmp_path), Steps([(0, END)]), threading.Event()
    made = spool_of(found)
    monkeypatch.setattr(PUT, lambda *given: gate.wait(20) and cast(Any, put)(*given))
    brought = steps.run(sinks_of(made), 0, 5)
    assert brought is not None
    assert filed(brought, "another") == [], "at once"
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    assert filed(brought, "r") == [[0, [(0, 5)]]]
    assert gate.is_set()
    timer.join()


def soon(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.usefixtures("at_once")
def test_a_step_waits_while_too_much_is_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, gate, calls = results(tmp_path), Steps([(0, END)]), threading.Event(), 0
    made = spool_of(found)

    def slow(*given: Any) -> None:
        nonlocal calls
        calls += 1
        gate.wait(20)
        put(*given)

    monkeypatch.setattr(PUT, slow)
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
    filed(brought, "r")
    assert calls < 5, "steps that have waited are written together"
    rows, fields = told(made)
    rows.add([[0, [[0, 16]]]])
    rows.tell(16, 1, final=True)
    check(found, fields["activations"], range(16))


@pytest.mark.usefixtures("at_once")
def test_a_file_gets_several_steps_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are enough bytes, when an answer may end, and after a while when nobody asks for more."""
    steps, made = Steps([(0, END)]), spool_of(results(tmp_path))
    sinks, calls = sinks_of(made), cast(Any, [])
    monkeypatch.setattr(PUT, lambda *given: calls.append(len(given[2])) or cast(Any, put)(*given))
    monkeypatch.setattr(spool, "PAUSE", 20)
    monkeypatch.setattr(spool, "MOST", 16 * 2 * 3 * WIDTH)
    for step in range(8 + 3):
        brought = steps.run(sinks, step, step + 1)
        if step + 1 == 8:
            soon(lambda: len(calls) == 1)
    assert calls == [8] and brought is not None
    filed(brought, "r")
    assert calls == [8, 3]
    monkeypatch.setattr(spool, "PAUSE", 0.05)
    Steps([(0, END)]).run(sinks, 0, 1)
    soon(lambda: len(calls) == 3)
    assert calls == [8, 3, 1]


@pytest.mark.usefixtures("at_once")
def test_a_thread_that_has_ended_is_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a device that is lost")

    steps = Steps([(0, END)])
    monkeypatch.setattr(Sink, "write", broken)
    monkeypatch.setattr(spool, "PAUSE", 0.0)
    brought = steps.run(sinks_of(spool_of(results(tmp_path))), 0, 5)
    assert brought is not None
    soon(lambda: steps.captures._staging.writer._broken is not None)
    with pytest.raises(RuntimeError, match="has ended"):
        filed(brought, "r")


class Event:
    """A device's: it has come to pass once this one or a later one was waited for, or when the test says so."""

    made: ClassVar[list["Event"]] = []
    landed: ClassVar[int] = 0
    lock: ClassVar[Any] = threading.Lock()

    def __init__(self) -> None:
        self.made.append(self)
        self.number = len(self.made)

    def query(self) -> bool:
        return self.number <= Event.landed

    def synchronize(self) -> None:
        self.land(self.number)

    @classmethod
    def land(cls, number: int) -> None:
        """Up to this one they have come to pass."""
        with cls.lock:
            cls.landed = max(cls.landed, number)


FILES, ROWS = 3, 8  # of a row of two bytes each


ONES = np.ones(4, dtype=np.int64)  # as many files as a step has at most


def filing(sinks: list[Sink], rows: list[int]) -> Filing:
    """A row of each, at the position of its number."""
    return Filing(sinks, np.array(rows), np.array(rows), ONES[: len(rows)])


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            # Files and rows, or None: the row behind the last one of each of these files.
            st.none()
            | st.lists(st.tuples(st.integers(0, FILES - 1), st.integers(0, ROWS - 1)), min_size=1, max_size=4),
            st.integers(0, 3),  # steps of which the device has not finished the copies
            # A file, how many steps ago, and whether the step waits for it.
            st.none() | st.tuples(st.integers(0, FILES - 1), st.integers(0, 3), st.booleans()),
        ),
        max_size=12,
    ),
    pause=st.sampled_from([0.0, 0.002, 5.0]),
    most=st.sampled_from([8, 64, 1 << 20]),
)
def test_files_have_what_steps_brought_last_whoever_writes_it(
    tmp_path: Path, steps: Any, pause: float, most: int
) -> None:
    """No row is written before its copy has landed, and who waits for a step never waits for a later one.

    What is asked for and not waited for is soon written, however long rows may wait for others.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "PAUSE", pause)
        patch.setattr(spool, "MOST", most)
        Event.made.clear()
        Event.landed = 0
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        writer, sinks, expected = Writer(), [], np.zeros((FILES, ROWS, 2), dtype=np.uint8)
        for n in range(FILES):
            (folder / str(n)).touch()
            sinks.append(Sink(str(folder / str(n)), 0, ROWS))
        told: list[list[tuple[int, int]]] = [[] for _ in sinks]
        write = Sink.write
        early: list[int] = []
        owed: list[tuple[int, Asked, Any]] = []  # file, what was asked for, and what the file then had to have

        def watched(sink: Sink, runs: Any) -> None:
            several = [(at, [*map(bytes, pieces)]) for at, pieces in runs]
            early.extend(data[0] for _, pieces in several for data in pieces if data[0] > Event.landed)
            write(sink, several)

        patch.setattr(Sink, "write", watched)
        rows = [(file, -1) for file in range(FILES)]
        files, ones = [sinks[file] for file, _ in rows], ONES[: len(rows)]
        for number, (others, behind, wanted) in enumerate(steps, 1):
            rows = others or [(file, (row + 1) % ROWS) for file, row in dict(rows).items()]
            if others or len(rows) < len(files):
                files, ones = [sinks[file] for file, _ in rows], ONES[: len(rows)]
            at = np.array([row for _, row in rows])
            for file, row in rows:
                expected[file, row] = number, row
            data = memoryview(bytes(one for _, row in rows for one in (number, row)))
            writer.put([(Filing(files, at, at, ones), data)], Event())
            Event.land(number - behind)
            if wanted is not None:
                file, ago, waits = wanted
                before, step = Event.landed, max(1, number - ago)
                asked = writer.ask(step, [sinks[file]])
                if waits:
                    told[file] += writer.wait(asked)[0]
                    assert Event.landed <= max([before, step, *(one.ticket for _, one, _ in owed)])
                else:
                    owed.append((file, asked, expected[file] * (not ago)))
        for file, asked, least in owed:
            soon(lambda asked=asked: asked.done)  # type: ignore[misc]
            there = np.frombuffer((folder / str(file)).read_bytes().ljust(2 * ROWS, b"\0"), np.uint8)
            assert asked.done and (there.reshape(ROWS, 2) >= least).all(), "later steps have larger numbers"
            told[file] += (asked.told or [])[0]
        for spans, more in zip(told, writer.wait(writer.ask(writer.ticket, sinks)), strict=True):
            spans += more
        for file in range(FILES):
            assert {at for lo, hi in told[file] for at in range(lo, hi)} == {*expected[file].any(axis=1).nonzero()[0]}
            content = (folder / str(file)).read_bytes().ljust(2 * ROWS, b"\0")
            assert content == expected[file].tobytes()
        assert not early and not writer._held and not writer._waiting and not writer._ready


def test_who_waits_for_one_file_writes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "PAUSE", 20)
    for name in "ab":
        (tmp_path / name).touch()
    one, other = (Sink(str(tmp_path / name), 0, 1) for name in "ab")
    writer = Writer()
    writer.put([(filing([one, other], [0, 0]), memoryview(b"xy"))], None)
    writer.wait(writer.ask(writer.ticket, [one]))
    assert (tmp_path / "a").read_bytes() == b"x" and not (tmp_path / "b").read_bytes()
    writer.wait(writer.ask(writer.ticket, [other]))


def test_what_nobody_waits_for_is_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that has ended, before all that others have; also where it had no row, or no step had one."""
    monkeypatch.setattr(spool, "PAUSE", 20)
    gate, order = threading.Event(), cast(Any, [])

    def slow(*given: Any) -> None:
        gate.wait(20)
        order.append(given[0])
        put(*given)

    monkeypatch.setattr(PUT, slow)
    for name in "abcdefgh":
        (tmp_path / name).touch()
    files = [Sink(str(tmp_path / name), 0, 2) for name in "abcdefgh"]
    writer = Writer()
    nothing = writer.ask(writer.ticket, files[:1])
    soon(lambda: writer.done(nothing))
    assert nothing.done and nothing.told == [[]]
    ones = np.ones(len(files), dtype=np.int64)
    monkeypatch.setattr(spool, "MOST", 16)  # half of it is here, so all files are handed over
    writer.put([(Filing(files, 0 * ones, 5 * ones, ones), memoryview(b"ABCDEFGH"))], None)
    asked = writer.ask(writer.ticket, files[-1:])
    soon(lambda: asked.told is not None)
    assert not writer.done(asked)
    gate.set()
    soon(lambda: writer.done(asked))
    assert asked.done and asked.told == [[(5, 6)]] and (tmp_path / "h").read_bytes() == b"H"
    assert order.index(files[-1].file) <= spool.THREADS + spool.THREADS - 1, "behind what threads had begun"


def test_who_comes_again_has_the_file_whose_rows_still_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a preempted request computes anew is written behind what it had."""
    monkeypatch.setattr(spool, "PAUSE", 20)
    made, sinks, writer = spool_of(results(tmp_path)), Sinks(), Writer()
    for turn in range(2):
        sinks.add("r", address([(0, *made.address)]))
        opened = sinks.of("r")
        assert opened is not None
        writer.put([(filing([opened[0]], [0]), memoryview(bytes([turn])))], None)
        sinks.forget("r")
    first, second = (there.sinks[0] for *_, there, _ in writer._put)
    assert first is second and writer.wait(writer.ask(writer.ticket, [first])) == [[(0, 1), (0, 1)]]
    start = made.address[1]
    assert Path(made.address[0]).read_bytes()[start : start + 1] == b"\1"


def test_pieces_that_a_call_writes_in_part_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    sink = Sink(str(tmp_path / "file"), 0, 100)
    some = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: some(file, [pieces[0][:2]], at))
    pieces = [np.full(5, n % 251, dtype=np.uint8) for n in range(900)]
    sink.write([(0, pieces), (9000, [pieces[0]])])
    data = (tmp_path / "file").read_bytes()
    assert data[:4500] == b"".join(map(bytes, pieces)) and data[9000:] == bytes(pieces[0])


def test_each_thread_first_does_what_it_is_told() -> None:
    begun: list[int] = []
    writer = Writer(lambda: begun.append(threading.get_ident()))
    assert writer.wait(writer.ask(writer.ticket, [])) == []
    soon(lambda: len(begun) == spool.THREADS)
    assert len(set(begun)) == spool.THREADS and threading.get_ident() not in begun


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
atexit.register(lambda: sink.write([(0, [b"rows"])]))
from saesteer.engine.sinks import Sink
sink = Sink(sys.argv[1], 0, 1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True)
    assert place.read_bytes() == b"rows" and "could not be written" not in done.stderr
