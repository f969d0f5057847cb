"""A server under thousands of random requests, a fifth cut off and a tenth wrong: no 5xx, and nothing stays behind.

Half of them are streams, on all routes, while vectors and a module come and go under names that they ask for. What the
worker holds is compared before and after, and in the long run the memory of all the server's processes.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saesteer.planning.plan import Catalog
from tests.plugin.conftest import BRIDGE, Dictionaries
from tests.plugin.serving import Served, served
from tests.plugin.soaking import (
    ENVIRONMENT,
    FLAGS,
    MIB,
    SEED,
    answer,
    catalog_of,
    failures,
    fill_cache,
    memory,
    requests,
    settled,
    storm,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak") / "log"


@pytest.fixture(scope="module")
def server(server_flags: list[str], log: Path) -> Iterator[Served]:
    """As any_server without an adapter, and one that tells what its worker holds."""
    with served([*server_flags, *FLAGS], log, environment=ENVIRONMENT, fork=False) as client:
        yield client


@pytest.fixture(scope="module")
def catalog(dictionaries: Dictionaries) -> Catalog:
    return catalog_of(dictionaries)


def check(server: Served, log: Path, catalog: Catalog, count: int) -> list[dict[str, int]]:
    """Two halves of a storm, and what is left; the server's memory after each half."""
    draw = random.Random(SEED)
    alone = [answer(server, edits) for edits in ([], [BRIDGE])]
    before, said = settled(server), len(log.read_text())
    kept: list[dict[str, int]] = []
    begun = time.monotonic()
    for half in (1, 2):
        counts = storm(server, requests(draw, catalog, count // 2), draw)
        held = settled(server)
        kept.append(memory(server))
        print(f"\nseed {SEED}, half {half}, {time.monotonic() - begun:.0f} s: {dict(counts)}, {held}")
        assert held == before
        assert set(counts) >= {"right", "plain", "cut off", "refused", "changes of names"}
        assert counts["cut off"] > count // 20, "most of those that were to be cut off were"
    assert held["requests"] == held["with a row"] == held["slots of requests"] == 0
    assert held["rows that hold names"] == 0
    assert [answer(server, edits) for edits in ([], [BRIDGE])] == alone
    assert failures(log.read_text()[said:]) == []
    return kept


@pytest.mark.long  # test_read_soak.py does much the same in CI
def test_hundreds_of_requests_leave_nothing_behind(server: Served, log: Path, catalog: Catalog, capsys: Any) -> None:
    with capsys.disabled():
        check(server, log, catalog, 200)


@pytest.mark.long
def test_thousands_of_requests_leave_nothing_behind(server: Served, log: Path, catalog: Catalog, capsys: Any) -> None:
    fill_cache(server)
    with capsys.disabled():
        first, second = check(server, log, catalog, 2000)
        print({name: f"{first[name] / MIB:.1f} -> {second[name] / MIB:.1f} MiB" for name in second})
    assert first.keys() == second.keys()
    # A row that stays behind has 16 KB, and a request some in each process.
    assert sum(second.values()) - sum(first.values()) < 12 * MIB
