"""What is read of captured tensors once a step has run: its tokens, the computation, and the way to the host.

Knows rows, tensors and positions, and neither vLLM nor an answer's form. The op copies the tokens of rows that read
(kernels/layout.py, before and after); here one gather for each width takes those that somebody asks for, and what is
made of them runs beside the next step, on a stream of its own.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.spool import Sink, Spooling, Writer
from saesteer.kernels.read.features import Encoder, read_features
from saesteer.kernels.read.rows import Probes, Reduction, read_probes, reduce_rows

if TYPE_CHECKING:
    from saesteer.engine.table import Arrow, Placement
    from saesteer.engine.weights import Site

_COMBINATIONS = 1024  # of sites that requests read together, kept

Span = tuple[int, int]  # absolute positions [lo, hi)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A dictionary, or probes: what turns rows of a tensor into numbers."""

    encoder: Encoder | None = None
    ids: NDArray[np.int32] | None = None  # of the encoder's rows, where a file holds only some features
    probes: Probes | None = None

    def __reduce__(self) -> tuple[type["Source"], tuple[None, NDArray[np.int32] | None]]:
        """Another process, which gets what was read, needs no weights."""
        return Source, (None, self.ids)


def source_of(place: "Placement", site: "Site") -> Source:
    """A dictionary that lies in a site's weights."""
    info, rows = place.info, slice(place.base, place.base + place.info.features)
    ranked = info.k or 0
    encoder = Encoder(
        site.w_enc[rows],
        site.b_enc[rows],
        site.threshold[rows],
        norm=place.norm,
        groups=ranked if info.activation == "groupmax" else int(ranked > 0),
        k=1 if info.activation == "groupmax" else ranked,
        magnitude=info.activation == "abstopk",
    )
    return Source(encoder, None if info.feature_ids is None else np.array(info.feature_ids, dtype=np.int32))


