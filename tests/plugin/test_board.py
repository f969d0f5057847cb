"""Several API servers of one server: a change is everywhere when it has ended, and nothing goes that one still uses."""

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import RegistryError, UnsupportedError
from saesteer.language.spec import from_json
from saesteer.plugin.door import frontend
from saesteer.plugin.names import board, versions
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.changes import Given
from saesteer.plugin.names.versions import Names
from tests.plugin.test_names import SPEC, Request, Workers, start


@asynccontextmanager
async def servers(folder: Path, count: int = 3, rows: int = 4) -> AsyncIterator[list[Names]]:
    """The names of so many, all in this process, which is all the same to files and pages."""
    found = [start(rows, Board(folder, rank, count)) for rank in range(count)]
    for one in found:
        one.begin()
    try:
        yield found
    finally:
        for one in found:
            assert one._beat is not None
            one._beat.cancel()


class SlowWorkers(Workers):
    """As those of an engine, which hear of a change between two steps."""

    async def _call_utility_async(self, *args: Any, **words: Any) -> Any:
        answers = await super()._call_utility_async(*args, **words)
        await asyncio.sleep(0.01)
        return answers


def add(row: list[float]) -> dict[str, Any]:
    return {"op": "add", "vector": row, "site": "resid_post.3"}


def numbers(known: Names) -> dict[str, Any]:
    return {name: found.rows[None].tolist() for name, found in known.catalog.vectors.items()}  # type: ignore[attr-defined]


def test_a_change_is_everywhere_when_it_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Workers()
        async with servers(tmp_path) as (one, two, three):
            assert (await one.put_vector(engine, "v", Given((1.0, 0, 0))))[0] is False
            assert numbers(one) == numbers(two) == numbers(three) == {"v": [1, 0, 0]}
            assert (await two.put_vector(engine, "v", Given((0.0, 1, 0))))[0] is True
            await three.put_module(engine, "m", SPEC)
            with pytest.raises(RegistryError, match="module m"):
                await one.delete(engine, "vector", "v")
            await two.delete(engine, "module", "m")
            await one.delete(engine, "vector", "v")
            assert numbers(one) == numbers(two) == numbers(three) == {}
            assert one.usage() == two.usage() == three.usage()
        assert [(told["base"], told["number"]) for told in engine.told] == [(n, n + 1) for n in range(5)]

    asyncio.run(run())


def test_changes_at_once_come_one_after_the_other(tmp_path: Path) -> None:
    async def run() -> None:
        engine = SlowWorkers()
        async with servers(tmp_path, rows=16) as found:
            await asyncio.gather(
                *(found[n % 3].put_vector(engine, f"v{n}", Given((1.0, n, 0))) for n in range(9)),
                *(found[n % 3].put_vector(engine, "same", Given((2.0, n, 0))) for n in range(3)),
            )
            assert numbers(found[0]) == numbers(found[1]) == numbers(found[2])
            assert {f"v{n}": [1.0, n, 0] for n in range(9)}.items() <= numbers(found[0]).items()
        assert [(told["base"], told["number"]) for told in engine.told] == [(n, n + 1) for n in range(12)]

    asyncio.run(run())


def test_what_one_uses_no_other_drops(tmp_path: Path) -> None:
    async def run() -> None:
        engine, request = Workers(), Request()
        async with servers(tmp_path, rows=3) as (one, two, three):
            await one.put_vector(engine, "v", Given((1.0, 0, 0)))
            held = two.hold()
            two.bind(held, SPEC, request)
            for n in range(4):  # what came in between, nobody has used
                await (one, three)[n % 2].put_vector(engine, "v", Given((0.0, 1, n)))
            assert [told["keep"] for told in engine.told] == [[0], [1], [1, 2], [1, 3], [1, 4]]
            with pytest.raises(RegistryError, match="--pool-rows 4"):
                await one.put_module(
                    engine, "m", from_json({"edits": [add(row) for row in ([1.0, 1, 0], [0, 1.0, 9])]})
                )
            del held, request
            gc.collect()
            await three.put_module(engine, "m", from_json({"edits": [add(row) for row in ([1.0, 1, 0], [0, 1.0, 9])]}))
            assert engine.told[-1]["keep"] == [5]
            assert one.usage() == two.usage() == three.usage() == {"resid_post.3": (3, 3)}

    asyncio.run(run())


