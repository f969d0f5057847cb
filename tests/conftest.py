"""For all tests: those that need a CUDA device are left out where there is none, and all when the time is up."""

import time

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """A machine that is slow today says which tests it did not come to, instead of being ended in the midst of one."""
    parser.addoption(
        "--until", type=float, metavar="SECONDS", help="since the epoch; tests that begin later are skipped"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test, and what it would set up, when the time is up; the summary names it."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(
            f"{item.nodeid} not reached before {time.strftime('%H:%M', time.localtime(until))}, as --until asks"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `gpu` tests on a CPU; pytest's last line says how many."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
