"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.dictionaries.vectors import numbers_of
from saesteer.engine.readouts import Reading
from saesteer.engine.wire import POWER, TARGET, Wire, norm_of
from saesteer.kernels import layout
from saesteer.language.fields import FLOAT32_MAX

_NOWHERE = np.empty(0, dtype=np.intp)
_RANKS = {"topk": layout.RANKED, "abstopk": layout.RANKED | layout.MAGNITUDE, "groupmax": layout.RANKED}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one dictionary lies in its site's weights, and the values that its entries copy."""

    base: int  # first row of w_enc at the site where it reads
    out: int  # first row of w_dec at the site where it writes; the same number where that is the same site
    number: int  # row of b_dec where it is decoded whole: where it reads
    rows: int  # where it is encoded whole: its features, and the inputs of its skip connection
    apart: bool  # whether those are two sites
    info: CoderInfo
    numbers: NDArray[np.float32]  # [F, 2], bias and threshold; that is 0 for relu and topk, -inf for abstopk
    max_act: NDArray[np.float32] | None  # [F]

    @property
    def norm(self) -> int:
        """The bit of its input norm, or 0."""
        return norm_of(self.info)

    @property
    def flags(self) -> int:
        """Bits of every entry that reads this dictionary."""
        return self.norm | _RANKS.get(self.info.activation, 0)

    @property
    def dense(self) -> tuple[int, int, int]:
        """Its first slot, its rows and its input norm, where it is encoded whole."""
        return self.base, self.rows, self.norm


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where everything that a plan may name lies."""

    sites: Mapping[str, int]  # name → index in the tables, in ascending order
    dictionaries: Mapping[str, Placement]


@dataclass(frozen=True, slots=True, eq=False)
class Arrow:
    """A vector at unit length, and the length that it was divided by; or the rows of a feature, and its max_act."""

    digest: bytes  # digest of the numbers
    unit: NDArray[np.float32]  # [d]; of a feature [2, d], its encoder row and its decoder row
    length: float

    @classmethod
    def feature(cls, digest: bytes, dtype: str, data: bytes) -> "Arrow":
        """A feature from the bytes that travel with a plan: its max_act as float32, and its rows in a dtype."""
        rows = np.require(numbers_of(dtype, data[4:]), requirements="W")  # torch takes no read-only memory
        return cls(digest, rows.reshape(2, -1), float(numbers_of("float32", data[:4])[0]))

    @classmethod
    def several(cls, digests: Sequence[bytes], vectors: NDArray[np.float32]) -> "dict[bytes, Arrow]":
        """Arrows by digest, made from vectors [n, d].

        Computed in float64, where no square of a float32 number overflows or vanishes.
        """
        wide = vectors.astype(np.float64)
        lengths = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        units = (wide / lengths[:, None]).astype(np.float32)
        return {
            digest: cls(digest, unit, length)
            for digest, unit, length in zip(digests, units, lengths.tolist(), strict=True)
        }


@dataclass(slots=True, eq=False)
class Row:
    """What a request's table row holds; the registry puts the slots of its vectors into the words."""

    words: NDArray[np.int32]  # shortened to what is used
    # [sites], of layout.KERNELS: which kernels a step with this request needs there; BEFORE and AFTER where it only
    # captures. Requests that ask for the same share it, so a step looks at few of them.
    kinds: NDArray[np.int32]
    edits: int  # changes of the plan; each counts its tokens in its own column, in the plan's order
    doses: int  # sites whose doses are measured, in the columns after these, in forward order
    uses: tuple[tuple[str, Arrow], ...]  # sites and vectors, whose slots are known when the row is filled
    at: NDArray[np.intp]  # indices of the words that take slots
    which: NDArray[np.intp]  # for each such word, the index of its use
    readings: tuple[Reading | None, ...] = ()  # what is made of captured tensors; None: on another stage of a pipeline
    parts: bool = False  # whether an edit of a part waits for the end of the reasoning
    change: int = 0  # change of pins after which all slots were slots of pins; 0: there are other slots, or none yet
    # Whether it does anything at a site. The device numbers the steps with such a row that has counters.
    listed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.listed = bool(self.words[:1].any())  # once: each batch asks all of its rows

    @property
    def counters(self) -> int:
        """The number of columns of counts that it uses."""
        return self.edits + layout.DOSE_WORDS * self.doses


