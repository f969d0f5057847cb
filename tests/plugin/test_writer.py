"""What writes rows into files: who waits for them, how often it writes, and what ends it. No engine.

It runs as threads here, which a test can hold up; test_filer.py has the process.
"""

import errno
import gc
import os
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine import filer, staging
from saesteer.engine.filer import put
from saesteer.engine.sinks import Sinks, address
from saesteer.engine.spool import Asked, Filing, Writer
from saesteer.errors import SpecError
from saesteer.planning.plan import END
from tests.plugin.filers import ONES, PUT, Device, filing, in_this_process, path_of, sinks_in, soon
from tests.plugin.spooling import Steps, check, filed, roomy, sinks_of, spool_of, told


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[filer.Filer]:
    """Threads of this process write, and rows do not wait on the device."""
    monkeypatch.setattr(staging, "ROOM", 0)
    return in_this_process(monkeypatch)


@pytest.mark.usefixtures("here")
def test_only_who_ends_a_request_waits_for_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, steps, gate = roomy(tmp_path), Steps([(0, END)]), threading.Event()
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


@pytest.mark.usefixtures("here")
def test_a_step_waits_while_too_much_is_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, calls = threading.Event(), 0

    def slow(*given: Any) -> None:
        nonlocal calls
        calls += 1
        gate.wait(20)
        put(*given)

    monkeypatch.setattr(PUT, slow)
    monkeypatch.setattr(staging, "MOST", 1024)  # two parts
    found, steps = roomy(tmp_path), Steps([(0, END)])
    made = spool_of(found)
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


