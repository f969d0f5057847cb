"""How much of the store of results one client gets: room, and fetches at a time. Starts no engine."""

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import SpecError
from saesteer.plugin.http import results as routes
from saesteer.plugin.results.kept import LEAST, Results, client
from saesteer.plugin.results.spools import View
from tests.plugin.apps import app_of_vllm
from tests.plugin.results import files, kept, results, room, write

ROUTE = "/v1/saesteer/results"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    return app_of_vllm(monkeypatch, "--api-key", "usual")


@contextmanager
def sent_by(name: str) -> Iterator[None]:
    """As in the context of this client's request."""
    token = client.set(name)
    yield
    client.reset(token)


def test_no_client_takes_all_room_and_each_next_one_has_some(tmp_path: Path) -> None:
    one, two = results(tmp_path, number=16), results(tmp_path, number=16)
    held: list[Any] = []
    for number, (name, most) in enumerate([("a", 8), ("b", 4), ("c", 2), ("d", 1)]):
        store = (one, two)[number % 2]
        with sent_by(name):
            held += [room(store, 1) for _ in range(most)]
            with pytest.raises(
                SpecError, match=f"while {most * LEAST} of {most * LEAST} are kept that one client"
            ) as caught:
                room(store, 1)
            assert caught.value.code == "results_full"
            assert len({one._handles[0][:8] for one in held[-most:]}) == 1, "by which its results are known"
    handles = [one._handles[0] for one in held]
    assert len({one[:8] for one in handles}) == 4 and len({*handles}) == 15
    with sent_by("a"), pytest.raises(SpecError, match=f"at most {8 * LEAST}, the share of one client") as caught:
        room(one, 1, 9)
    assert caught.value.code == "too_large"
    del held[:8]
    gc.collect()
    time.sleep(0.1)
    with sent_by("e"):
        held.append(room(two, 1, 4))
    assert room(one, 1, 5), "who is no client of HTTP gets all that is left"


def test_a_deleted_result_counts_until_its_last_reader_closes_it(tmp_path: Path) -> None:
    """Limit 4 MiB, twenty times promised 3 MiB, opened and deleted: 60 MiB on the disk, of which none counted."""
    found = results(tmp_path, size=4 << 20)

    def opened() -> View:
        handle = write(room(found, 3 << 20), bytes(3 << 20))
        file = found.open(handle)
        found.delete(handle)
        with pytest.raises(SpecError, match="was deleted"):
            found.open(handle)
        return file

    with opened() as file:
        for _ in range(20):
            with pytest.raises(SpecError) as caught:
                opened()
            assert caught.value.code == "results_full"
        assert sum(path.stat().st_size for path in found.folder.iterdir()) < 4 << 20
        assert len(file.read()) > 3 << 20
    time.sleep(0.1)
    opened().close()


class Slow:
    """A client that receives the first pieces of a result and then nothing more."""

    def __init__(self, app: Any, handle: str, pieces: int = 1) -> None:
        self.app, self.left, self.status, self.stops = app, pieces, 0, asyncio.Event()
        self.path = f"{ROUTE}/{handle}"

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            if not self.left:
                self.stops.set()
                await asyncio.Event().wait()
            self.left -= 1

    async def fetch(self) -> int:
        """The status, once the server has ended the answer."""

        async def receive() -> Any:
            await asyncio.Event().wait()

        headers = [(b"authorization", b"Bearer usual")]
        scope = {"type": "http", "method": "GET", "path": self.path, "raw_path": self.path.encode(), "headers": headers}
        scope |= {"query_string": b"", "client": ("10.0.0.1", 1), "http_version": "1.1", "scheme": "http"}
        await self.app(
            {**scope, "asgi": {"version": "3.0"}, "server": ("host", 80), "root_path": ""}, receive, self.send
        )
        return self.status


def large(found: Results) -> str:
    """The handle of a result of several pieces."""
    return write(room(found, 4 * routes.PIECE), bytes(4 * routes.PIECE))


def test_a_client_that_receives_nothing_more_is_given_up(
    app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SECONDS", 0.2)
    found = app.state.saesteer_results = results(tmp_path, number=100)
    handle, before = large(found), len(os.listdir("/proc/self/fd"))
    assert asyncio.run(asyncio.wait_for(Slow(app, handle).fetch(), 20)) == 200
    found.delete(handle)
    assert found.sweep() == [] == files(found), "nobody reads it"
    assert len(os.listdir("/proc/self/fd")) <= before and not found.fetches.total()


def test_so_many_are_fetched_at_a_time(app: Any, tmp_path: Path) -> None:
    """One client gets half of them, and another one half of what is left."""
    found = app.state.saesteer_results = results(tmp_path, number=100)
    handle = large(found)
    found.fetches["another"] = routes.MOST // 2

    async def fetch() -> list[int]:
        slow = [Slow(app, handle) for _ in range(routes.MOST // 4)]
        tasks = [asyncio.create_task(one.fetch()) for one in slow]
        await asyncio.gather(*(one.stops.wait() for one in slow))
        refused = await Slow(app, handle).fetch()
        tasks.pop().cancel()
        await asyncio.sleep(0.1)
        one = Slow(app, handle, 100)
        served = await one.fetch()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [refused, served]

    assert asyncio.run(fetch()) == [429, 200]
    assert found.fetches.total() == routes.MOST // 2


def test_handles_say_nothing_of_a_key(tmp_path: Path) -> None:
    begins = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir(mode=0o700)
        with sent_by("key"):
            begins.append(kept(results(tmp_path / place))[:8])
    assert begins[0] != begins[1], "of two servers"
