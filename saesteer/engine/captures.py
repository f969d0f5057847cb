"""What is read of captured tensors once a step has run: its tokens, the computation, and the way to the host.

Knows rows, tensors and positions, and neither vLLM nor an answer's form. The op copies the tokens of rows that read
(kernels/layout.py, before and after); here one gather for each width takes those that somebody asks for, and what is
made of them runs beside the next step, on a stream of its own.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.brought import Brought, Made, Part
from saesteer.engine.filing import Step
from saesteer.engine.readouts import Reading, Segment, Span
from saesteer.engine.spool import Filed, Sink, Writer
from saesteer.kernels.read.features import read_features
from saesteer.kernels.read.rows import read_probes, reduce_rows
from saesteer.planning.plan import END

_COMBINATIONS = 1024  # of sites that requests read together, kept
_INDICES = 16  # of rows for files, kept; of a step in which all decode, and of those with prompts

# What becomes of rows: they stay rows, each is a reduction of itself alone, or all become one.
_How = Literal["rows", "alone", "reduced"]


class Work(NamedTuple):
    """Rows that one computation serves, side by side among those gathered."""

    blocks: Sequence[tuple[int, Sequence[Part]]]  # where each begins among these rows, and who gets them
    begin: int
    end: int
    how: _How


@dataclass(frozen=True, slots=True)
class Take:
    """What the requests of a step read, as far as it does not depend on the tensors.

    It also holds for steps behind that one in which each request decodes one more token.
    """

    gathers: Sequence[tuple[int | None, Tensor, Sequence[Work]]]  # a bank, its rows, and what is made of them
    steps: int  # for which it holds, the first one included


class Captures:
    """The captured tensors of all sites, and what is made of them.

    Args:
        widths: of each site that may be read, by name.
        max_tokens: of a step.
        dtype: of the stream.
        device: where the model runs.
    """

    def __init__(self, widths: Mapping[str, int], max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.max_tokens = device, max_tokens
        places: dict[int, int] = defaultdict(int)
        self._planes: dict[tuple[str, bool], tuple[int, int]] = {}  # width and number of a plane, by site and after
        for name, width in widths.items():
            for after in (False, True):
                self._planes[name, after] = width, places[width]
                places[width] += 1
        self._banks = {
            width: torch.zeros(count * max_tokens, width, dtype=dtype, device=device) for width, count in places.items()
        }
        self._banked: dict[tuple[tuple[str, ...], bool], tuple[int | None, NDArray[np.int64]]] = {}
        self._indices: dict[bytes, Tensor] = {}  # of rows for files, on the device, by their bytes
        self._writer = Writer()
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of each step in turn

    @property
    def widths(self) -> Collection[int]:
        """The widths of what is captured."""
        return self._banks.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that all captures take."""
        return sum(bank.nbytes for bank in self._banks.values())

    def of(self, site: str) -> dict[str, Tensor]:
        """The fields of a site's Bound; none where nothing is captured."""
        if (site, False) not in self._planes:
            return {}
        return {name: self._plane(site, after) for name, after in (("before", False), ("after", True))}

    def _plane(self, site: str, after: bool) -> Tensor:
        width, number = self._planes[site, after]
        return self._banks[width][number * self.max_tokens :][: self.max_tokens]

    def take(self, segments: Iterable[Segment]) -> Take:
        """What requests read of a step.

        Args:
            segments: of the requests that read.
        """
        blocks, steps = _Blocks(self.where), END
        for name, readings, first, position, tokens in segments:
            ahead, here = first - position, [(position, position + 1)]
            for number, reading in enumerate(readings):
                if reading is None:
                    continue
                if tokens != 1:
                    steps = 1
                    for spans in reading.parts(position, tokens):
                        blocks.of(reading, alone=False).add(name, number, reading, spans, ahead)
                    continue
                reads, more = reading.decodes(position)
                steps = min(steps, more)
                if reads:
                    blocks.of(reading, alone=True).add(name, number, reading, here, ahead)
        return Take([(bank, self._on_device(index), works) for bank, index, works in blocks.gathers()], steps)

    def bring(
        self,
        take: Take | None,
        hidden: Tensor | None,
        ahead: int = 0,
        filed: Sequence[Step] = (),
        sinks: Mapping[str, Mapping[int, Sink]] = MappingProxyType({}),
    ) -> Brought | None:
        """What the requests read of a step that has been launched; None if they read nothing of it.

        It waits for nothing. The gather is ordered with the device's work, all behind it runs beside the next step.

        Args:
            take: of this step, or of one before it, if it still holds; None: nothing but what goes into files.
            hidden: [tokens, d], what lm_head multiplies.
            ahead: steps between the two.
            filed: what goes into files.
            sinks: of the requests that have some.
        """
        gathers = () if take is None else take.gathers
        if not gathers and not sinks:
            return None
        gathered = [(self._rows(bank, index, hidden), works) for bank, index, works in gathers]
        kept = [self._rows(one.bank, self._known(one.chosen), hidden) for one in filed]
        if self._side is None:
            made, event = [*_made(gathered, ahead)], None
            self._file(filed, kept, None)
        else:
            self._gathered.record(torch.cuda.current_stream(self.device))
            self._side.wait_event(self._gathered)
            with torch.cuda.stream(self._side):
                made = [*_made(gathered, ahead)]
                there = [rows.to("cpu", non_blocking=True) for rows in kept]
                for rows in (*(x for x, _ in gathered), *kept):
                    rows.record_stream(self._side)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._side)
            self._file(filed, there, event)
        # Rows in files have an event of the writer's: nobody waits for it here.
        return Brought(made, event if made else None, Filed(sinks, self._writer) if sinks else None)

    def _rows(self, bank: int | None, index: Tensor, hidden: Tensor | None) -> Tensor:
        source = hidden if bank is None else self._banks[bank]
        assert source is not None
        return source.index_select(0, index)

    def _known(self, chosen: NDArray[np.int64]) -> Tensor:
        """An index on the device, where steps before often had the same one."""
        key = chosen.tobytes()
        there = self._indices.pop(key, None)
        if there is None:
            there = self._on_device(chosen)
            if len(self._indices) >= _INDICES:
                del self._indices[next(iter(self._indices))]
        self._indices[key] = there  # the last used stands last
        return there

    def _file(self, filed: Sequence[Step], rows: Sequence[Tensor], event: Any) -> None:
        if filed:
            data = (one.view(torch.uint8).view(-1).numpy().data for one in rows)
            self._writer.put([one.rows(words) for one, words in zip(filed, data, strict=True)], event)

    def read(self, segments: Iterable[Segment], hidden: Tensor | None) -> Brought | None:
        """``take`` and ``bring`` of one step."""
        return self.bring(self.take(segments), hidden)

    def where(self, ops: tuple[str, ...], after: bool) -> tuple[int | None, NDArray[np.int64]]:
        """The bank that sites are captured in, and the first row of each."""
        found = self._banked.get((ops, after))
        if found is None:
            planes = [self._planes[op, after] for op in ops]
            bank = planes[0][0] if planes else None
            found = bank, np.array([plane * self.max_tokens for _, plane in planes] or [0])
            if len(self._banked) >= _COMBINATIONS:
                self._banked.clear()
            self._banked[ops, after] = found
        return found

    def _on_device(self, index: NDArray[np.int64]) -> Tensor:
        found = torch.from_numpy(index)
        return found if self._side is None else found.pin_memory().to(self.device, non_blocking=True)


