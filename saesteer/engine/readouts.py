"""What a worker knows of a request's readouts: what each reads, where, and at which positions.

Knows positions and weights, and neither steps nor an answer's form. lanes.py finds a step's rows by them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.engine.filer import Span
from saesteer.kernels.read.features import Encoder
from saesteer.kernels.read.rows import Probes
from saesteer.planning.immutable import distinct
from saesteer.planning.reductions import is_by_message


@distinct
class Source:
    """A dictionary, or probes: what turns rows of a tensor into numbers."""

    encoder: Encoder | None = None
    ids: NDArray[np.int32] | None = None  # of the encoder's rows, where a file holds only some features
    probes: Probes | None = None

    @property
    def probed(self) -> int:
        """Number of its probes."""
        return 0 if self.probes is None else len(self.probes.bias)

    def __reduce__(self) -> tuple[type["Source"], tuple[None, NDArray[np.int32] | None]]:
        """Another process, which gets what was read, needs no weights."""
        return Source, (None, self.ids)


@distinct
class Reading:
    """One readout of a row."""

    kind: Literal["features", "probe", "activation", "hidden"]
    # The sites that capture it; several only of activations and probes; none: what lm_head multiplies.
    ops: tuple[str, ...]
    after: bool
    windows: Sequence[Span]  # disjoint, ascending
    last: bool  # only the row that sampled the answer's last token
    reduce: str  # none, or a name of REDUCTIONS
    source: Source | None
    top_k: int
    named: tuple[int, ...]  # rows of the encoder
    starts: Sequence[int] = ()  # of chat messages, each with a mean of its own; ascending, from 0
    # For each name its number among what the request's rules watch; no answer has it.
    watched: tuple[int, ...] | None = None

    def spans(self, position: int, tokens: int) -> Iterator[Span]:
        """The positions that it asks for among a step's tokens of its request."""
        end = position + tokens
        if self.last:
            yield end - 1, end
            return
        for lo, hi in self.windows:
            if lo < end and position < hi:
                yield max(lo, position), min(hi, end)

    def parts(self, position: int, tokens: int) -> Iterator[list[Span]]:
        """``spans`` as they are reduced: those of each message alone, or all together; none without positions."""
        spans = [*self.spans(position, tokens)]
        if not is_by_message(self.reduce):
            yield from [spans] if spans else []
            return
        first = bisect_right(self.starts, position) - 1
        for lo, hi in pairwise([*self.starts[first:], position + tokens]):
            inside = [(max(lo, a), min(hi, b)) for a, b in spans if max(lo, a) < min(hi, b)]
            if inside:
                yield inside


class Segment(NamedTuple):
    """The tokens of one request in a step."""

    name: str
    readings: Sequence[Reading | None]  # by number; None: another stage of a pipeline has it
    first: int  # index in the step
    position: int  # of this token in the request
    tokens: int
