"""What a request has read, as its answer has it: the same on a server and on Transformers. Knows bytes, and no tensor.

Rows are kept by absolute position, so what is computed twice, behind a preemption, counts once. A position is taken
when its token is known to be an input: those behind the last sampled token are not. It is taken once, for the answer
and for consumers. Behind a second preemption, one may be computed that the cache had behind the first: consumers get it
after later ones, and a stream that has said that it is left out does not.

What is read comes as blobs: the number of the readout in its request, spans of positions, then bytes of arrays.
"""

import math
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.vectors import Function, numbers_of
from saesteer.language.fields import Fields, Json
from saesteer.language.sites import parse
from saesteer.planning.figures import SIZES, apart, floats, score, tensor
from saesteer.planning.plan import END, Catalog, Readout
from saesteer.planning.reductions import Piece, Pieces, is_by_message
from saesteer.planning.together import together
from saesteer.planning.windows import inside, of_part, rank

# Kind of a readout → where answers have it.
WORDS = {"features": "features", "probe": "probes", "activation": "activations", "hidden": "hidden"}

Taken = tuple[list[int], list[tuple[bytes, ...]]]  # positions, ascending, and the row of each, by array


class Spool(Protocol):
    """A file for rows of several sites, side by side: row n is for position n of those in the readout's windows."""

    width: int  # bytes of one site

    def write(self, places: Iterable[tuple[int, int]], data: bytes) -> None:
        """Writes rows: for each run its first row and their number, then all data."""

    def keep(self, content: Fields, places: Sequence[int]) -> Sequence[str]:
        """The handle of each site's result, which has this content and these rows.

        Raises:
            OSError: rows could not be written.
        """


class Reported(NamedTuple):
    """A readout, and how an answer names it."""

    readout: Readout
    abouts: tuple[Fields, ...]  # how entries of the answer begin: its own, and those that travel with it
    dtype: str  # of tensors: bfloat16, float16 or float32
    function: Function = "linear"  # of a probe
    whole: Fields | None = None  # in place of them, where the answer has one tensor of them all

    @property
    def entries(self) -> tuple[Fields, ...]:
        """How the entries of the answer begin."""
        return self.abouts if self.whole is None else (self.whole,)


def reported(found: Sequence[Readout], catalog: Catalog, dtype: str) -> tuple[Reported, ...]:
    """The readouts of a plan, with the names that requests use.

    Args:
        found: of the plan.
        catalog: the catalog that it was planned with.
        dtype: of the model.
    """
    made = []
    for several in together(found, catalog):
        one, abouts, whole = several[0], tuple(_about(own, catalog) for own in several), None
        if one.whole:
            layers = [layer for own in abouts for layer in own["layers"]]
            whole = {**abouts[0], "site": [own["site"] for own in abouts], "layers": layers}
        function = catalog.function_of(one.probe and one.probe.vector)
        made.append(Reported(one, abouts, dtype, function, whole))
    return tuple(made)


def _about(one: Readout, catalog: Catalog) -> Json:
    found: Json = {}
    if one.dictionary is not None:
        name, layer = catalog.named(one.dictionary)
        found = {"dictionary": name} | ({} if layer is None else {"layer": layer})
    if one.probe is not None:
        found = {"probe": one.probe.vector}
    if one.site is not None:
        found |= {"site": one.site, "at": "after" if one.after else "before"}
        if one.kind == "activation":  # a tensor, which has its layers as a vector in a request does
            found |= {"layers": [parse(one.site)[1]]}
    return found | ({} if one.reduce == "none" else {"reduce": one.reduce})