def make_row(wire: Wire, places: Places, arrows: Sequence[Arrow], *, limit: float = 0.0) -> Row:
    """The row of one request.

    Args:
        wire: the plan of the request.
        places: the places of the sites and dictionaries that it names.
        arrows: the vectors and features of ``wire.digests``.
        limit: the largest dose by which a site may change a token; a limit turns the measurement on. 0: any dose.
    """
    table = wire.lines[:, : layout.ENTRY].copy()
    _link(table, wire, places, arrows)

    targets, flags, gates = (
        column.tolist() for column in (wire.lines[:, TARGET], table[:, layout.FLAGS], table[:, layout.GATES])
    )
    head = begin = layout.head(len(places.sites))
    words = np.zeros(head + layout.ENTRY * (len(table) - [sum(site[1]) for site in wire.sites].count(1)), np.int32)
    spans = words[layout.HEAD : layout.HEAD + layout.SPAN * len(places.sites)].reshape(-1, layout.SPAN)
    fronts = spans[:, : layout.ONE]
    alone: dict[int, int] = {}  # entries that are the only ones of their sites, by the site's number
    ends: list[int] = []  # GROUP_END of each entry
    uses: dict[tuple[str, Arrow], int] = {}
    at, which = [], []
    first, doses, most, whole, every = 0, 0, 1, False, 0
    for site, groups, changed, captures in wire.sites:
        number, count = places.sites[site], sum(groups)
        end = first + count
        own = flags[first:end]
        bits = reduce(or_, own, 0)
        here = begin
        if count == 1:
            here = layout.one_at(number)
            alone[number] = first
        measured = _measured(wire, limit, changed)
        dense = (0, 0, 0)
        for line in range(first, end) if arrows or bits & (layout.RANKED | layout.RECONSTRUCT) else ():
            if targets[line] < 0:
                at.append(here + layout.ENTRY * (line - first) + layout.SLOT)
                which.append(uses.setdefault((site, arrows[~targets[line]]), len(uses)))
            elif flags[line] & (layout.RANKED | layout.RECONSTRUCT) and not flags[line] & layout.HELD:
                dense, whole = places.dictionaries[wire.dictionaries[targets[line]]].dense, True
        span = layout.span_words(
            own,
            gated=any(gates[first:end]),
            groups=len(groups),
            begin=here,
            dense=dense,
            doses=wire.edits + layout.DOSE_WORDS * doses if measured else 0,
            captures=captures,
        )
        for many in groups:
            here += layout.ENTRY * many
            ends += [here] * many
        begin += layout.ENTRY * count * (count > 1)
        fronts[number] = span
        most, first, doses, every = max(most, span[layout.PARTS]), end, doses + measured, every | bits
    table[:, layout.GROUP_END] = ends
    if alone:
        lines = [*alone.values()]
        spans[[*alone], layout.ONE :] = table[lines]
        table = np.delete(table, lines, axis=0) if len(lines) < first else table[:0]
    words[head:].reshape(table.shape)[:] = table
    # Whoever only captures has no entry, and is listed; whoever only reads hidden states is not.
    words[0], words[1] = max(first, 1) if wire.sites else 0, most
    if limit > 0:
        # Neither 0 nor infinite as a float32: 0 would switch the limit off, and infinity is no limit.
        words.view(np.float32)[layout.LIMIT] = min(max(limit, float(np.finfo(np.float32).tiny)), FLOAT32_MAX)
    slots, used = _NOWHERE, _NOWHERE
    if at:
        slots, used = np.array(at, np.intp), np.array(which, np.intp)
    kinds = spans[:, layout.KIND] & layout.KERNELS
    for site, groups, _, captures in wire.sites:
        if not groups:
            kinds[places.sites[site]] = captures
    row = Row(words, _shared(kinds.tobytes()), wire.edits, doses, (*uses,), slots, used)
    row.parts = bool(every & (layout.ANSWER | layout.REASONING))
    words[layout.COUNTERS] = row.counters
    words[layout.NEEDS] = layout.WHOLE * whole + layout.COUNTED * (row.counters > 0)
    return row


