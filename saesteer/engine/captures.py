"""What is read of captured tensors once a step has run: its tokens, the computation, and the way to the host.

Knows rows and tensors, and neither vLLM nor an answer's form; lanes.py says which rows a step has. The op copies the
tokens of rows that read, or all of a step in which nobody edits (kernels/layout.py, before and after). Here one gather
for each width takes those that somebody asks for, and what is made of them runs beside the next step, on a stream of
its own. Rows for files go by way of staging.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.brought import Brought, Made
from saesteer.engine.lanes import Lanes
from saesteer.engine.readouts import Segment, Source
from saesteer.engine.reserved import Reserved
from saesteer.engine.shares import ROWS, File, Read
from saesteer.engine.sinks import Sink
from saesteer.engine.staging import Filed, Staging
from saesteer.kernels import layout
from saesteer.kernels.read.features import read_features
from saesteer.kernels.read.rows import Probes, read_probes, reduce_rows
from saesteer.planning.reductions import REDUCTIONS

_COMBINATIONS = 1024  # of sites that requests read together, kept
_INDICES = 128  # of rows and names, kept, and bytes of the largest; those of a step in which all decode come again
_LARGEST = 1 << 20
_JOINED = 16  # sets of probes that are read together, kept


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
        self._banks = {width: Reserved(count * max_tokens, width, dtype, device) for width, count in places.items()}
        for width, number in self._planes.values():
            self._banks[width].take(number * max_tokens, 1)  # what launches a kernel looks its pointers up
        self._banked: dict[tuple[tuple[str, ...], bool], tuple[int | None, NDArray[np.int64]]] = {}
        self._indices: dict[bytes, Tensor] = {}  # of rows, on the device, by their bytes
        self._joined: dict[tuple[Source, ...], Probes] = {}  # the last used stands last
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of each step in turn
        self._staging = Staging(device, self._side)

    def of(self, site: str) -> dict[str, Tensor]:
        """The fields of a site's Bound; none where nothing is captured."""
        if (site, False) not in self._planes:
            return {}
        return {name: self._plane(site, after) for name, after in (("before", False), ("after", True))}

    def _plane(self, site: str, after: bool) -> Tensor:
        width, number = self._planes[site, after]
        return self._banks[width].tensor[number * self.max_tokens :][: self.max_tokens]

    def take(self, captured: Mapping[str, int]) -> None:
        """Take the memory of what a request reads, before the first step that captures it.

        Args:
            captured: layout.BEFORE, AFTER or both for each site; those of another stage of a pipeline are left out.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        for site, bits in captured.items():
            for bit, after in ((layout.BEFORE, False), (layout.AFTER, True)):
                if bits & bit and (site, after) in self._planes:
                    width, number = self._planes[site, after]
                    self._banks[width].take(number * self.max_tokens, self.max_tokens)

    @property
    def taken(self) -> int:
        """Bytes on the device that reads have taken."""
        return sum(one.bytes for one in self._banks.values())

    @property
    def most(self) -> int:
        """The same, once requests have read before and after the edits of every site."""
        return sum(one.tensor.nbytes for one in self._banks.values())

    def warm(self) -> None:
        """Make the memory in which rows for files come home."""
        if self._banks:
            self._staging.warm()

    def bring(
        self,
        reads: Sequence[Read],
        hidden: Tensor | None,
        files: Sequence[File] = (),
        sinks: Mapping[str, Mapping[int, Sink]] = MappingProxyType({}),
    ) -> Brought | None:
        """What requests read of a step that has been launched; None if that is nothing.

        It waits for nothing. The gather is ordered with the device's work, all behind it runs beside the next step.

        Args:
            reads: of the step.
            hidden: [tokens, d], what lm_head multiplies.
            files: what goes into files.
            sinks: of the requests that have some.
        """
        if not reads and not sinks:
            return None
        for one in files:
            self._staging.add(one.filing, self._source(one.bank, hidden), self._known(one.chosen))
        if self._staging.at_once:
            self._staging.bring_home(self._staging.ticket)
        made, event = self._make(reads, hidden) if reads else ([], None)
        return Brought(made, event, Filed(sinks, self._staging) if sinks else None)

    def _make(self, reads: Sequence[Read], hidden: Tensor | None) -> tuple[list[Made], Any]:
        """What is made of gathered rows, and the event behind it.

        Of few rows it is made beside the next step. Many, such as those of long prompts, are gathered and used up one
        Read behind the other, in line with the steps, so that they need no more memory than one.
        """
        if self._side is None:
            return [self._made(one, *self._gather([one], hidden)) for one in reads], None
        if sum(len(one.chosen) for one in reads) > 2 * ROWS:
            made = [self._made(one, *self._gather([one], hidden)) for one in reads]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            return made, event
        gathered = self._gather(reads, hidden)
        for one in reads:  # their way to the device is on the stream that the event stands in
            self._indices_of(one)
        self._ready.record(torch.cuda.current_stream(self.device))
        self._side.wait_event(self._ready)
        with torch.cuda.stream(self._side):
            made = [self._made(one, rows) for one, rows in zip(reads, gathered, strict=True)]
            for rows in gathered:
                rows.record_stream(self._side)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return made, event

    def _indices_of(self, read: Read) -> tuple[Tensor | None, Tensor | None]:
        """On the device, the features that are named and what is picked of their numbers."""
        names = None if read.names is None or read.names.sources else self._known(read.names.features)
        picks = None if read.picks is None else self._known(read.picks)
        for index in (names, picks):
            if index is not None and self._side is not None:
                index.record_stream(self._side)
        return names, picks

    def _made(self, read: Read, rows: Tensor) -> Made:
        """What is made of gathered rows [n, d], in host memory or on its way there."""
        there = tuple(one.to("cpu", non_blocking=True) for one in self._arrays(rows, read))
        return Made(read.parts, read.spans, read.rows, there, read.widths, read.order)

    def _arrays(self, rows: Tensor, read: Read) -> tuple[Tensor, ...]:
        reading = read.parts[0].reading
        if reading.reduce != "none":
            if not read.reduced:
                return (rows.float(),)  # a single position is its own sum, maximum and last row
            how = REDUCTIONS[reading.reduce].device
            return (reduce_rows(rows.reshape(len(rows) // max(1, len(reading.ops)), -1), how)[None],)
        if reading.source is None:
            return (rows,)
        if read.names is None:  # probes of several sites
            assert reading.source.probes is not None
            return (read_probes(rows.view(-1, len(reading.ops), rows.shape[1]), reading.source.probes),)
        features, picks = self._indices_of(read)
        if features is None:
            found: tuple[Tensor, ...] = (read_probes(rows[:, None], self._probes(read.names.sources)),)
        else:
            assert reading.source.encoder is not None
            found = read_features(rows, reading.source.encoder, read.names.top_k, features)
        *listed, numbers = found
        numbers = numbers.reshape(-1)
        return *listed, numbers if picks is None else numbers.index_select(0, picks)

    def _probes(self, sources: tuple[Source, ...]) -> Probes:
        """Probes of one site that are read together."""
        found = self._joined.pop(sources, None)
        if found is None:
            found = Probes.joined([one.probes for one in sources if one.probes is not None])
            if len(self._joined) >= _JOINED:
                del self._joined[next(iter(self._joined))]
        self._joined[sources] = found
        return found

    def _source(self, bank: int | None, hidden: Tensor | None) -> Tensor:
        source = hidden if bank is None else self._banks[bank].tensor
        assert source is not None
        return source

    def _gather(self, reads: Sequence[Read], hidden: Tensor | None) -> list[Tensor]:
        """The rows of each, [n, d]; those of one bank are gathered together."""
        found: dict[int, Tensor] = {}  # by number of what is gathered
        for bank in dict.fromkeys(one.bank for one in reads):
            here = [(number, one.chosen) for number, one in enumerate(reads) if one.bank == bank]
            source = self._source(bank, hidden)
            if len(here) == 1:
                [(number, chosen)] = here
                found[number] = source.index_select(0, self._known(chosen))
                continue
            x = source.index_select(0, self._known(np.concatenate([chosen for _, chosen in here])))
            sizes = [len(chosen) for _, chosen in here]
            found |= zip((number for number, _ in here), torch.split(x, sizes), strict=True)
        return [found[number] for number in range(len(reads))]

    def _known(self, index: NDArray[np.int64]) -> Tensor:
        """An index on the device, where steps before often had the same one."""
        key = index.tobytes()
        there = self._indices.pop(key, None)
        if there is None:
            there = self._on_device(index)
            if len(key) > _LARGEST:
                return there
            if len(self._indices) >= _INDICES:
                del self._indices[next(iter(self._indices))]
        self._indices[key] = there  # the last used stands last
        return there

    def read(self, segments: Sequence[Segment], hidden: Tensor | None) -> Brought | None:
        """What ``bring`` returns, of a step without others around it, as Transformers has them.

        Args:
            segments: of the requests that read.
            hidden: as for ``bring``.
        """
        lanes = Lanes()
        for one in segments:
            lanes.add(one.name, one.readings, {}, self.where)
        lanes.look([one.name for one in segments], {})
        about = [[one.first, one.first + one.tokens, one.position] for one in segments]
        numbers = np.array(about, dtype=np.int64).reshape(-1, 3)
        reads, _ = lanes.step(*numbers.T)
        return self.bring(reads, hidden)

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