def probes_of(
    arrows: Sequence["Arrow"], bias: Sequence[float], at: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Source:
    """Probes that are read together; ``at`` has the number of each one's site."""
    directions = np.stack([one.unit * np.float32(one.length) for one in arrows])
    return Source(probes=Probes.of(torch.from_numpy(directions), bias, at, device, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One readout of a row."""

    kind: Literal["features", "probe", "activation", "hidden"]
    # The sites that capture it; several only of activations and probes; none: what lm_head multiplies.
    ops: tuple[str, ...]
    after: bool
    windows: Sequence[Span]  # disjoint, ascending
    last: bool  # only the row that sampled the answer's last token
    reduce: Reduction | Literal["none", "message"]
    source: Source | None
    top_k: int
    named: tuple[int, ...]  # rows of the encoder
    starts: Sequence[int] = ()  # of chat messages, each with a mean of its own; ascending, from 0
    watched: int | None = None  # number among what the request's rules watch; no answer has it

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
        if self.reduce != "message":
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
    sinks: Mapping[int, Sink] | None = None  # files of readouts, by number; None: it has none


class Part(NamedTuple):
    """What one readout of one request gets from a step."""

    name: str
    number: int  # of the readout in its request
    reading: Reading
    spans: list[Span]
    at: int  # its first row among the rows gathered
    rows: int  # of a position those of all sites, side by side
    sink: Sink | None = None  # where its rows go

    @property
    def positions(self) -> int:
        """How many positions it has."""
        return self.rows // max(1, len(self.reading.ops))


Blob = list[Any]  # number of the readout, spans, then the bytes of its arrays, unless they are in a file


@dataclass(slots=True)
class Brought:
    """What the requests of one step read, on its way to the host or there."""

    parts: list["Made"]
    event: Any = None  # of the device, behind the copies
    spooling: Spooling | None = None  # what goes into files

    def __reduce__(self) -> tuple[type["Brought"], tuple[list["Made"]]]:
        """An event cannot leave its process, so the copies are waited for, and so are threads that write."""
        self._settle()
        return Brought, (self.parts,)

    def _settle(self, ending: Collection[str] | None = None) -> None:
        """Wait for the copies, and for what is written for these requests; None: for all."""
        if self.event is not None and any(one.arrays for one in self.parts):
            self.event.synchronize()
        if self.spooling is not None:
            self.spooling.settle(ending)

    def watched(self) -> dict[str, dict[int, tuple[list[int], list[float]]]]:
        """What rules watch: by request and number of the measure, positions and the value at each."""
        parts = [
            (part, arrays[-1][first:end]) for part, arrays, first, end in self.parts if part.reading.watched is not None
        ]
        if parts and self.event is not None:
            self.event.synchronize()
        found: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
        for part, values in parts:  # [rows, 1]
            positions = [at for lo, hi in part.spans for at in range(lo, hi)]
            number = part.reading.watched
            assert number is not None
            own = found.setdefault(part.name, {}).setdefault(number, ([], []))
            own[0].extend(positions)
            own[1].extend(values[:, 0].tolist())
        return found

    def blobs(self, ending: Iterable[str], ends: Mapping[str, int] | None = None) -> dict[str, list[Blob]]:
        """By request, as sent between processes.

        Args:
            ending: requests that may end now; only they get rows for an answer's end.
            ends: by request, the first position that is dropped.
        """
        ending = frozenset(ending)
        self._settle(ending)
        found: dict[str, list[Blob]] = {}
        numbers: dict[int, list[NDArray[np.uint8]]] = {}  # of arrays by their id, as bytes
        for part, arrays, first, last in self.parts:
            if part.reading.watched is not None or (part.reading.last and part.name not in ending):
                continue
            if ends and part.name in ends and part.spans[0][0] >= ends[part.name]:
                continue
            own = numbers.get(id(arrays))
            if own is None:
                own = numbers[id(arrays)] = _bytes_of(arrays, part.reading)
            data = [array[first:last].tobytes() for array in own]
            found.setdefault(part.name, []).append([part.number, part.spans, *data])
        return found


class Made(NamedTuple):
    """What was made of the rows of a readout of a request: rows of arrays in host memory, which others share.

    Without arrays, they are in a file.
    """

    part: Part
    arrays: tuple[Tensor, ...]
    first: int
    end: int


def _bytes_of(arrays: tuple[Tensor, ...], reading: Reading) -> list[NDArray[np.uint8]]:
    """Arrays as they are sent, [rows, bytes]; features by their index in the dictionary."""
    if reading.kind == "features" and reading.source is not None and reading.source.ids is not None:
        rows, *others = arrays
        arrays = torch.from_numpy(np.append(reading.source.ids, np.int32(-1))[rows.numpy()]), *others
    return [array.contiguous().view(torch.uint8).numpy() for array in arrays]


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
        self._writer = Writer()
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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

    def read(self, segments: Iterable[Segment], hidden: Tensor | None) -> Brought | None:
        """What the requests read of a step that has been launched; None if they read nothing of it.

        It waits for nothing. The gather is ordered with the device's work, all behind it runs beside the next step.

        Args:
            segments: of the requests that read.
            hidden: [tokens, d], what lm_head multiplies.
        """
        wanted: dict[int | None, list[tuple[Part, NDArray[np.int64]]]] = {}
        lanes: dict[str, set[int]] = {}  # of requests that have files, the threads that write them
        for segment in segments:
            if segment.sinks is not None:
                lanes[segment.name] = {sink.lane for sink in segment.sinks.values()}
            for number, reading in enumerate(segment.readings):
                if reading is None:
                    continue
                bank, planes = self._where(reading.ops, reading.after)
                ahead = segment.first - segment.position
                for spans in reading.parts(segment.position, segment.tokens):
                    if len(spans) == 1 and spans[0][1] - spans[0][0] == 1:  # one that decodes
                        rows = planes + (spans[0][0] + ahead)
                    else:
                        at = np.concatenate([np.arange(lo, hi) for lo, hi in spans])
                        rows = (at[:, None] + (planes + ahead)).ravel()
                    part = Part(segment.name, number, reading, spans, 0, len(rows), (segment.sinks or {}).get(number))
                    wanted.setdefault(bank, []).append((part, rows))
        if not wanted and not lanes:
            return None
        gathered = [self._gather(bank, found, hidden) for bank, found in wanted.items()]
        if self._side is None:
            made = self._writer.spool((one for x, parts in gathered for one in _made(x, parts)), None)
            return Brought(made, None, Spooling(lanes, self._writer) if lanes else None)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            made = self._writer.spool([one for x, parts in gathered for one in _made(x, parts)], self._side)
            for x, _ in gathered:
                x.record_stream(self._side)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return Brought(made, event, Spooling(lanes, self._writer) if lanes else None)

    def _where(self, ops: tuple[str, ...], after: bool) -> tuple[int | None, NDArray[np.int64]]:
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

    def _gather(
        self, bank: int | None, found: list[tuple[Part, NDArray[np.int64]]], hidden: Tensor | None
    ) -> tuple[Tensor, list[Part]]:
        """The rows that somebody asks for, those of like work side by side."""
        found.sort(key=lambda one: _work(one[0].reading))
        parts, at = [], 0
        for part, _ in found:
            parts.append(part._replace(at=at))
            at += part.rows
        index = torch.from_numpy(np.concatenate([rows for _, rows in found]))
        if self._side is not None:
            index = index.pin_memory().to(self.device, non_blocking=True)
        source = hidden if bank is None else self._banks[bank]
        assert source is not None
        return source.index_select(0, index), parts


def _work(reading: Reading) -> tuple[Any, ...]:
    """Equal for readouts that one computation serves; what needs none comes first."""
    if reading.kind == "features":
        return 2, id(reading.source), reading.top_k, reading.named
    if reading.kind == "probe":
        return 1, id(reading.source), 0, ()
    return 0, 0, 0, ()


def _made(x: Tensor, parts: Sequence[Part]) -> Iterator[Made]:
    """What each readout gets of the gathered rows [n, d], in host memory or on its way there."""
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        each = "rows" if part.reading.reduce == "none" else "one" if part.positions == 1 else part.at
        alike.setdefault((*_work(part.reading), each), []).append(part)
    for (*_, each), several in alike.items():
        first, reading, sites = several[0], several[0].reading, 1
        end = several[-1].at + several[-1].rows
        rows = x[first.at : end]
        if each == "one":
            arrays: tuple[Tensor, ...] = (rows.float(),)  # a single position is its own sum, maximum and last row
        elif each != "rows":
            how = "mean" if reading.reduce == "message" else reading.reduce
            assert how != "none"
            arrays = (reduce_rows(rows.reshape(first.positions, -1), how)[None],)
        elif reading.source is None:
            arrays = (rows,)
        elif reading.source.encoder is not None:
            named = torch.tensor(reading.named, dtype=torch.int64).to(x.device, non_blocking=True)
            arrays = read_features(rows, reading.source.encoder, reading.top_k, named)
        else:
            assert reading.source.probes is not None
            sites = len(reading.ops)  # whose rows become one
            arrays = (read_probes(rows.view(-1, sites, rows.shape[1]), reading.source.probes),)
        there = tuple(one.to("cpu", non_blocking=True) for one in arrays)
        for part in several:
            if each in ("rows", "one"):
                start = part.at - first.at
                yield Made(part, there, start // sites, (start + part.rows) // sites)
            else:
                yield Made(part, there, 0, 1)
