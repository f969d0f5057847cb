"""What requests have read of one step, on its way from the device to the scheduler. Knows rows and positions.

Knows neither how rows were computed (captures.py) nor what an answer makes of them (planning/answers.py).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.engine.filer import Span
from saesteer.engine.readouts import Reading
from saesteer.engine.staging import Filed
from saesteer.engine.writer import Owed

logger = logging.getLogger("vllm.saesteer")

Blob = list[Any]  # number of the readout, spans, then the bytes of its arrays, unless they are in a file
_Rows = slice | NDArray[np.int64]
Told = list[Any]  # number of the readout, spans
Sent = tuple[Callable[..., Any], tuple[Any, ...]]  # as __reduce__ returns it


class Part(NamedTuple):
    """A readout of a request."""

    name: str
    number: int  # of the readout in its request
    reading: Reading


class Made(NamedTuple):
    """What was made of rows together, in host memory, one part behind the other."""

    parts: Sequence[Part]
    spans: Sequence[list[Span]]  # positions of each part
    rows: Sequence[int]  # for each part
    # Of features the strongest ones and their activations, [n, top_k]; the last has the numbers of names.
    arrays: tuple[Tensor, ...]
    # Where the last array is flat: how many names each part has, and for each row of the parts that of the others.
    widths: Sequence[int] | None = None
    order: NDArray[np.int64] | None = None

    def each(self) -> Iterator[tuple[Part, list[Span], _Rows, slice]]:
        """The parts, their positions, their rows of the arrays, and what they have of the last one."""
        at = value = 0
        for number, (part, spans, rows) in enumerate(zip(self.parts, self.spans, self.rows, strict=True)):
            own = last = slice(at, at + rows)
            if self.widths is not None:
                last = slice(value, value + rows * self.widths[number])
                value = last.stop
            yield part, spans, own if self.order is None else self.order[own], last
            at += rows


@dataclass(slots=True)
class Brought:
    """What the requests of one step read, on its way to the host or there."""

    made: list[Made]
    event: Any = None  # of the device, behind the copies of arrays
    files: Filed | Mapping[str, Sequence[Told]] | None = None  # where requests have some; or what is told of them

    def __reduce__(self) -> Sent:
        """An event cannot leave its process, so the copies are waited for, and so are threads that write."""
        return sendable(self._settled)

    def _settled(self) -> Sent:
        self._land()
        return Brought, (self.made, None, self.files.settle() if isinstance(self.files, Filed) else self.files)

    def joined(self, other: "Brought") -> "Brought":
        """With what another stage of a pipeline has read of the step; both have come from their processes."""
        found: dict[str, list[Told]] = {}
        for files in (self.files, other.files):
            assert not isinstance(files, Filed), "it has come from its process"
            for name, more in (files or {}).items():
                found.setdefault(name, []).extend(more)
        return Brought([*self.made, *other.made], None, found)

    def _land(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def watched(self) -> dict[str, dict[int, tuple[list[int], list[float]]]]:
        """What rules watch: by request and number of the measure, positions and the value at each."""
        made = [one for one in self.made if any(part.reading.watched is not None for part in one.parts)]
        if made:
            self._land()
        found: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
        for one in made:
            numbers = one.arrays[-1].numpy()  # whose slices cost a fraction of a tensor's
            for (name, _, reading), spans, _, last in one.each():
                if reading.watched is None:
                    continue
                positions = [at for lo, hi in spans for at in range(lo, hi)]
                own = numbers[last].reshape(-1, len(reading.watched)).T.tolist()
                values = found.setdefault(name, {})
                for measure, strengths in zip(reading.watched, own, strict=True):
                    at, there = values.setdefault(measure, ([], []))
                    at += positions
                    there += strengths
        return found

    def told(self) -> Mapping[str, Sequence[Told]]:
        """By request, the positions of rows that another process has written into files."""
        return {} if self.files is None or isinstance(self.files, Filed) else self.files

    def owed(self, ending: Collection[str]) -> dict[str, Owed]:
        """What the files of these requests still lack, where this process writes them; it waits for nothing."""
        return self.files.ask(ending) if isinstance(self.files, Filed) else {}

    def blobs(self, ending: Iterable[str], ends: Mapping[str, int] | None = None) -> dict[str, list[Blob]]:
        """Rows that are in no file, by request, as sent between processes.

        Args:
            ending: requests that may end now; only they get rows for an answer's end.
            ends: by request, the first position that is dropped.
        """
        ending = frozenset(ending)
        self._land()
        found: dict[str, list[Blob]] = {}
        known: dict[int, list[NDArray[np.uint8]]] = {}  # of arrays by their id, as bytes
        for one in self.made:
            own = known.get(id(one.arrays))
            if own is None:
                own = known[id(one.arrays)] = _bytes_of(one.arrays, one.parts[0].reading)
            flat: Any = own[-1].reshape(-1)
            numbers, size = memoryview(flat), own[-1].shape[1]  # whose slices cost less than an array's
            for (name, number, reading), spans, rows, last in one.each():
                if reading.watched is not None or (reading.last and name not in ending):
                    continue
                if ends and name in ends and spans[0][0] >= ends[name]:
                    continue
                k = 4 * reading.top_k
                blob = [number, spans, *[array[rows, :k].tobytes() if k else b"" for array in own[:-1]]]
                blob.append(bytes(numbers[last.start * size : last.stop * size]))
                if name in found:
                    found[name].append(blob)
                else:
                    found[name] = [blob]
        return found


def sendable(make: Callable[[], Sent]) -> Sent:
    """What an object is sent as; where that cannot be made, whoever receives it gets an error.

    An exception while vLLM sends would end its thread, and the engine would wait for minutes for what never comes.
    """
    try:
        return make()
    except Exception as exc:
        logger.exception("what a step has counted or read cannot be sent")
        return _fail, (f"{type(exc).__name__}: {exc}",)


def _fail(words: str) -> None:
    raise RuntimeError(f"what a step has counted or read did not come: {words}")


def _bytes_of(arrays: tuple[Tensor, ...], reading: Reading) -> list[NDArray[np.uint8]]:
    """Arrays as they are sent, [rows, bytes] or, where the last is flat, [numbers, bytes]; features by their index in
    the dictionary."""
    if reading.kind == "features" and reading.source is not None and reading.source.ids is not None:
        rows, *others = arrays
        # torch's own indexing: of no columns, which is what names alone take, numpy makes an array that has no bytes.
        arrays = torch.from_numpy(np.append(reading.source.ids, np.int32(-1)))[rows.long()], *others
    return [(array if array.dim() > 1 else array[:, None]).contiguous().view(torch.uint8).numpy() for array in arrays]
