"""What requests read, on its way from the scheduler into answers. Knows positions and bytes, and no tensor.

    worker     the snapshot of each step carries what was read of it (engine/readouts.py)
    scheduler  a request's next output carries what was read for it since its last one, in kv_transfer_params
    front end  rows are kept by absolute position, so what is computed twice, behind a preemption, counts once. A
               position is told when its token is known to be an input: those behind the last sampled token are not

What is read travels as blobs: the number of the readout in its request, spans of positions, then bytes of arrays.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.config.config import KEY
from saesteer.engine.readouts import Blob, Brought
from saesteer.planning.plan import Catalog, Readout

READ = f"{KEY}_read"  # next to the counts in kv_transfer_params
_WORDS = {"features": "features", "probe": "probes", "activation": "activations", "hidden": "hidden"}
_WORDS_OF_ANSWERS = frozenset(_WORDS.values())


def send(scheduler: Any, outputs: Mapping[int, Any], brought: Brought | None, stops: frozenset[str]) -> None:
    """Puts what was read of a step into the outputs of its requests, or keeps it for their next ones.

    Args:
        scheduler: the engine's, which keeps what waits.
        outputs: of the step, by client.
        brought: what was read.
        stops: requests of which any output may be the last.
    """
    waiting: dict[str, list[Blob]] = scheduler.__dict__.setdefault("saesteer_read", {})
    if brought is None and not waiting:
        return
    made = {one.request_id: one for batch in outputs.values() for one in batch.outputs}
    if brought is not None:
        ending = stops | {name for name, one in made.items() if one.finish_reason is not None}
        for name, blobs in brought.blobs(ending).items():
            waiting.setdefault(name, []).extend(blobs)
    for name in [*waiting]:
        if name in made:
            blobs = waiting.pop(name)
            made[name].kv_transfer_params = {**(made[name].kv_transfer_params or {}), READ: blobs}
        elif name not in scheduler.requests:  # it has ended, or was aborted
            del waiting[name]


class Reported(NamedTuple):
    """A readout, and how an answer names it."""

    readout: Readout
    about: Mapping[str, Any]  # how every entry of the answer begins
    dtype: str  # of tensors: bfloat16, float16 or float32


def reported(found: Sequence[Readout], catalog: Catalog, dtype: str) -> tuple[Reported, ...]:
    """The readouts of a plan, with the names that requests use.

    Args:
        found: of the plan.
        catalog: the catalog that it was planned with.
        dtype: of the model.
    """
    return tuple(Reported(one, _about(one, catalog), dtype) for one in found)


def _about(one: Readout, catalog: Catalog) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if one.dictionary is not None:
        name, layer = catalog.named(one.dictionary)
        found = {"dictionary": name} | ({} if layer is None else {"layer": layer})
    if one.probe is not None:
        found = {"probe": one.probe.vector}
    if one.site is not None:
        found |= {"site": one.site, "at": "after" if one.after else "before"}
    return found | ({} if one.reduce == "none" else {"reduce": one.reduce})


class Rows:
    """What one choice has read, by readout and position.

    Args:
        readouts: of the request.
        fields: of the answer, into which it is told.
    """

    def __init__(self, readouts: Sequence[Reported], fields: dict[str, Any]) -> None:
        self._fields = fields
        self._readouts = [_KINDS[one.readout.kind](one) for one in readouts]
        for one in self._readouts:
            fields.setdefault(one.word, [])

    def add(self, blobs: Iterable[Blob]) -> None:
        """Keeps what has come."""
        for number, spans, *data in blobs:
            self._readouts[number].add([tuple(span) for span in spans], data)

    def tell(self, prompt: int, generated: int, *, final: bool) -> None:
        """Adds an entry to the answer's fields for each readout that has something new; at the end, for each.

        Args:
            prompt: tokens of the prompt.
            generated: tokens that the answer has so far, of which the last has not been an input.
            final: whether this is the answer's end.
        """
        for one in self._readouts:
            found = one.told(prompt + generated - 1, final=final)
            if found is not None:
                self._fields[one.word].append(found)


class _Kind:
    """One readout of a choice."""

    def __init__(self, reported: Reported) -> None:
        self.readout, about, self.dtype = reported
        self.about = dict(about)
        self.word = _WORDS[self.readout.kind]
        self._rows: dict[int, tuple[bytes, ...]] = {}  # by position, those that nobody was told yet
        self._told = 0  # positions below this one were told
        self._last: tuple[int, bytes] | None = None
        self._parts: list[tuple[list[tuple[int, int]], bytes]] = []  # of a reduction
        self._first = True

    def add(self, spans: list[tuple[int, int]], data: Sequence[bytes]) -> None:
        """Keeps rows, or a part of a reduction in place of those that it computes again."""
        if self.readout.last:
            self._last = spans[-1][0], data[0]
            return
        if self.readout.reduce != "none":
            self._parts = [part for part in self._parts if part[0][0][0] < spans[0][0]]
            self._parts.append((spans, data[0]))
            return
        positions = [at for lo, hi in spans for at in range(lo, hi)]
        sizes = [len(one) // len(positions) for one in data]
        for row, at in enumerate(positions):
            if at >= self._told:
                self._rows[at] = tuple(
                    one[size * row : size * (row + 1)] for one, size in zip(data, sizes, strict=True)
                )

    def told(self, end: int, *, final: bool) -> dict[str, Any] | None:
        """What is new of the positions below ``end``."""
        if self.readout.last or self.readout.reduce != "none":
            return self.about | self.whole(end) if final else None
        positions = sorted(at for at in self._rows if at < end)
        if not positions and not (final and self._first):
            return None
        rows = [self._rows.pop(at) for at in positions]
        self._told, self._first = max([self._told, *(at + 1 for at in positions[-1:])]), False
        return self.about | self.rows(positions, rows)

    def whole(self, end: int) -> dict[str, Any]:
        """The reduction, or the last row."""
        if self.readout.last:
            at, data = self._last or (-1, b"")
            return _tensor([at] if data else [], data, self.dtype, [1] if data else [0])
        parts = [part for part in self._parts if part[0][0][0] < end]
        positions = sum(hi - lo for spans, _ in parts for lo, hi in spans)
        if not parts:
            return _tensor([], b"", "float32", [0]) | {"tokens": 0}
        numbers = np.stack([np.frombuffer(data, "<f4") for _, data in parts])
        how = self.readout.reduce
        if how == "mean":
            reduced = (numbers.sum(0, dtype=np.float64) / positions).astype(np.float32)
        else:
            reduced = numbers.max(0) if how == "max" else numbers[-1]
        spans = [span for part, _ in parts for span in part]
        return _tensor([spans[0][0], spans[-1][1]], reduced.tobytes(), "float32", [1]) | {"tokens": positions}

    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
        """The rows as the answer has them: a tensor."""
        return _tensor(positions, b"".join(data for (data,) in rows), self.dtype, [len(positions)])


class _Features(_Kind):
    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
        """For each position its strongest features with their activations, and the named ones."""
        found = []
        for at, (indices, strengths, named) in zip(positions, rows, strict=True):
            row: dict[str, Any] = {"position": at}
            if self.readout.top_k:
                row["top"] = [
                    [feature, strength]
                    for feature, strength in zip(_ints(indices), _floats(strengths), strict=True)
                    if feature >= 0
                ]
            if self.readout.features:
                names = map(str, self.readout.features)
                row["features"] = dict(zip(names, _floats(named), strict=True))
            found.append(row)
        return {"rows": found}


class _Probe(_Kind):
    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
        """The score at each position."""
        return {"positions": positions, "scores": [score for (data,) in rows for score in _floats(data)]}


_KINDS: Mapping[str, type[_Kind]] = {"features": _Features, "probe": _Probe, "activation": _Kind, "hidden": _Kind}


def _tensor(positions: list[int], data: bytes, dtype: str, rows: list[int]) -> dict[str, Any]:
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    width = len(data) // (size * rows[0]) if rows[0] else 0
    text = b64encode(data).decode()
    return {"positions": positions, "dtype": dtype, "shape": [rows[0], width], "data": text}


def _ints(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, "<i4").tolist()
    return found


def _floats(data: bytes) -> list[float]:
    numbers: NDArray[np.float32] = np.frombuffer(data, "<f4")
    return [float(f"{number:.7g}") for number in numbers.tolist()]  # float32 has no more digits


def reads(fields: Mapping[str, Any]) -> bool:
    """Whether an answer's fields have read-outs."""
    return not _WORDS_OF_ANSWERS.isdisjoint(fields)


def new_entries(fields: Mapping[str, Any], sent: dict[str, int]) -> dict[str, list[Any]]:
    """The entries of each read-out that a stream has not had yet.

    Args:
        fields: of the answer so far.
        sent: how many entries the stream has had; changed in place.
    """
    found = {}
    for word in _WORDS_OF_ANSWERS & fields.keys():
        found[word] = fields[word][sent.get(word, 0) :]
        sent[word] = len(fields[word])
    return found
