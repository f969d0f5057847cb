"""The process that writes rows into files, and the memory that it shares with a worker. Starts no engine."""

import gc
import os
import signal
import stat
import subprocess
import sys
from collections import deque
from mmap import mmap
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saesteer.engine import filer, writer
from saesteer.engine.staging import Staging
from saesteer.engine.writer import Ring, Writer
from saesteer.planning.plan import END
from tests.plugin.filers import Device, children, filing, positions, sinks_in, soon


def lacks(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == filer.LACKING


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3)), max_size=40))
def test_parts_of_the_memory_never_overlap_and_all_of_it_comes_back(steps: list[tuple[int, int]]) -> None:
    ring = Ring(8192, locked=False)
    other = mmap(ring.file, 0)  # as the process has it
    held: deque[tuple[int, int, bytes]] = deque()
    for number, (size, gone) in enumerate(steps):
        lo = ring.take(size)
        assert lo is not None or held, "what is alone has room"
        if lo is not None:
            ring.at(lo, size)[:] = number
            held.append((lo, lo + size, bytes([number]) * size))
        for _ in range(min(gone, len(held))):
            held.popleft()
            ring.give()
        assert all(other[lo:hi] == was for lo, hi, was in held)
        assert not ring.landed.any(), "the number before all of it stays"
    for _ in held:
        ring.give()
    assert ring.take(8192) is not None and ring.take(1) is None


def test_it_writes(tmp_path: Path) -> None:
    one, files = Writer(), sinks_in(tmp_path, "ab", 9)
    device = Device(one)
    for row in range(3):
        device.bring(filing(files, [row, 2 * row]), bytes([row, row + 10]))
    assert positions(one, files) == [[(0, 3)], [(0, 1), (2, 3), (4, 5)]]
    assert (tmp_path / "a").read_bytes() == bytes([0, 1, 2])
    assert (tmp_path / "b").read_bytes() == bytes([10, 0, 11, 0, 12])
    assert positions(one, files) == [[], []], "each position comes once"


def test_a_request_waits_for_rows_up_to_its_end_alone(tmp_path: Path) -> None:
    """More than the memory has comes behind it: then a step waits until the first rows are written."""
    one, files = Writer(4096), sinks_in(tmp_path, "ab", 300)
    device = Device(one)
    device.bring(filing(files, [0, 0]), b"xy", lands=False)
    number = one.put_so_far
    device.bring(filing(files, [1, 1]), b"zz", lands=False)
    assert not one.done(number)
    device.land(1)
    one.wait(number)
    assert not one.done(one.put_so_far) and (tmp_path / "a").read_bytes() == b"x"
    device.land(2)
    for row in range(2, 300):
        device.bring(filing(files, [row, row]), b"zz")
    assert positions(one, files) == [[(0, 300)], [(0, 300)]]


def test_who_asks_for_nothing_begins_none() -> None:
    before = children()
    one = Writer()
    assert children() == before
    one.begin()
    assert len(children()) == len(before) + 1
    del one
    gc.collect()
    assert children() == before, "and it ends with who has begun it"


def test_a_worker_does_not_start_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="does not begin"):
        Staging(torch.device("cpu"), None).warm()


def test_where_it_is_killed_only_the_rows_that_it_had_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    one, files = Writer(), sinks_in(tmp_path, "abcd", 9)
    device = Device(one)
    device.bring(filing(files[:1], [0]), b"x")
    positions(one, files)
    device.bring(filing(files[1:2], [0]), b"x", lands=False)
    number = one.put_so_far
    [own] = children() - before
    os.kill(own, signal.SIGKILL)
    one.wait(number)
    device.bring(filing(files[2:3], [0]), b"x")  # at once it is not begun again
    monkeypatch.setattr(writer, "_AGAIN_S", 0.0)
    device.bring(filing(files[3:], [0]), b"x")
    assert positions(one, files) == [[], [], [], [(0, 1)]]
    assert [lacks(tmp_path / name) for name in "abcd"] == [False, True, True, False]
    assert (tmp_path / "d").read_bytes() == b"x" and children() - before - {own}
    [record] = caplog.records
    assert "has ended, and is begun again when needed" in record.message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_processes_of_a_server_leaves_it_to_its_worker(number: int, tmp_path: Path) -> None:
    """A terminal and systemd send such ones; a worker may go on until its requests have ended."""
    before = children()
    one, files = Writer(), sinks_in(tmp_path, "a", 9)
    device = Device(one)
    device.bring(filing(files, [0]), b"x")
    [own] = children() - before
    positions(one, files)
    os.kill(own, number)
    device.bring(filing(files, [1]), b"y")
    assert positions(one, files) == [[(1, 2)]]


@pytest.mark.parametrize(
    ("end", "lands"),
    [("pass", True), *(("os.kill(os.getpid(), signal.SIGKILL)", lands) for lands in (True, False))],
)
def test_what_has_landed_is_written_when_a_worker_ends(end: str, lands: bool, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from saesteer.engine import writer
from tests.plugin.filers import Device, children, filing, sinks_in
writer._LAST_S = 0.1
one = writer.Writer()
Device(one).bring(filing(sinks_in(Path(sys.argv[1]), "a", 9), [0]), b"x", lands={lands})
print(*children(), flush=True)
{end}
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, check=end == "pass", env=os.environ, capture_output=True, text=True)
    soon(lambda: not psutil.pid_exists(int(done.stdout)))
    assert not psutil.pid_exists(int(done.stdout)), "it ends, too"
    assert (tmp_path / "a").read_bytes() == (b"x" if lands else b"")


def test_rows_for_a_file_that_is_gone_are_dropped(tmp_path: Path) -> None:
    """Whoever has aborted a request has deleted it; a step that was under way brings more."""
    one, files = Writer(), sinks_in(tmp_path, "ab", 9)
    (tmp_path / "a").unlink()
    Device(one).bring(filing(files, [0, 0]), b"xy")
    assert positions(one, files) == [[(0, 1)], [(0, 1)]]
    assert (tmp_path / "b").read_bytes() == b"y" and not (tmp_path / "a").exists()


def test_a_full_disk_marks_the_file_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, files = Writer(), sinks_in(tmp_path, "ab", 9)
    files[0].name = files[0].path, 1 << 62, 9, [(0, END)]  # no file system has such a byte: as on a full disk
    device = Device(one)
    for row in range(2):
        device.bring(filing(files, [row, row]), b"xy")
        positions(one, files)
    assert lacks(tmp_path / "a") and (tmp_path / "b").read_bytes() == b"yy"
    [record] = caplog.records
    assert record.message.startswith(f"rows could not be written to {tmp_path}/a (")


@pytest.mark.parametrize("taken", ["a link", "open to others"])
def test_nothing_is_written_into_a_folder_that_others_may_use(
    taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever puts a folder where one was removed could lead a file's name anywhere."""
    victim, place = tmp_path / "victim", tmp_path / "place"
    for folder in (victim, place):
        folder.mkdir(mode=0o700)
    (victim / "a").write_bytes(b"own")
    one, files = Writer(), sinks_in(place, "a", 9)
    (place / "a").unlink()
    if taken == "a link":
        place.rmdir()
        place.symlink_to(victim)
    else:
        place.chmod(0o777)
        (place / "a").symlink_to(victim / "a")
    Device(one).bring(filing(files, [0]), b"x")
    positions(one, files)
    if taken != "a link":  # of a file that lacks rows, the name goes
        assert (victim / "a").read_bytes() == b"own" and not lacks(victim / "a")
    assert len(caplog.records) == 1