class _Block:
    """Parts that one computation serves, and that are read at the same sites."""

    def __init__(self, planes: NDArray[np.int64], each: int) -> None:
        self.parts: list[Part] = []
        self._planes, self._each, self._rows = planes, each, 0
        self._ranges: list[Span] = []  # of tokens of the step

    def add(self, name: str, number: int, reading: Reading, spans: list[Span], ahead: int) -> None:
        """Add a part; at each position it reads the step's token so many ahead."""
        first = self._rows
        for lo, hi in spans:
            self._rows += self._each * (hi - lo)
            self._ranges.append((lo + ahead, hi + ahead))
        self.parts.append(Part(name, number, reading, spans, first, self._rows))

    def index(self) -> NDArray[np.int64]:
        """The rows of the bank, those of a position side by side."""
        singles = len(self._ranges) == self._rows // self._each
        tokens = (
            np.array([lo for lo, _ in self._ranges])
            if singles
            else np.concatenate([np.arange(lo, hi) for lo, hi in self._ranges])
        )
        found: NDArray[np.int64] = (tokens[:, None] + self._planes).ravel()
        return found


class _Blocks:
    """The blocks of a step, by bank, by what is computed, and by sites."""

    def __init__(self, where: Any) -> None:
        self._where = where
        self._found: dict[int | None, dict[tuple[Any, ...], dict[tuple[Any, ...], _Block]]] = {}
        self._known: dict[int, _Block] = {}  # of single positions, by id of their readout

    def of(self, reading: Reading, *, alone: bool) -> _Block:
        """The block for rows of a readout; ``alone``: of one position."""
        if alone and (block := self._known.get(id(reading))) is not None:
            return block
        bank, planes = self._where(reading.ops, reading.after)
        how: _How = "rows" if reading.reduce == "none" else "alone" if alone else "reduced"
        works = self._found.setdefault(bank, {})
        key: tuple[Any, ...] = (how, *_computed(reading))
        key = (*key, len(works)) if how == "reduced" else key  # each by itself
        sites = len(reading.ops) if reading.kind == "probe" else 1  # whose rows become one
        blocks = works.setdefault(key, {})
        block = blocks.get((reading.ops, reading.after))
        if block is None:
            block = blocks[reading.ops, reading.after] = _Block(planes, len(planes) // sites)
        if alone:
            self._known[id(reading)] = block
        return block

    def gathers(self) -> Iterator[tuple[int | None, NDArray[np.int64], list[Work]]]:
        """For each bank the rows that are gathered, and what is made of them."""
        for bank, by_work in self._found.items():
            pieces: list[NDArray[np.int64]] = []
            works, at = [], 0
            for (how, *_), blocks in by_work.items():
                begin, base, members = at, 0, []
                for block in blocks.values():
                    pieces.append(block.index())
                    at += len(pieces[-1])
                    members.append((base, block.parts))
                    base += block.parts[-1].end
                works.append(Work(members, begin, at, how))
            yield bank, np.concatenate(pieces), works


def _computed(reading: Reading) -> tuple[Any, ...]:
    """Equal for readouts that one computation serves."""
    if reading.kind == "features":
        return 2, id(reading.source), reading.top_k, reading.named
    return (1, id(reading.source)) if reading.kind == "probe" else (0,)


def _made(gathered: Sequence[tuple[Tensor, Sequence[Work]]], ahead: int) -> Iterator[Made]:
    """What is made of the gathered rows [n, d], in host memory or on its way there."""
    for x, works in gathered:
        for blocks, begin, end, how in works:
            reading = blocks[0][1][0].reading
            there = tuple(one.to("cpu", non_blocking=True) for one in _arrays(x[begin:end], reading, how))
            for base, parts in blocks:
                yield Made(parts, there, base, ahead)


def _arrays(rows: Tensor, reading: Reading, how: _How) -> tuple[Tensor, ...]:
    if how == "alone":
        return (rows.float(),)  # a single position is its own sum, maximum and last row
    if how == "reduced":
        reduction = "mean" if reading.reduce == "message" else reading.reduce
        assert reduction != "none"
        return (reduce_rows(rows.reshape(len(rows) // max(1, len(reading.ops)), -1), reduction)[None],)
    if reading.source is None:
        return (rows,)
    if reading.source.encoder is not None:
        named = torch.tensor(reading.named, dtype=torch.int64).to(rows.device, non_blocking=True)
        return read_features(rows, reading.source.encoder, reading.top_k, named)
    assert reading.source.probes is not None
    return (read_probes(rows.view(-1, len(reading.ops), rows.shape[1]), reading.source.probes),)
