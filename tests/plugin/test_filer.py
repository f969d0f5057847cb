"""The process that writes rows into files: what it needs, when it begins, and how it ends. No engine."""

import gc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saesteer.engine import filer
from saesteer.engine.spool import Writer
from saesteer.engine.staging import Staging
from tests.plugin.filers import Device, children, filing, sinks_in, soon


def test_it_writes(tmp_path: Path) -> None:
    writer, files = Writer(), sinks_in(tmp_path, "ab", 9)
    device = Device(writer)
    for row in range(3):
        device.bring(filing(files, [row, 2 * row]), bytes([row, row + 10]))
    assert writer.wait(writer.ask(files)) == [[(0, 3)], [(0, 1), (2, 3), (4, 5)]]
    assert (tmp_path / "a").read_bytes() == bytes([0, 1, 2])
    assert (tmp_path / "b").read_bytes() == bytes([10, 0, 11, 0, 12])


def test_who_asks_for_nothing_begins_none() -> None:
    before = children()
    writer = Writer()
    assert children() == before
    assert writer.shared and len(children()) == len(before) + 1
    del writer
    gc.collect()
    assert children() == before, "and it ends with who has begun it"


def test_a_worker_does_not_start_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="has ended"):
        Staging(torch.device("cpu"), None).warm()


def test_a_signal_that_ends_it_is_found_out(tmp_path: Path) -> None:
    before = children()
    writer, files = Writer(), sinks_in(tmp_path, "a", 9)
    device = Device(writer)
    device.bring(filing(files, [0]), b"x", lands=False)
    asked = writer.ask(files)
    [own] = children() - before
    os.kill(own, signal.SIGKILL)
    assert writer.wait(asked) == [[]] and writer.done(asked)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == filer.LACKING and (tmp_path / filer.ENDED).exists()
    with pytest.raises(RuntimeError, match="has ended"):
        device.bring(filing(files, [1]), b"y")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_processes_of_a_server_leaves_it_to_its_worker(number: int, tmp_path: Path) -> None:
    """A terminal and systemd send such ones; a worker may go on until its requests have ended."""
    before = children()
    writer, files = Writer(), sinks_in(tmp_path, "a", 9)
    device = Device(writer)
    device.bring(filing(files, [0]), b"x")
    [own] = children() - before
    writer.wait(writer.ask(files))
    os.kill(own, number)
    device.bring(filing(files, [1]), b"y")
    assert writer.wait(writer.ask(files)) == [[(1, 2)]]


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_is_left_is_written_when_a_worker_ends(end: str, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from saesteer.engine.spool import Writer
from tests.plugin.filers import Device, filing, sinks_in
writer = Writer()
Device(writer).bring(filing(sinks_in(Path(sys.argv[1]), "a", 9), [0]), b"x")
{end}
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=end == "pass", env=os.environ)
    soon(lambda: (tmp_path / "a").read_bytes() == b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("taken", ["a link", "open to others"])
def test_nothing_is_written_into_a_folder_that_others_may_use(taken: str, tmp_path: Path) -> None:
    """Whoever puts a folder where one was removed could lead a file's name anywhere."""
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.mkdir(mode=0o700)
    (victim / "a").write_bytes(b"own")
    if taken == "a link":
        place.symlink_to(victim)
    else:
        place.mkdir()
        place.chmod(0o777)
        (place / "a").symlink_to(victim / "a")
    file = filer._File(str(place / "a"), 0)
    file.add(0, filer._Piece(filer._Part(0, 1), 0, 1), (0, 1))
    with pytest.raises(PermissionError, match="not this user's alone"):
        file.write(memoryview(b"x"), file.runs)
    file.write(memoryview(b"x"), file.runs)  # nothing is tried again
    if taken != "a link":  # of a file that lacks rows, the name goes; the mode of what a link leads to stays
        assert (victim / "a").read_bytes() == b"own" and stat.S_IMODE((victim / "a").stat().st_mode) != filer.LACKING
