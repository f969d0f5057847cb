"""For all tests: which are left out, in which order they run, what they share, and what ends when the time is up."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.plugin.serving import served
from tests.shared import Shared
from tests.slow_runs import Runs
from tools.reach import repository

# An engine holds 2 GiB and a server 3, whether or not it has work; the machine of CI has 24.
RUNNING = int(os.environ.get("SAESTEER_TEST_RUNNING", "6"))  # fewer, where tests run side by side on one GPU

# Tests that share run side by side, so that each engine and each server is started once; these in this order, and after
# them the slow ones that share nothing. What is not reached in time is then the commands and the benchmarks.
SHARERS = ("make_engine", "any_server", "demo_server")

# A machine that is busy is not a failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Of the tests that have to run; to be 0.05 once tests/slow_runs.jsonl has rows. DECISIONS.md has the reason.
MAY_BE_LEFT = 0.9

_left: list[str] = []  # tests that were not reached in time
_spared: set[str] = set()  # tests that need not run: nothing that they reach has changed since they last did
_running = Shared(RUNNING)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Pytest's own, which hears our warnings whatever vLLM's app, built by an earlier test, did to other loggers."""
    caplog.set_level(logging.WARNING, "vllm.saesteer")
    for name in ("vllm", "vllm.saesteer"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return caplog


def pytest_addoption(parser: pytest.Parser) -> None:
    """A machine that is slow today says which tests it did not come to, instead of being ended in the midst of one."""
    parser.addoption(
        "--until", type=float, metavar="SECONDS", help="since the epoch; tests that begin later are skipped"
    )
    parser.addoption(
        "--runs", type=Path, metavar="FILE", help="first what has changed; without --until, note whole runs"
    )
    parser.addoption("--first", type=int, metavar="N", help="begin with this file of slow tests, counted round")
    parser.addoption("--part", metavar="I/N", help="of the tests, the Ith of N parts of as many, from 1 on")
    parser.addoption(
        "--shared", choices=("yes", "no"), help="of the files, those whose tests share engines, or the rest"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test, and what it would set up, when the time is up; the summary names it."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        _left.append(item.nodeid)
        pytest.skip(
            f"{item.nodeid} not reached before {time.strftime('%H:%M', time.localtime(until))}, as --until asks"
        )


def _too_many(session: pytest.Session) -> bool:
    return _missing() >= MAY_BE_LEFT * (session.testscollected - len(_spared)) > 0


def _missing() -> int:
    return sum(name not in _spared for name in _left)


@pytest.hookimpl(tryfirst=True)  # before the terminal says how it ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What nobody ran has not passed."""
    if _too_many(session) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many were left, and what follows; pytest's own summary names them."""
    session = terminalreporter._session
    if _left and session is not None:
        had_to = session.testscollected - len(_spared)
        told = f"{_missing()} of the {had_to} tests that have to run were not reached in time, "
        told += f"and {len(_left) - _missing()} of {len(_spared)} others; "
        verdict = (
            "that is a failure" if _too_many(session) else f"fewer than {MAY_BE_LEFT:.0%} of the former may be left"
        )
        terminalreporter.write_line(told + verdict, red=_too_many(session), yellow=not _too_many(session))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `gpu` tests on a CPU, of which pytest's last line says how many; and put together who shares."""
    if shared := config.getoption("--shared"):
        sharing = {_file(item) for item in items if 0 < _group(item) <= len(SHARERS)}
        config.hook.pytest_deselected(items=[item for item in items if (_file(item) in sharing) != (shared == "yes")])
        items[:] = [item for item in items if (_file(item) in sharing) == (shared == "yes")]
    items.sort(key=_group)  # stable: otherwise as they were written
    if (first := config.getoption("--first")) is not None:
        items[:] = _turned(items, first)
    if part := config.getoption("--part"):  # neighbours stay together: they compile the same kernels
        number, parts = map(int, part.split("/"))
        first, last = (len(items) * n // parts for n in (number - 1, number))
        config.hook.pytest_deselected(items=[*items[:first], *items[last:]])
        items[:] = items[first:last]
    if not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(trylast=True)  # of what is selected
def pytest_collection_finish(session: pytest.Session) -> None:
    """Put first what a change can reach since it last ran whole, then the rest, the oldest first."""
    if path := session.config.getoption("--runs"):
        tests = Counter(_file(item) for item in session.items)
        reach = repository()
        whole = not (session.config.option.keyword or any("::" in one for one in session.config.args))
        append = whole and session.config.getoption("--until") is None and session.config.getoption("--part") is None
        runs = Runs(path, tests, {name: reach.digest(name) for name in tests}, append)
        session.config.pluginmanager.register(runs)
        session.items.sort(key=lambda item: runs.place(_file(item)))  # stable: who shares stays together
        _spared.update(item.nodeid for item in session.items if _file(item) in runs.unchanged)


def _turned(items: Sequence[pytest.Item], first: int) -> list[pytest.Item]:
    """The same, of which the slow ones, which come last, begin with another file and end with those before it."""
    at = next((n for n, item in enumerate(items) if _group(item)), len(items))
    starts = [n for n in range(at, len(items)) if n == at or items[n].path != items[n - 1].path]
    turn = starts[first % len(starts)] if starts else at
    return [*items[:at], *items[turn:], *items[at:turn]]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _group(item: pytest.Item) -> int:
    if not item.get_closest_marker("slow"):
        return 0
    used = getattr(item, "fixturenames", ())
    return next((place for place, name in enumerate(SHARERS, 1) if name in used), 1 + len(SHARERS))


@pytest.hookimpl(trylast=True)  # after its own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nobody asks again for what this group has shared."""
    if nextitem is not None and _group(nextitem) != _group(item):
        _running.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """Engines and servers that are started once for all who ask for the same."""
    yield _running
    _running.close()


@pytest.fixture
def demo_server(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> httpx.Client:
    """`saesteer serve demo` on a port of its own, with Neuronpedia's routes."""
    flags = ["demo", "--neuronpedia"]
    found: httpx.Client = shared.get("demo", lambda: served(flags, tmp_path_factory.mktemp("demo") / "log"))
    return found
