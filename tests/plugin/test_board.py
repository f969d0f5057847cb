"""Several API servers of one server: a change is everywhere when it has ended, and counts are of all of them."""

import asyncio
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any, cast
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import RegistryError
from saesteer.plugin.names import board
from saesteer.plugin.names.board import Board, announce
from saesteer.plugin.names.changes import Given
from saesteer.plugin.names.versions import Names
from tests.plugin.names import SPEC, Workers, start


def servers(folder: Path, count: int = 3, rows: int = 4) -> list[Names]:
    """The names of so many, all in this process, which is all the same to files."""
    return [start(rows, Board(folder, rank, count)) for rank in range(count)]


def numbers(known: Names) -> dict[str, Any]:
    return {name: found.rows[None].tolist() for name, found in known.catalog.vectors.items()}


def test_a_change_is_everywhere_when_it_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Workers()
        one, two, three = servers(tmp_path)
        assert (await one.put(engine, "vector", "v", Given((1.0, 0, 0))))[0] is False
        assert numbers(one) == numbers(two) == numbers(three) == {"v": [1, 0, 0]}
        assert (await two.put(engine, "vector", "v", Given((0.0, 1, 0))))[0] is True
        await three.put(engine, "module", "m", SPEC)
        with pytest.raises(RegistryError, match="module m"):
            await one.delete(engine, "vector", "v")
        await two.delete(engine, "module", "m")
        await one.delete(engine, "vector", "v")
        assert numbers(one) == numbers(two) == numbers(three) == {}
        assert one.usage() == two.usage() == three.usage()
        assert engine.pinned == [(1, 0), (1, 0), (0, 1), (0, 0), (0, 0)]

    asyncio.run(run())


def test_a_request_keeps_what_it_was_admitted_with_and_the_next_has_what_is_new(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Workers()
        one, two = servers(tmp_path, count=2)
        await one.put(engine, "vector", "v", Given((1.0, 0, 0)))
        held = two.hold()
        for n in range(4):
            await (one, two)[n % 2].put(engine, "vector", "v", Given((0.0, 1, n)))
        assert held.catalog.vectors["v"].rows[None].tolist() == [1, 0, 0]
        assert two.hold().catalog.vectors["v"].rows[None].tolist() == [0, 1, 3]
        assert two.hold() is two.hold(), "what has not changed is not read again"
        assert engine.pinned == [(1, 0), (1, 0), (1, 1), (1, 1), (1, 1)], "whoever pinned it, it goes once"

    asyncio.run(run())


def test_a_server_that_dies_in_a_change_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = Workers()
        one, two = servers(tmp_path, count=2)
        await one.put(engine, "vector", "v", Given((1.0, 0, 0)))
        with monkeypatch.context() as patch:
            patch.setattr(one, "_tell", Mock(side_effect=asyncio.CancelledError))
            with pytest.raises(asyncio.CancelledError):
                await one.put(engine, "vector", "v", Given((0.0, 1, 0)))
        assert numbers(two) == {"v": [1, 0, 0]}
        await two.put(engine, "vector", "v", Given((0.0, 0, 1)))
        assert numbers(one) == {"v": [0, 0, 1]} and len(engine.told[-1]["unpin"]) == 1

    asyncio.run(run())


def test_whoever_reads_while_others_change_finds_one_of_the_changes(tmp_path: Path) -> None:
    """The file of a change may go while it is read, since the name has changed again."""
    one, two = servers(tmp_path, count=2)
    over = Event()

    def change() -> None:
        async def run() -> None:
            for n in range(200):
                await one.put(Workers(), "vector", "v", Given((1.0, n, 0)))
                await one.put(Workers(), "vector", "w", Given((1.0, n, 1)))

        try:
            asyncio.run(run())
        finally:
            over.set()

    seen = []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(change)
        while not over.is_set():
            seen.append(numbers(two))
        job.result()
    assert numbers(one) == numbers(two) == {"v": [1, 199, 0], "w": [1, 199, 1]}
    found = [(one["v"][1], one["w"][1]) for one in seen if len(one) == 2]
    assert found == sorted(found) and all(v - w in (0, 1) for v, w in found), "no mixture, and never backwards"


PARENT = """
import os
from multiprocessing import get_context
from saesteer.plugin.names.board import ENV, Board, announce

def serve(rank):
    announce()
    board = Board.of(rank, 2)
    board.use(3)
    print(os.readlink(f"/proc/self/fd/{board._folder}"), board.uses(3), flush=True)

if __name__ == "__main__":
    os.environ[ENV] = "1-of-another-server"
    announce()
    for rank in range(2):
        child = get_context("spawn").Process(target=serve, args=(rank,))
        child.start()
        child.join()
"""


def test_where_they_meet_comes_from_the_process_that_starts_them(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    done = subprocess.run([sys.executable, tmp_path / "parent.py"], capture_output=True, text=True, check=True)
    first, second = (line.split(" ") for line in done.stdout.splitlines())
    assert first == [second[0], "1"] and second[1] == "2"
    assert "another" not in first[0]
    assert not Path(first[0]).exists(), "it goes with the process that has announced it"


KILLED = """
from saesteer.plugin.names.board import announce, meeting_place

announce()
(meeting_place() / "results").mkdir()
print(meeting_place(), flush=True)
input()
"""


def test_what_a_killed_server_left_goes_at_the_next_start_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its lock, since one in another container may be no process here."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(board.ENV, "")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment))
            for _ in range(2)
        ]
        killed, living = (Path(cast(Any, one.stdout).readline().strip()) for one in servers)
        servers[0].kill()
        servers[0].wait()
        others = [tmp_path / name for name in ("saesteer-1-word", f"saesteer-{killed.name[9:-1]}", "saesteer-bench")]
        for other in others:
            other.mkdir(mode=0o700)
        with monkeypatch.context() as patch:
            patch.setattr(board, "lives", lambda _: False)  # as in another container
            announce()
        assert not killed.exists() and (living / "results").exists()
        assert all(other.exists() for other in others), "nobody knows what these are"
        servers[1].kill()
    with monkeypatch.context() as patch:
        patch.setattr(board, "lives", lambda _: True)
        announce()
        assert living.exists(), "a server of an older version has no lock"
    announce()
    assert not living.exists()


def test_the_default_module_is_that_of_every_server(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Workers()
        one, two, three = servers(tmp_path)
        await one.put(engine, "vector", "v", Given((1.0, 0, 0)))
        await two.put(engine, "module", "m", SPEC)
        await three.set_default("m")
        assert [known.catalog.default for known in (one, two, three)] == ["m"] * 3
        with pytest.raises(RegistryError, match="module 'm' steers every request"):
            await one.delete(engine, "module", "m")
        await two.put(engine, "vector", "v", Given((0.0, 1, 0)))
        assert [known.catalog.default for known in (one, two, three)] == ["m"] * 3
        await two.set_default(None)
        await one.delete(engine, "module", "m")
        assert [known.catalog.default for known in (one, two, three)] == [None] * 3

    asyncio.run(run())