def _measured(wire: Wire, limit: float, changed: bool) -> bool:
    """Whether doses are measured at a site."""
    return changed and (wire.dose or limit > 0)


@lru_cache(256)
def _shared(kinds: bytes) -> NDArray[np.int32]:
    return np.frombuffer(kinds, np.int32)


def _link(table: NDArray[np.int32], wire: Wire, places: Places, arrows: Sequence[Arrow]) -> None:
    """Put the dictionaries' slots and values into the entries [entries, ENTRY], and everything into its unit."""
    floats, targets, power = table.view(np.float32), wire.lines[:, TARGET], wire.lines[:, POWER]
    flags = reduce(or_, table[:, layout.FLAGS].tolist(), 0)
    in_units = any(power.tolist())
    size = np.ones(len(table) if in_units or arrows else 0)  # of the unit of each
    several = len(wire.dictionaries) > 1 or bool(arrows)
    for one, name in enumerate(wire.dictionaries):
        place = places.dictionaries[name]
        info = place.info
        whole = bool(flags & layout.RECONSTRUCT) or info.activation in RANKED
        # All of them is a slice, which numpy looks up in a third of the time.
        lines: Any = (targets == one).nonzero()[0] if several or place.apart or whole else slice(None)
        if place.apart:
            held = (table[lines, layout.FLAGS] & layout.HELD).astype(bool)
            rows = rows_of_features(info, table[lines[held], layout.SLOT])
            table[lines[held], layout.SLOT] = place.out + rows
            if in_units and place.max_act is not None:
                size[lines[held]] = place.max_act[rows]
            lines = lines[~held]
        if place.flags:
            table[lines, layout.FLAGS] |= place.flags
        if whole:
            made = (table[lines, layout.FLAGS] & layout.RECONSTRUCT).astype(bool)
            ranged = lines if info.activation in RANKED else lines[made]
            table[ranged, layout.SIZE : layout.TOP_K + 1] = info.features, info.k or 0
            table[lines[made], layout.SLOT] = place.number
            lines = lines[~made]
        rows = rows_of_features(info, table[lines, layout.SLOT])
        floats[lines, layout.BIAS : layout.THRESHOLD + 1] = place.numbers[rows]
        if in_units and place.max_act is not None:
            size[lines] = place.max_act[rows]
        table[lines, layout.SLOT] = place.base + rows  # where all are meant, the rows are a view of these words
        if info.activation == "groupmax":
            table[lines, layout.SIZE : layout.TOP_K + 1] = info.features // (info.k or 1), 1
    if arrows:
        lines = (targets < 0).nonzero()[0]
        size[lines] = np.array([arrow.length for arrow in arrows])[~targets[lines]]
        lines = lines[np.array([arrow.unit.ndim == 1 for arrow in arrows])[~targets[lines]]]
        read = lines[(table[lines, layout.FLAGS] & layout.READ).astype(bool)]
        floats[read, layout.MUL] *= size[read]
    if in_units:
        law = floats[:, layout.ADD : layout.HIGH + 1]
        finite = np.isfinite(law)
        scaled = np.where(finite, law, 0.0) * (size**power)[:, None]
        law[:] = np.where(finite, np.clip(scaled, -FLOAT32_MAX, FLOAT32_MAX), law)


def rows_of_features(info: CoderInfo, features: NDArray[np.int32]) -> NDArray[np.int32]:
    """The rows of features, where a file holds only some of them."""
    if info.feature_ids is None:
        return features
    return np.array([*map(info.row_of, features.tolist())], dtype=np.int32)
