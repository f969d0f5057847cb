"""What one answer reads, on its way to the consumers that want it: blobs → rows by position. Knows no engine.

The blobs are those of ``saesteer.planning.answers``. A position goes out once its token is known to be an input, and
only once: what is computed again after a preemption replaces what waits, and nothing else.
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.consumers.consumer import SIZES, Array, Request, Rows
from saesteer.consumers.runner import Runner, Ticket
from saesteer.planning.answers import WORDS, Reported, apart, score
from saesteer.planning.answers import Rows as Answer
from saesteer.planning.plan import END
from saesteer.planning.windows import of_part

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
        readouts: of the request's plan; blobs have their numbers.
        own: the consumers that the request names, which get what it asks for.
        capturing: the consumers that get what the operator captures.
    """

    def __init__(
        self,
        readouts: Sequence[Reported],
        own: Sequence[Taker],
        capturing: Sequence[Taker] = (),
    ) -> None:
        self.own, self._takers = own, [*own, *capturing]
        self._wanted = [
            (*(own if one.readout.shown else ()), *(capturing if one.readout.captured else ())) for one in readouts
        ]
        self._waiting = [_Waiting(one) for one in readouts]
        # Reductions, as an answer has them that names nothing by a handle.
        self._fields: dict[str, Any] = {}
        inline = [one._replace(readout=replace(one.readout, inline=True)) for one in readouts]
        self._reduced = Answer(inline, self._fields)
        self._open = True

    def add(self, blobs: Iterable[Sequence[Any]]) -> None:
        """Keep what has come, as far as it is wanted; reductions come with the end."""
        blobs = [blob for blob in blobs if self._wanted[blob[0]]]
        self._reduced.add(blob for blob in blobs if self._waiting[blob[0]].whole)
        for number, spans, *data in blobs:
            if not self._waiting[number].whole:
                self._waiting[number].add([tuple(span) for span in spans], data)

    def give(self, tokens: Tokens, end: int, *, border: int = END, wait: bool = False) -> None:
        """Hand over what is below a position.

        Args:
            tokens: a function: positions → the ids of their tokens.
            end: the first position whose token is not known to be an input.
            border: between the parts of the answer, as its tokens up to ``end`` tell it (windows.inside).
            wait: wait for consumers that are behind, as long as their policies say.
        """
        for one, takers in zip(self._waiting, self._wanted, strict=True):
            for rows in one.below(end, tokens, border) if takers else ():
                for runner, ticket in takers:
                    runner.put(ticket, rows, wait=wait)

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
        self._reduced.tell(end, length - end, final=True, border=border)
        for one, takers in zip(self._waiting, self._wanted, strict=True):
            for rows in one.reduced(self._fields) if takers and one.whole else ():
                for runner, ticket in takers:
                    runner.put(ticket, rows)
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


class _Waiting:
    """One readout's rows that have not gone out."""

    def __init__(self, reported: Reported) -> None:
        readout, about, dtype, self._function, beside = reported
        self._abouts = about, *beside
        self._kind, self._part = readout.kind, readout.part
        self._dtypes = {name: one or dtype for name, one in _ARRAYS[readout.kind].items()}
        self.whole = readout.last or readout.reduce != "none"
        self._gone = 0  # positions below this one have gone out
        self._spans: list[tuple[int, int, list[bytes]]] = []  # lo, hi, bytes of each array; disjoint, ascending

    def add(self, spans: Sequence[tuple[int, int]], data: Sequence[bytes]) -> None:
        rows = sum(hi - lo for lo, hi in spans)
        sizes, first = [len(one) // rows for one in data], 0
        for lo, hi in spans:
            skip = min(max(self._gone - lo, 0), hi - lo)
            self._cut(lo)
            if skip < hi - lo:
                part = [
                    one[size * (first + skip) : size * (first + hi - lo)] for one, size in zip(data, sizes, strict=True)
                ]
                self._spans.append((lo + skip, hi, part))
            first += hi - lo

    def _cut(self, at: int) -> None:
        """Forget what waits from a position on: it is computed again."""
        while self._spans and self._spans[-1][1] > at:
            lo, hi, data = self._spans.pop()
            if lo < at:
                self._spans.append((lo, at, _between(lo, at, lo, hi, data)))

    def below(self, end: int, tokens: Tokens, border: int) -> list[Rows]:
        found = []
        low, high = of_part(self._part, border)
        while self._spans and self._spans[0][0] < end:
            lo, hi, data = self._spans.pop(0)
            if hi > end:
                self._spans.insert(0, (end, hi, _between(end, hi, lo, hi, data)))
            first, last = max(lo, low), min(hi, end, high)
            self._gone = min(hi, end)
            if first >= last:
                continue
            ids: NDArray[np.int64] = np.array(tokens(first, last), dtype=np.int64)
            arrays = self._arrays(last - first, _between(first, last, lo, hi, data))
            for about, own in zip(self._abouts, arrays, strict=True):
                found.append(Rows(self._kind, about, np.arange(first, last), ids, own))
        return found

    def _arrays(self, rows: int, data: Sequence[bytes]) -> list[dict[str, Array]]:
        """Those of each readout that it stands for."""
        if self._kind == "probe":
            data = [score(np.frombuffer(one, np.float32), self._function).tobytes() for one in data]
        columns = [apart(one, rows, len(self._abouts)) for one in data]
        return [
            {
                name: Array(dtype, (rows, len(one) // (rows * SIZES[dtype])), one)
                for (name, dtype), one in zip(self._dtypes.items(), own, strict=True)
            }
            for own in zip(*columns, strict=True)
        ]

    def reduced(self, fields: Mapping[str, Any]) -> list[Rows]:
        """The entries of an answer as rows."""
        found = []
        entries = [one for one in fields.get(WORDS[self._kind], ()) if "data" in one and one["shape"][0]]
        for about in self._abouts:
            entry = next((one for one in entries if about.items() <= one.items()), None)
            if entry is not None:
                positions = np.array(entry["positions"], dtype=np.int64)
                array = Array(entry["dtype"], tuple(entry["shape"]), b64decode(entry["data"]))
                found.append(Rows(self._kind, about, positions, np.zeros(0, dtype=np.int64), {"data": array}))
        return found


def _between(first: int, last: int, lo: int, hi: int, data: Sequence[bytes]) -> list[bytes]:
    """Of the rows at positions [lo, hi) those at [first, last)."""
    sizes = [len(one) // (hi - lo) for one in data]
    return [one[size * (first - lo) : size * (last - lo)] for one, size in zip(data, sizes, strict=True)]
