"""A runner that works at once, and what a feed gives it."""

from typing import Any

from saesteer.consumers import Consumer, Rows
from saesteer.consumers.feed import ticket as made
from saesteer.consumers.runner import Runner, Ticket
from tests.consumers.rows import token


class Direct(Runner):
    """A runner without a thread."""

    def __init__(self, name: str = "it") -> None:
        super().__init__(name, Consumer({}))
        self.said: list[tuple[Ticket, Any]] = []

    def put(self, ticket: Ticket, rows: Rows, *, wait: bool = False) -> None:
        self.said.append((ticket, rows))

    def end(self, ticket: Ticket) -> None:
        self.said.append((ticket, "end"))

    def drop(self, ticket: Ticket) -> None:
        self.said.append((ticket, "drop"))

    @property
    def positions(self) -> list[int]:
        return [int(at) for _, one in self.said if isinstance(one, Rows) for at in one.positions]


def ticket() -> Ticket:
    """A ticket of one request."""
    return made("a", 0, None, 10)


def tokens(lo: int, hi: int) -> list[int]:
    """The ids of the tokens at these positions."""
    return [token(at) for at in range(lo, hi)]