class Rows:
    """What one choice has read, by readout and position: for its answer, and for consumers (consumers/feed.py).

    Args:
        readouts: of the plan, of which the answer has those that the request asks for.
        fields: of the answer, into which it is told.
        spools: for each readout that the answer names by handles, in order, the file for its rows.
        fed: whether consumers get rows.
    """

    def __init__(
        self,
        readouts: Sequence[Reported],
        fields: Json,
        spools: Iterable[Spool] = (),
        *,
        fed: bool = False,
    ) -> None:
        self.reported, self._fields = readouts, fields
        self._readouts = [(_Spooled if spooled(one) else _KINDS[one.readout.kind])(one, fed=fed) for one in readouts]
        self._told = [one for one in self._readouts if one.readout.shown]
        files = iter(spools)
        for one in self._told:
            if not one.readout.inline:
                one.spool = next(files, None)
            fields.setdefault(one.word, [])

    def add(self, blobs: Iterable[Sequence[Any]]) -> None:
        """Keeps what has come."""
        fresh: set[int] = set()
        for number, spans, *data in blobs:
            one = self._readouts[number]
            if one.readout.last and number not in fresh:
                fresh.add(number)
                one.last.clear()  # the answer has gone on
            if one.readout.shown or one.fed:
                one.lowest = min(one.lowest, min(spans)[0])  # of rows in files, spans come as they were computed
                one.add(spans, data)

    def advance(self, end: int, border: int = END) -> list[tuple[int, Taken]]:
        """Takes the rows of the positions below ``end``, whose tokens are inputs: each position once, for all readers.

        Returns:
            The numbers of readouts that have some, with these rows; none of readouts that are reduced.
        """
        found = ((number, one.advance(end, border)) for number, one in enumerate(self._readouts))
        return [(number, taken) for number, taken in found if taken is not None]

    def reduced(self, number: int, end: int) -> Json | None:
        """What a reduction, or the last row, comes to: the tensor of its entry; None: the readout is neither."""
        one = self._readouts[number]
        return one.whole(end) if one.readout.last or one.readout.reduce != "none" else None

    def tell(self, prompt: int, generated: int, *, final: bool, border: int = END, cached: int = 0) -> None:
        """Adds an entry to the answer's fields for each readout that has something new; at the end, for each.

        Args:
            prompt: tokens of the prompt.
            generated: tokens that the answer has so far, of which the last has not been an input; a rule may end it
                in its prompt, before the first one.
            final: whether this is the answer's end.
            border: between the parts of the answer (windows.inside).
            cached: tokens of the prompt that the prefix cache had when the request began.

        Raises:
            OSError: a tensor could not be kept.
        """
        end = prompt + max(0, generated - 1)
        self.advance(end, border)
        for one in self._told:
            if not generated:
                one.last.clear()  # nothing was sampled from it
            entries = one.told(end, border, final=final)
            if entries and not one.begun:
                one.begun = True
                if left_out := one.left_out(cached):
                    entries = [{**entry, "cached": left_out} for entry in entries]
            self._fields[one.word] += entries


