"""The order in which contenders are asked, what is looked at in their answers, and the times as they come in.

Knows no process: whoever makes a rotation gives it a function that runs a burst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.asks import SCALE, Shape
from bench.contend import Answer, Burst, Told
from bench.contenders import STOCK
from bench.deltas import Run, figures, paired, summary

CHECK_SCALE, CHECK_TOKENS = 16.0, 8  # of the bursts that are looked at before any is timed: one vector has to show
Row = dict[str, Any]


class Failed(RuntimeError):
    """A contender that did not start, died, or did not do what it was asked; the others go on."""


class Turn(NamedTuple):
    """A burst's place in the rotation."""

    contender: str
    ask: str
    requests: int


def wrong(burst: Burst, told: Told, shape: Shape, plain: Sequence[Answer] | None = None) -> str | None:
    """What a contender did not do of what it was asked; None if it did all.

    Args:
        burst: what it was asked.
        told: its answers.
        shape: of the model.
        plain: the answers of the same contender to the same prompts without an edit; None does not compare.
    """
    steered = burst.ask in ("vector", "vectors") and plain is not None
    if steered and [one.text for one in told.answers] == [one.text for one in plain or ()]:
        return "the answers are those without the vector"
    if burst.ask == "clamp" and not all(one.edited for one in told.answers):
        return "an answer does not say that its clamp changed tokens"
    if burst.ask in ("capture", "captures"):
        layers = shape.layers if burst.ask == "captures" else 1
        expected = [layers, burst.prompt + burst.tokens - 1, shape.width]
        found = [one.captured for one in told.answers if one.captured != expected]
        return f"{len(found)} captures are {found[0]}, expected {expected}" if found else None
    return None


class Rotation:
    """Who is asked what, in which order, and what it took; knows no process.

    Args:
        plans: the asks of each contender, stock not among them.
        requests: how many begin together.
        ask: runs a burst of a contender.
        shape: of the model.
        prompt, tokens: of each request.
    """

    def __init__(
        self,
        plans: Mapping[str, Sequence[str]],
        requests: Sequence[int],
        ask: Callable[[str, Burst], Told],
        shape: Shape,
        *,
        prompt: int,
        tokens: int,
    ) -> None:
        self.plans, self.requests, self._ask, self._shape = plans, requests, ask, shape
        self._prompt, self._tokens = prompt, tokens
        self._seed = 0
        self.runs: dict[int, list[Run]] = {each: [] for each in requests}
        self.failed: dict[tuple[str, str], str] = {}
        self.took: dict[Turn, float] = {}

    def order(self, turn: int) -> Iterator[Turn]:
        """A round; the contenders change direction from round to round."""
        names = list(self.plans)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            for requests in self.requests:
                yield Turn(STOCK, "nothing", requests)
                yield from (Turn(name, ask, requests) for ask in self.plans[name])
                yield Turn(STOCK, "nothing", requests)

    def check(self) -> None:
        """Let everybody do once what it will be asked, so that nothing is compiled while the clock runs, and look at
        what it did."""
        for name, asks in {STOCK: ("nothing",), **self.plans}.items():
            for requests in self.requests:
                self._seed += 1
                plain = None
                for ask in asks:
                    burst = Burst(ask, self._seed, requests, self._prompt, CHECK_TOKENS, CHECK_SCALE)
                    told = self._told(Turn(name, ask, requests), burst, plain)
                    plain = told.answers if told is not None and ask == "nothing" else plain

    def round(self, turn: int, left: float) -> bool:
        """A round, or as much of it as fits into the seconds that are left; whether all of it did."""
        end, whole = time.monotonic() + left, True
        for one in self.order(turn):
            late = time.monotonic() + self.took.get(one, 0.0) > end
            if one.contender != STOCK and late:
                whole = False
            elif not late or self._waits(one.requests):
                self._timed(one)
        return whole

    def rows(self) -> Iterator[Row]:
        """A line for each contender, ask and number of requests that has been timed, or cannot be."""
        for requests, runs in self.runs.items():
            found = paired(runs)
            for name, asks in self.plans.items():
                for ask in asks:
                    row: Row = {"contender": name, "ask": ask, "requests": requests}
                    if (name, ask) in self.failed:
                        yield row | {"not_run": self.failed[name, ask]}
                    elif pairs := found.get(f"{name} {ask}"):
                        yield row | summary(pairs, {}, {})

    def _waits(self, requests: int) -> bool:
        """Whether the last run is a contender's, which needs one of stock behind it."""
        runs = self.runs[requests]
        return bool(runs) and runs[-1].mode != STOCK

    def _timed(self, turn: Turn) -> None:
        if (turn.contender, turn.ask) in self.failed:
            return
        self._seed += 1
        burst = Burst(turn.ask, self._seed, turn.requests, self._prompt, self._tokens, SCALE)
        begin = time.monotonic()
        told = self._told(turn, burst, None)
        self.took[turn] = time.monotonic() - begin
        if told is not None:
            mode = STOCK if turn.contender == STOCK else f"{turn.contender} {turn.ask}"
            middle = begin + self.took[turn] / 2
            self.runs[turn.requests].append(Run(mode, middle, figures(told.first, told.whole, self._tokens)))

    def _told(self, turn: Turn, burst: Burst, plain: Sequence[Answer] | None) -> Told | None:
        """The answers; None if something is wrong with them or was before, which is kept."""
        place = turn.contender, turn.ask
        if place in self.failed:
            return None
        try:
            told: Told = self._ask(turn.contender, burst)
            why = wrong(burst, told, self._shape, plain)
        except Failed as error:
            why = str(error)
        if why is None:
            return told
        if turn.contender == STOCK:
            raise SystemExit(f"stock vLLM failed: {why}")
        self.failed[place] = why
        return None
