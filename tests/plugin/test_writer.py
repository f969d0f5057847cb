"""The process that writes rows into files: what it leaves out, and what its failures and its end mean. No engine.

It runs as threads here, which a test can hold up; test_filer.py has the process.
"""

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine import filer, staging
from saesteer.engine.filer import put
from saesteer.engine.spool import Writer
from saesteer.errors import SpecError
from saesteer.planning.plan import END
from tests.plugin.filers import PUT, Device, filing, in_this_process, path_of, sinks_in
from tests.plugin.spooling import Steps, filed, roomy, sinks_of, spool_of, told


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[filer.Filer]:
    """Threads of this process write, and rows do not wait on the device."""
    monkeypatch.setattr(staging, "ROOM", 0)
    return in_this_process(monkeypatch)


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