class _Kind:
    """One readout of a choice, or several whose rows travel as one: a row holds theirs side by side."""

    spool: Spool | None = None  # the file of its rows; None: the answer has them

    def __init__(self, reported: Reported, *, fed: bool) -> None:
        self.readout, self.dtype, self.function = reported.readout, reported.dtype, reported.function
        self.fed = fed
        self.abouts = reported.entries
        self._inside = [len(reported.abouts)] if reported.whole is not None else []  # axes of a row, but its last
        self.word = WORDS[self.readout.kind]
        self._rows: dict[int, tuple[bytes, ...]] = {}  # by position, those that were not taken
        self._taken = bytearray()  # 1 for each position that was
        self._ready: list[Taken] = []  # taken, and not in the answer
        self._told = 0  # the answer has its entries of positions below this one, or has said that they are left out
        self.last: dict[int, bytes] = {}  # rows that may have sampled the answer's last token, by position
        self._reduction = Pieces(self.readout)
        self.begun = False  # whether the answer has an entry of it
        self.lowest = END  # position of all that have come

    def add(self, spans: list[tuple[int, int]], data: Sequence[bytes]) -> None:
        """Keeps rows, or a piece of a reduction."""
        if self.readout.last:
            self.last[spans[-1][0]] = data[0]
            return
        if self.readout.reduced_there != "none":
            tokens, numbers = sum(hi - lo for lo, hi in spans), np.frombuffer(data[0], "<f4")
            self._reduction.add(Piece(spans[0][0], spans[-1][1], tokens, numbers))
            return
        if len(spans) == 1 and spans[0][1] - spans[0][0] == 1:  # a request that decodes
            self._keep(spans[0][0], tuple(data))
            return
        positions = [at for lo, hi in spans for at in range(lo, hi)]
        sizes = [len(one) // len(positions) for one in data]
        for row, at in enumerate(positions):
            self._keep(at, tuple(one[size * row : size * (row + 1)] for one, size in zip(data, sizes, strict=True)))

    def _keep(self, at: int, row: tuple[bytes, ...]) -> None:
        new = at >= len(self._taken) or not self._taken[at]
        if new and (self.readout.reduce == "none" or at >= len(self._taken)):  # pieces of a reduction are in order
            self._rows[at] = row

    def advance(self, end: int, border: int) -> Taken | None:
        """Takes rows as ``Rows.advance``."""
        part = self.readout.part
        for at in [at for at in self._rows if at < end and not inside(part, at, border)] if part else ():
            del self._rows[at]
        positions = sorted(at for at in self._rows if at < end)
        if not positions:
            return None
        rows = [self._rows.pop(at) for at in positions]
        self._taken.extend(bytes(max(0, positions[-1] + 1 - len(self._taken))))
        for at in positions:
            self._taken[at] = 1
        if self.readout.reduce != "none":  # of a part: others were reduced as they came
            for at, (row,) in zip(positions, rows, strict=True):
                self._reduction.add(Piece(at, at + 1, 1, numbers_of(self.dtype, row)))
            return None
        self._hold((positions, rows))
        return positions, rows

    def _hold(self, taken: Taken) -> None:
        """Holds rows for the answer."""
        if self.readout.shown:
            self._ready.append(taken)

    def told(self, end: int, border: int, *, final: bool) -> list[Json]:
        """What is new for the answer."""
        if self.readout.last or self.readout.reduce != "none":
            return self.sent(self.whole(end)) if final else []
        ready, self._ready = self._ready, []
        positions, rows = ready[0] if len(ready) == 1 else _merged(ready)
        first = bisect_left(positions, self._told)
        positions, rows = positions[first:], rows[first:]
        if not positions and (self.begun or not final):
            return []
        self._told = max([self._told, *(at + 1 for at in positions[-1:])])
        return self.sent(self.rows(positions, rows))

    def left_out(self, cached: int) -> list[list[int]]:
        """The spans that were not read, as the prefix cache had so many tokens when the request began.

        A preempted request computes again all that it reads, so none is below what has come.
        """
        end = min(cached, self.lowest)
        return [[lo, min(hi, end)] for lo, hi in self.readout.windows if lo < end]

    def sent(self, content: Json) -> list[Json]:
        """The entries of the answer, with their numbers as text or with handles in their place."""
        data = content.pop("data", None)
        if data is None:
            return [{**self.abouts[0], **content}]
        rows, width = content["shape"]
        content["shape"] = self.shape(rows, width // len(self.abouts))
        if self.spool is not None:
            self.spool.write([(0, rows)], data)
            return self.kept(content, range(rows))
        each = zip(self.abouts, apart(data, rows, len(self.abouts)), strict=True)
        return [{**about, **content, "data": b64encode(own).decode()} for about, own in each]

    def shape(self, rows: int, width: int) -> list[int]:
        """The shape of an entry's tensor with rows of so many numbers."""
        return [rows, *self._inside, width // math.prod(self._inside)]

    def kept(self, content: Json, places: Sequence[int]) -> list[Json]:
        """The entries of results that lie in its file, in these rows."""
        assert self.spool is not None
        handles = self.spool.keep(content, places)
        return [{**about, **content, "handle": one} for about, one in zip(self.abouts, handles, strict=True)]

    def whole(self, end: int) -> Json:
        """The reduction, or the last row."""
        if self.readout.last:
            row = ([at for at in self.last if at < end] or [*self.last])[-1:]
            data = b"".join(self.last[at] for at in row)
            return tensor(row, data, self.dtype, len(row))
        found = self._reduction.whole(end)
        data = b"".join(one.numbers.tobytes() for one in found.values())
        spans, tokens = [[one.first, one.end] for one in found.values()], [one.tokens for one in found.values()]
        if is_by_message(self.readout.reduce):
            return tensor(spans, data, "float32", len(found)) | {"messages": [*found], "tokens": tokens}
        return tensor(spans[0] if spans else [], data, "float32", len(found)) | {"tokens": sum(tokens)}

    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> Json:
        """The rows as the answer has them: a tensor."""
        return tensor(positions, b"".join(data for (data,) in rows), self.dtype, len(positions))


def _merged(taken: Sequence[Taken]) -> Taken:
    rows = {at: row for positions, own in taken for at, row in zip(positions, own, strict=True)}
    positions = sorted(rows)
    return positions, [rows[at] for at in positions]


class _Features(_Kind):
    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> Json:
        """For each position its strongest features with their activations, and the named ones."""
        top_k, names = self.readout.top_k, [*map(str, self.readout.features)]
        features = np.frombuffer(b"".join(row[0] for row in rows), "<i4").tolist()
        strengths, named = (floats(b"".join(row[at] for row in rows)) for at in (1, 2))
        found = []
        for number, at in enumerate(positions):
            row: Json = {"position": at}
            if top_k:
                own = slice(number * top_k, (number + 1) * top_k)
                row["top"] = [[one, f] for one, f in zip(features[own], strengths[own], strict=True) if one >= 0]
            if names:
                row["features"] = dict(zip(names, named[number * len(names) : (number + 1) * len(names)], strict=True))
            found.append(row)
        return {"rows": found}


class _Probe(_Kind):
    def rows(self, positions: list[int], rows: Sequence[tuple[bytes, ...]]) -> Json:
        """The scores at each position, those of each probe behind one another, as the probes' function has them."""
        found: NDArray[np.float32] = np.frombuffer(b"".join(data for (data,) in rows), "<f4")
        scores = score(found, self.function).reshape(len(positions), len(self.abouts))
        return {"positions": positions, "scores": floats(scores.T.tobytes())}

    def sent(self, content: Json) -> list[Json]:
        """An entry for each probe."""
        positions, scores = content["positions"], content["scores"]
        each = len(positions)
        return [
            {**about, "positions": [*positions], "scores": scores[each * at : each * (at + 1)]}
            for at, about in enumerate(self.abouts)
        ]


class _Spooled(_Kind):
    """Rows that lie in a file, written here if nobody has done so: only their positions are kept."""

    def __init__(self, reported: Reported, *, fed: bool) -> None:
        super().__init__(reported, fed=fed)
        self._places: dict[int, int] = {}  # the row of each position

    def add(self, spans: list[tuple[int, int]], data: Sequence[bytes]) -> None:
        """Keeps positions, and writes what comes with them."""
        runs = [(rank(self.readout.windows, lo), hi - lo) for lo, hi in spans]
        for (lo, hi), (first, _) in zip(spans, runs, strict=True):
            self._places.update((at, first + at - lo) for at in range(lo, hi))
        if data and self.spool is not None:
            self.spool.write(runs, data[0])
        if data and self.fed:
            super().add(spans, data)

    def _hold(self, taken: Taken) -> None:
        """They lie in the file."""

    def told(self, end: int, border: int, *, final: bool) -> list[Json]:
        """At the end an entry for each site."""
        if not final:
            return []
        first, last = of_part(self.readout.part, border)
        positions = sorted(at for at in self._places if first <= at < min(end, last))
        width = self.spool.width // SIZES[self.dtype] if positions and self.spool is not None else 0
        content = {"positions": positions, "dtype": self.dtype, "shape": self.shape(len(positions), width)}
        return self.kept(content, [self._places[at] for at in positions])


def spooled(one: Reported) -> bool:
    """Whether the rows of a readout lie in a file that the answer names by handles."""
    return not one.readout.inline and one.readout.reduce == "none"


_KINDS: Mapping[str, type[_Kind]] = {"features": _Features, "probe": _Probe, "activation": _Kind, "hidden": _Kind}
