"""What one answer reads, on its way to the consumers that want it. Knows no engine.

A position goes out once its token is known to be an input, and only once (``saesteer.planning.answers.Rows``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from saesteer.consumers.consumer import SIZES, Array, Numbers, Request, Rows
from saesteer.consumers.runner import Runner, Ticket
from saesteer.planning.answers import Reported
from saesteer.planning.answers import Rows as Answer
from saesteer.planning.figures import apart, score
from saesteer.planning.plan import END

Tokens = Callable[[int, int], Sequence[int]]  # the ids of the tokens at positions [lo, hi)
Taker = tuple[Runner, Ticket]

# The arrays of a kind's blobs, each with its dtype; None: the model's.
_ARRAYS: Mapping[str, Mapping[str, str | None]] = {
    "activation": {"data": None},
    "hidden": {"data": None},
    "probe": {"scores": "float32"},
    "features": {"indices": "int32", "strengths": "float32", "named": "float32"},
}


class Feed:
    """The rows of one answer for its consumers.

    Args:
        rows: what the answer reads, as it comes.
        own: the consumers that the request names, which get what it asks for.
        capturing: the consumers that get what the operator captures.
    """

    def __init__(self, rows: Answer, own: Sequence[Taker], capturing: Sequence[Taker] = ()) -> None:
        self.own, self._takers = own, [*own, *capturing]
        self._rows = rows
        self._wanted = [
            (*(own if one.readout.shown else ()), *(capturing if one.readout.captured else ())) for one in rows.reported
        ]
        self._open = True

    def give(self, tokens: Tokens, end: int, *, border: int = END, wait: bool = False) -> None:
        """Hand over what is below a position.

        Args:
            tokens: a function: positions → the ids of their tokens.
            end: the first position whose token is not known to be an input.
            border: between the parts of the answer, as its tokens up to ``end`` tell it (windows.inside).
            wait: wait for consumers that are behind, as long as their policies say.
        """
        for number, (positions, rows) in self._rows.advance(end, border):
            if takers := self._wanted[number]:
                at = np.array(positions, dtype=np.int64)
                ids = np.array(tokens(positions[0], positions[-1] + 1), dtype=np.int64)[at - positions[0]]
                data = [b"".join(column) for column in zip(*rows, strict=True)]
                for one in _pieces(self._rows.reported[number], at, ids, data):
                    for runner, ticket in takers:
                        runner.put(ticket, one, wait=wait)

    def finish(
        self,
        tokens: Tokens,
        end: int,
        length: int,
        reason: str,
        *,
        border: int = END,
        wait: bool = False,
    ) -> None:
        """The answer has ended.

        Args:
            tokens: as in ``give``.
            end: as in ``give``.
            length: tokens of the prompt and the answer.
            reason: stop or length.
            border: as in ``give``.
            wait: as in ``give``.
        """
        if not self._open:
            return
        self._open = False
        self.give(tokens, end, border=border, wait=wait)
        for number, (takers, reported) in enumerate(zip(self._wanted, self._rows.reported, strict=True)):
            content = self._rows.reduced(number, end) if takers else None
            if content is not None and content["shape"][0]:
                positions, none = np.array(content["positions"], dtype=np.int64), np.zeros(0, dtype=np.int64)
                for one in _pieces(reported, positions, none, [content["data"]], content):
                    for runner, ticket in takers:
                        runner.put(ticket, one)
        ids = [*tokens(0, length)]
        for runner, ticket in self._takers:
            ticket.request.tokens, ticket.request.finish = ids, reason
            runner.end(ticket)

    def abandon(self) -> None:
        """The answer will have no end: its client has gone, or it failed."""
        if self._open:
            self._open = False
            for runner, ticket in self._takers:
                runner.drop(ticket)

    @property
    def results(self) -> Mapping[str, Any]:
        """The future result of each consumer that the request names, by name; empty for an abandoned answer's."""
        return {runner.name: ticket.result for runner, ticket in self.own}


def ticket(id: str, choice: int, parameters: Any, prompt_len: int, *, captured: bool = False) -> Ticket:
    """A ticket for one answer at one consumer."""
    return Ticket(Request(id, choice, parameters, captured, prompt_len))


def _pieces(
    reported: Reported,
    positions: Numbers,
    tokens: Numbers,
    data: Sequence[bytes],
    content: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Rows]:
    """Rows of each readout whose rows travel with this one's.

    Args:
        reported: the readout.
        positions: of the rows.
        tokens: there.
        data: the bytes of each array.
        content: of a tensor that they were reduced to.
    """
    readout, dtype, abouts = reported.readout, reported.dtype, reported.abouts
    rows = content["shape"][0] if content else len(positions)
    if readout.kind == "probe":
        data = [score(np.frombuffer(one, np.float32), reported.function).tobytes() for one in data]
    columns = zip(*(apart(one, rows, len(abouts)) for one in data), strict=True)
    for name, own in zip(abouts, columns, strict=True):
        arrays = {}
        for (word, usual), one in zip(_ARRAYS[readout.kind].items(), own, strict=True):
            numbers = content.get("dtype") or usual or dtype
            arrays[word] = Array(numbers, (rows, len(one) // (rows * SIZES[numbers])), one)
        yield Rows(readout.kind, name, positions, tokens, arrays)