def test_uses_are_summed_and_begin_anew_with_new_content(tmp_path: Path) -> None:
    async def run() -> None:
        engine, requests = Workers(), [Request() for _ in range(5)]
        async with servers(tmp_path) as (one, two, three):
            await one.put_vector(engine, "v", Given((1.0, 0, 0)))
            for known, request in zip((one, two, two, three, three), requests, strict=True):
                known.bind(known.hold(), SPEC, request)
            assert [(await known.uses())["vector", "v"] for known in (one, two, three)] == [5, 5, 5]
            await three.put_vector(engine, "v", Given((0.0, 1, 0)))
            assert [(await known.uses())["vector", "v"] for known in (one, two, three)] == [0, 0, 0]

    asyncio.run(run())


def test_a_change_that_fails_on_a_worker_is_none_anywhere(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Workers()
        async with servers(tmp_path) as (one, two, _):
            await one.put_vector(engine, "v", Given((1.0, 0, 0)))
            engine.answers = ["", "MemoryError: no"]
            with pytest.raises(RuntimeError, match="no"):
                await one.put_vector(engine, "v", Given((0.0, 1, 0)))
            await asyncio.sleep(3 * versions.BEAT)
            assert numbers(one) == numbers(two) == {"v": [1, 0, 0]}
            engine.answers = ["", ""]
            await two.put_vector(engine, "w", Given((0.0, 1, 0)))
            assert (engine.told[-1]["base"], engine.told[-1]["keep"]) == (1, [1])
            assert sorted(numbers(one)) == ["v", "w"]

    asyncio.run(run())


def test_a_server_that_does_not_follow_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "STARTING", 0.1)

    async def run() -> None:
        engine = Workers()
        async with servers(tmp_path, count=2) as (one, two):
            assert two._beat is not None
            two._beat.cancel()
            with pytest.raises(RuntimeError, match="API server 1 has not taken over version 1"):
                await one.put_vector(engine, "v", Given((1.0, 0, 0)))
            monkeypatch.setattr(versions, "STARTING", 5)
            later = asyncio.create_task(one.put_vector(engine, "w", Given((0.0, 1, 0))))
            await asyncio.sleep(0.1)
            assert len(engine.told) == 1, "no change follows one that is not everywhere"
            two._beat = None
            two.begin()
            await later
            assert numbers(one) == numbers(two) == {"v": [1, 0, 0], "w": [0, 1, 0]}

    asyncio.run(run())


PARENT = """
import os
from multiprocessing import get_context
from saesteer.plugin.names.board import ENV, Board, announce

def serve(rank):
    announce()
    board = Board.of(rank, 2)
    board.report(0, 0)
    print(board._folder, board.behind(), flush=True)

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
    assert first == [second[0], "[1]"] and second[1] == "[]"
    assert "another" not in first[0]
    assert not Path(first[0]).exists(), "it goes with the process that has announced it"


class _Parallel:
    _api_process_rank = 0

    def __init__(self, servers: int = 1, *, local: bool = False) -> None:
        self._api_process_count, self.local_engines_only = servers, local


def test_what_is_refused_where_there_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frontend._board(_Parallel(2, local=True)) is None
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "key")
    assert frontend._board(_Parallel()) is None
    with pytest.raises(UnsupportedError, match="hybrid load balancing"):
        frontend._board(_Parallel(local=True))
    monkeypatch.setenv(board.ENV, f"{os.getpid()}-word")  # as this process might announce it, not a parent of its own
    with pytest.raises(UnsupportedError, match="api-server-count 1"):
        frontend._board(_Parallel(servers=2))
