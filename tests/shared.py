"""Engines and servers that tests share by what they were started with. Knows no test, no engine and no server."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class Shared:
    """What takes half a minute to start, by key: the last few that somebody asked for run on.

    Args:
        most: of them at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[str, tuple[Any, ExitStack]] = {}  # the one asked for last stands last

    def get(self, key: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What runs under a key, or is started under it now.

        Args:
            key: equal where everything that matters to a test is equal.
            start: its context is left when the thing has to make room, or at the end.
        """
        if key not in self._running:
            while len(self._running) >= self._most:
                self._stop(next(iter(self._running)))
            stack = ExitStack()
            self._running[key] = stack.enter_context(start()), stack
        found = self._running[key] = self._running.pop(key)
        return found[0]

    def close(self) -> None:
        """Stop all."""
        while self._running:
            self._stop(next(iter(self._running)))

    def _stop(self, key: str) -> None:
        _, stack = self._running.pop(key)
        stack.close()
