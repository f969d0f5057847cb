"""What the prompts of one HTTP request report, on its way from the engine's outputs to the answer. Knows no text."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.plugin.results.spools import Spool
from saesteer.plugin.results.unsent import Unsent

# Of the codes of refused requests; all others are 400, and those of the admin routes choose their own.
STATUS: Mapping[str, int] = {
    "too_large": 413,
    "non_finite": 422,
    "collapsed": 422,
    "results_full": 429,
    "consumer": 500,
    "no_space": 507,
}

_NUMBERS = ("features", "probes", "dose")  # words of a report that hold numbers which the model has made


class Exchange:
    """One HTTP request to a route that serves the field.

    Args:
        path: of the route.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.refused: SpecError | None = None  # a SpecRefused, the last of its prompts
        self.module: str | None = None  # that the model of its body names (models.py)
        self.mark = ""  # what is applied, for the header
        self.kept: list[Spool] = []  # of choices that have ended: if one of its prompts fails, nobody gets any
        self.unsent: dict[int, Unsent] = {}  # by number of the choice
        self.begins = asyncio.Event()  # all its prompts are admitted
        self.asked = 0  # prompts with a spec that are not admitted yet
        self._next = 0  # number of the first choice of the next prompt

    def admit(self, *, at_once: bool) -> None:
        """Note that the engine has admitted a prompt; ``at_once``: no pass of it can end it."""
        self.asked -= at_once
        if at_once and self.asked <= 0:
            self.begins.set()

    def report(self, body: Any, choices: Sequence[Any], put: Callable[[Any, str, Any], None]) -> None:
        """Give a body the report of its first choice, and each of several choices its own."""
        for one, of in [(body, choices[0]), *((one, one) for one in choices if len(choices) > 1)]:
            number = of["index"] if isinstance(of, dict) else of.index
            put(one, KEY, in_json(self.unsent[number].fields) if number in self.unsent else None)

    def watch(self, outputs: AsyncGenerator[Any, None], choices: int) -> AsyncGenerator[Any, None]:
        """Pass on the engine's outputs of the next prompt, and take down what its choices report."""
        first = self._next
        if self.path != "/v1/responses":  # where each prompt is a turn of one answer
            self._next += choices
        return self._taken_down(outputs, first)

    async def _taken_down(self, outputs: AsyncGenerator[Any, None], first: int) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    for choice in output.outputs:
                        if hasattr(choice, KEY):
                            ended = choice.finish_reason is not None
                            self.unsent.setdefault(first + choice.index, Unsent()).add(choice.saesteer, ended=ended)
                            if ended and not choice.text and not choice.token_ids:
                                choice.text = _Nothing()
                    yield output
            except SpecError as error:  # of a request that is refused while it runs
                self.refused = error
                raise


class _Nothing(str):
    """An empty text that counts as one: vLLM's streams leave out an output without text and tokens, even a last one."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True


_exchange: ContextVar[Exchange | None] = ContextVar("saesteer_exchange", default=None)


def exchange() -> Exchange | None:
    """The exchange that this context belongs to, if there is one."""
    return _exchange.get()


def begin(path: str) -> Exchange:
    """An exchange, which this context belongs to from now on."""
    found = Exchange(path)
    _exchange.set(found)
    return found


def begun() -> Exchange:
    """The exchange of this context; one of its own where no app answers, as in `vllm run-batch`."""
    return exchange() or begin("")


def in_json(report: Any) -> Any:
    """A report as JSON has it, which knows neither NaN nor infinity: null stands in their place."""
    numbers = {} if report is None else {word: report[word] for word in _NUMBERS if word in report}
    with suppress(ValueError):
        json.dumps(numbers, allow_nan=False)
        return report
    return report | {word: _finite(found) for word, found in numbers.items()}


def _finite(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {name: _finite(one) for name, one in found.items()}
    if isinstance(found, list):
        return [_finite(one) for one in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