def test_what_has_ended_is_not_waited_for_and_no_answer_has_its_rows(
    here: list[filer.Filer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(PUT, broken)
    steps = Steps([(0, END)])
    found = roomy(tmp_path)
    made, later = spool_of(found), spool_of(found)
    for spool in (made, later):
        brought = steps.run(sinks_of(spool), 0, 5)
        assert brought is not None and here
        assert not filed(brought, "r")
        rows, _ = told(spool)
        with pytest.raises(OSError, match="some of its rows could not be written"):
            rows.tell(5, 1, final=True)
    with pytest.raises(SpecError, match="what writes results has ended, so this server keeps none") as caught:
        found.promise([1])
    assert caught.value.code == "no_writer"


FILES, ROWS = 3, 8  # of a row of two bytes each


@pytest.mark.usefixtures("here")
def test_a_file_gets_several_steps_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are enough bytes, when an answer may end, and after a while when nobody asks for more."""
    calls = cast(Any, [])
    monkeypatch.setattr(PUT, lambda *given: calls.append(len(given[2])) or cast(Any, put)(*given))
    monkeypatch.setattr(filer, "PAUSE", 20)
    writer, files = Writer(16 << 10), sinks_in(tmp_path, "a", 30)
    device, enough = Device(writer), 17
    for row in range(enough + 3):
        device.bring(filing(files, [row]), bytes(512))
        if row + 1 == enough:
            soon(lambda: bool(calls))
            assert calls == [enough], "they are half of the memory"
    writer.wait(writer.ask(files))
    assert calls == [enough, 3]
    monkeypatch.setattr(filer, "PAUSE", 0.05)
    device.bring(filing(files, [enough + 3]), bytes(512))
    soon(lambda: len(calls) == 3)
    assert calls == [enough, 3, 1]


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            # Files and rows, or None: the row behind the last one of each of these files.
            st.none()
            | st.lists(st.tuples(st.integers(0, FILES - 1), st.integers(0, ROWS - 1)), min_size=1, max_size=4),
            st.integers(0, 3),  # steps of which the device has not finished the copies
            # A file, and whether the step waits for it.
            st.none() | st.tuples(st.integers(0, FILES - 1), st.booleans()),
        ),
        max_size=12,
    ),
    pause=st.sampled_from([0.0, 0.002, 5.0]),
    most=st.sampled_from([2048, 1 << 20]),
)
def test_files_have_what_steps_brought_last_whoever_writes_it(
    tmp_path: Path, steps: Any, pause: float, most: int
) -> None:
    """No row is written before its copy has landed, and each is told once it is written.

    What is asked for and not waited for is soon written, however long rows may wait for others.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filer, "PAUSE", pause)
        begun = in_this_process(patch)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        sinks = sinks_in(folder, "abc", ROWS)
        writer, expected = Writer(most), np.zeros((FILES, ROWS, 2), dtype=np.uint8)
        device = Device(writer)
        told: list[list[tuple[int, int]]] = [[] for _ in sinks]
        early: list[int] = []
        owed: list[tuple[int, Asked, Any]] = []  # file, what was asked for, and what the file then had to have

        def watched(file: int, at: int, pieces: Sequence[Any]) -> None:
            early.extend(one[0] for one in pieces if one[0] > device.landed)
            put(file, at, pieces)

        patch.setattr(PUT, watched)
        rows = [(file, -1) for file in range(FILES)]
        for number, (others, behind, wanted) in enumerate(steps, 1):
            rows = others or [(file, (row + 1) % ROWS) for file, row in dict(rows).items()]
            for file, row in rows:
                expected[file, row] = number, row
            data = bytes(one for _, row in rows for one in (number, row))
            device.bring(filing([sinks[file] for file, _ in rows], [row for _, row in rows]), data, lands=False)
            device.land(number - behind if most > 4 * 512 else number)  # or the memory is full of what never lands
            if wanted is not None:
                file, waits = wanted
                asked = writer.ask([sinks[file]])
                if waits:
                    assert (asked.told is None) or device.landed == number
                    device.land(number)
                    told[file] += writer.wait(asked)[0]
                else:
                    owed.append((file, asked, expected[file].copy()))
        device.land(len(steps))
        for file, asked, least in owed:
            soon(lambda asked=asked: writer.done(asked))  # type: ignore[misc]
            there = np.frombuffer((folder / "abc"[file]).read_bytes().ljust(2 * ROWS, b"\0"), np.uint8)
            assert asked.told is not None and (there.reshape(ROWS, 2) >= least).all(), "later steps have larger numbers"
            told[file] += asked.told[0]
        for spans, more in zip(told, writer.wait(writer.ask(sinks)), strict=True):
            spans += more
        for file in range(FILES):
            assert {at for lo, hi in told[file] for at in range(lo, hi)} == {*expected[file].any(axis=1).nonzero()[0]}
            content = (folder / "abc"[file]).read_bytes().ljust(2 * ROWS, b"\0")
            assert content == expected[file].tobytes()
        [found] = begun
        assert not early and not any((found._waiting, found._wanted, found._ready, found._busy))
        assert not any(one.asks for one in found._files.values())
        soon(lambda: writer.done(Asked([])) or writer.shared._free == [(512, 512 + most)])
        assert writer.shared._free == [(512, 512 + most)], "all of the memory has come back"


def test_who_waits_for_one_file_writes_no_other(
    here: list[filer.Filer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filer, "PAUSE", 20)
    one, other = sinks_in(tmp_path, "ab", 1)
    writer = Writer()
    Device(writer).bring(filing([one, other], [0, 0]), b"xy")
    writer.wait(writer.ask([one]))
    assert (tmp_path / "a").read_bytes() == b"x" and not (tmp_path / "b").read_bytes() and here
    writer.wait(writer.ask([other]))
    assert (tmp_path / "b").read_bytes() == b"y"


def test_who_asks_first_is_served_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And before all that nobody asks for."""
    monkeypatch.setattr(filer, "PAUSE", 20)
    monkeypatch.setattr(filer, "THREADS", 1)
    in_this_process(monkeypatch)
    gate, order = threading.Event(), list[str]()

    def slow(*given: Any) -> None:
        order.append(path_of(given[0])[-1])
        gate.wait(20)
        put(*given)

    monkeypatch.setattr(PUT, slow)
    files, writer = sinks_in(tmp_path, "abcdef", 1), Writer()
    Device(writer).bring(filing(files, [0] * 6), b"012345")
    asked = [writer.ask([files["abcdef".index(name)]]) for name in "edb"]
    writer._send("hurry")
    asked.append(writer.ask([files[2], files[0]]))
    soon(lambda: order == ["e"])
    gate.set()
    for one in asked:
        writer.wait(one)
    soon(lambda: len(order) == 6)
    assert "".join(order) == "edbcaf"


@pytest.mark.usefixtures("here")
def test_what_nobody_waits_for_is_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that has ended, before all that others have; also where it had no row, or no step had one."""
    monkeypatch.setattr(filer, "PAUSE", 20)
    gate, order = threading.Event(), list[str]()

    def slow(*given: Any) -> None:
        gate.wait(20)
        order.append(path_of(given[0]))
        put(*given)

    monkeypatch.setattr(PUT, slow)
    files = sinks_in(tmp_path, "abcdefgh", 600)
    writer = Writer(2048)
    nothing = writer.ask(files[:1])
    soon(lambda: writer.done(nothing))
    assert nothing.told == [[]]
    many = 170 * ONES
    # Half of the memory is in use, so all files are handed over.
    where = Filing(files, 0 * many, 5 * many, many)
    Device(writer).bring(where, bytes(letter for letter in b"ABCDEFGH" for _ in range(170)))
    asked = writer.ask(files[-1:])
    time.sleep(0.1)
    assert not writer.done(asked)
    gate.set()
    soon(lambda: writer.done(asked))
    assert asked.told == [[(850, 1020)]] and (tmp_path / "h").read_bytes() == 170 * b"H"
    assert order.index(str(tmp_path / "h")) <= filer.THREADS + filer.THREADS - 1, "behind what threads had begun"


def test_one_thread_waits_while_another_brings_more(here: list[filer.Filer], tmp_path: Path) -> None:
    writer, files = Writer(), sinks_in(tmp_path, "ab", 3000)
    device = Device(writer)
    device.bring(filing(files, [0, 0]), b"xy", lands=False)
    asked, told = writer.ask(files), list[Any]()
    thread = threading.Thread(target=lambda: told.extend(writer.wait(asked)))
    thread.start()
    for row in range(1, 300):
        device.bring(filing(files, [row, row]), b"zz", lands=False)
        assert not writer.done(asked) and here
    device.land(1)
    thread.join(15)
    assert told == [[(0, 1)], [(0, 1)]], "and for nothing that came later"
    device.land(300)
    assert writer.wait(writer.ask(files)) == [[(1, 300)], [(1, 300)]]


def test_who_comes_again_has_its_rows_in_their_order(
    here: list[filer.Filer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a preempted request computes anew is written behind what it had, whoever has forgotten it meanwhile."""
    monkeypatch.setattr(filer, "PAUSE", 20)
    made, writer = spool_of(roomy(tmp_path)), Writer()
    device = Device(writer)
    for turn in range(2):
        sinks = Sinks()
        sinks.add("r", address([(0, *made.address)]))
        opened = sinks.of("r")
        device.bring(filing([opened[0]], [0]), bytes([turn]))
        last = opened[0]
        del sinks, opened
    assert writer.wait(writer.ask([last])) == [[(0, 1), (0, 1)]] and here
    start = made.address[1]
    assert Path(made.address[0]).read_bytes()[start : start + 1] == b"\1"


def test_nothing_is_kept_of_a_file_that_nobody_has(here: list[filer.Filer], tmp_path: Path) -> None:
    writer, files = Writer(), sinks_in(tmp_path, "ab", 9)
    device = Device(writer)
    device.bring(filing(files, [0, 0]), b"xy")
    writer.wait(writer.ask(files))
    [found] = here
    assert len(found._files) == len(found._paths) == 2
    del files[0]
    gc.collect()
    device.bring(filing(files, [1]), b"z")
    writer.wait(writer.ask(files))
    assert len(found._files) == len(writer._known) == 1
    soon(lambda: len(found._paths) == 1)
    assert [*found._paths] == [files[0].path]


@pytest.mark.usefixtures("here")
def test_rows_for_a_file_that_is_gone_are_dropped(tmp_path: Path) -> None:
    """Whoever has aborted a request has deleted it; a step that was under way brings more."""
    writer, files = Writer(), sinks_in(tmp_path, "ab", 9)
    (tmp_path / "a").unlink()
    Device(writer).bring(filing(files, [0, 0]), b"xy")
    assert writer.wait(writer.ask(files)) == [[(0, 1)], [(0, 1)]]
    assert (tmp_path / "b").read_bytes() == b"y" and not (tmp_path / "a").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("at", [PUT, "os.open"])
def test_a_failure_marks_the_file_and_is_said_where_a_server_says_things(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = put if at == PUT else os.open

    def full(file: Any, *given: Any, **named: Any) -> Any:
        if file == "a" or (at == PUT and path_of(file) == files[0].path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return cast(Any, whole)(file, *given, **named)

    writer, files = Writer(), sinks_in(tmp_path, "ab", 9)
    monkeypatch.setattr(at, full)
    device = Device(writer)
    for row in range(2):
        device.bring(filing(files, [row, row]), b"xy")
        writer.wait(writer.ask(files))
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) == filer.LACKING for name in "ab"] == [True, False]
    [record] = caplog.records  # the second row is not even tried
    assert record.message == f"rows could not be written to {tmp_path}/a ([Errno 28] No space left on device)"


def test_pieces_that_a_call_writes_in_part_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: some(file, [pieces[0][:2]], at))
    pieces = [np.full(5, n % 251, dtype=np.uint8) for n in range(900)]
    with (tmp_path / "file").open("wb") as file:
        put(file.fileno(), 0, pieces)
        put(file.fileno(), 9000, [pieces[1]])
    data = (tmp_path / "file").read_bytes()
    assert data[:4500] == b"".join(map(bytes, pieces)) and data[9000:] == bytes(pieces[1])


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), most=st.integers(1, 12))
def test_a_long_step_is_cut_into_pieces(lengths: list[int], most: int) -> None:
    sinks = cast(Any, [*range(len(lengths))])
    rows = np.array([100 * one for one in range(len(lengths))])
    whole = Filing(sinks, rows, rows + 7, np.array(lengths))
    expected: list[Any] = [(n, 100 * n + at, 100 * n + 7 + at) for n, many in enumerate(lengths) for at in range(many)]
    found, end = [], 0
    for lo, hi, piece in whole.cut(most):
        assert lo == end and hi - lo <= most
        end = hi
        there = [
            (sink, first + at, position + at)
            for sink, first, position, many in zip(*piece, strict=True)
            for at in range(many)
        ]
        assert len(there) == hi - lo
        found += there
    assert found == expected
