"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.dictionaries.vectors import numbers_of
from saesteer.engine.readouts import Reading
from saesteer.engine.wire import POWER, TARGET, Wire, norm_of
from saesteer.kernels import layout
from saesteer.language.fields import FLOAT32_MAX

Words = NDArray[np.int32]
Floats = NDArray[np.float32]
Indices = NDArray[np.intp]
_FORM = np.array([layout.FLAGS, layout.GATES, TARGET])  # words of a line that a form depends on
_FORMS = 64  # kept; one of 1,024 entries takes 200 KB
_RANKS = {"topk": layout.RANKED, "abstopk": layout.RANKED | layout.MAGNITUDE, "groupmax": layout.RANKED}


class Placement(NamedTuple):
    """Where one dictionary lies in its site's weights, and the values that its entries copy."""

    base: int  # first row of w_enc at the site where it reads
    out: int  # first row of w_dec at the site where it writes; the same number where that is the same site
    number: int  # row of b_dec where it is decoded whole: where it reads
    rows: int  # where it is encoded whole: its features, and the inputs of its skip connection
    apart: bool  # whether those are two sites
    info: CoderInfo
    numbers: Floats  # [F, 2], bias and threshold; that is 0 for relu and topk, -inf for abstopk
    max_act: Floats | None  # [F]

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


class Places(NamedTuple):
    """Where everything that a plan may name lies."""

    sites: Mapping[str, int]  # name → index in the tables, in ascending order
    dictionaries: Mapping[str, Placement]


class Arrow(NamedTuple):
    """A vector at unit length, and the length that it was divided by; or the rows of a feature, and its max_act."""

    digest: bytes  # digest of the numbers
    unit: Floats  # [d]; of a feature [2, d], its encoder row and its decoder row
    length: float

    @classmethod
    def feature(cls, digest: bytes, dtype: str, data: bytes) -> "Arrow":
        """A feature from the bytes that travel with a plan: its max_act as float32, and its rows in a dtype."""
        rows = np.require(numbers_of(dtype, data[4:]), requirements="W")  # torch takes no read-only memory
        return cls(digest, rows.reshape(2, -1), float(numbers_of("float32", data[:4])[0]))

    @classmethod
    def several(cls, digests: Sequence[bytes], vectors: Floats) -> "dict[bytes, Arrow]":
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

    words: Words  # shortened to what is used
    # [sites], of layout.KERNELS: which kernels a step with this request needs there; BEFORE and AFTER where it only
    # captures. Requests that ask for the same share it, so a step looks at few of them.
    kinds: Words
    edits: int  # changes of the plan; each counts its tokens in its own column, in the plan's order
    doses: int  # sites whose doses are measured, in the columns after these, in forward order
    counters: int  # all of these columns
    # Whether it does anything at a site. The device numbers the steps with such a row that has counters.
    listed: bool
    uses: tuple[tuple[str, Arrow], ...]  # sites and vectors, whose slots are known when the row is filled
    at: Indices  # indices of the words that take slots
    which: Indices  # for each such word, the index of its use
    readings: tuple[Reading | None, ...] = ()  # what is made of captured tensors; None: on another stage of a pipeline
    parts: bool = False  # whether an edit of a part waits for the end of the reasoning
    change: int = 0  # change of pins after which all slots were slots of pins; 0: there are other slots, or none yet


class _Form(NamedTuple):
    """What rows have in common whose plans differ only in features, numbers, windows and vectors."""

    words: Words  # all but the entries
    kinds: Words  # the next five are a Row's
    doses: int
    counters: int
    listed: bool
    parts: bool
    places: Indices  # [entries, ENTRY], where each word of an entry stands
    ends: Words  # GROUP_END of each entry
    uses: Sequence[tuple[str, int]]  # sites and the numbers of their vectors
    at: Indices  # as a Row's
    which: Indices


class Rows:
    """Makes the rows of requests. Most requests ask for what others do, with other features or numbers.

    Args:
        places: of the sites and dictionaries that requests may name.
        limit: the largest dose by which a site may change a token; a limit turns the measurement on. 0: any dose.
    """

    def __init__(self, places: Places, limit: float = 0.0) -> None:
        self.places, self._limit = places, limit
        self._forms: dict[tuple[bytes, bytes], _Form] = {}

    def make(self, wire: Wire, arrows: Sequence[Arrow]) -> Row:
        """The row of one request.

        Args:
            wire: the plan of the request.
            arrows: the vectors and features of ``wire.digests``.
        """
        table = wire.lines[:, : layout.ENTRY].copy()
        _link(table, wire, self.places, arrows)
        key = wire.head, wire.lines.take(_FORM, axis=1).tobytes()
        form = self._forms.pop(key, None) or self._form(wire, table)
        self._forms[key] = form  # the last used stands last
        if len(self._forms) > _FORMS:
            del self._forms[next(iter(self._forms))]
        table[:, layout.GROUP_END] = form.ends
        words = form.words.copy()
        words[form.places] = table
        uses = tuple((site, arrows[number]) for site, number in form.uses)
        known = form.doses, form.counters, form.listed
        return Row(words, form.kinds, wire.edits, *known, uses, form.at, form.which, parts=form.parts)

    def _form(self, wire: Wire, table: Words) -> _Form:
        """That of a plan, with its entries, which already have the bits of their dictionaries."""
        sites = self.places.sites
        targets, flags, gates = (
            column.tolist() for column in (wire.lines[:, TARGET], table[:, layout.FLAGS], table[:, layout.GATES])
        )
        begin = layout.head(len(sites))
        words = np.zeros(begin + layout.ENTRY * (len(table) - [sum(site[1]) for site in wire.sites].count(1)), np.int32)
        spans = words[layout.HEAD : layout.HEAD + layout.SPAN * len(sites)].reshape(-1, layout.SPAN)
        starts: list[int] = []  # the first word of each entry
        ends: list[int] = []
        uses: dict[tuple[str, int], int] = {}
        at, which = [], []
        first, doses, most, whole, every = 0, 0, 1, False, 0
        for site, groups, changed, captures in wire.sites:
            number, count = sites[site], sum(groups)
            end = first + count
            own = flags[first:end]
            here = layout.one_at(number) if count == 1 else begin
            begin += layout.ENTRY * count * (count > 1)
            starts += range(here, here + layout.ENTRY * count, layout.ENTRY)
            dense = (0, 0, 0)
            for line in range(first, end):
                if targets[line] < 0:
                    at.append(starts[line] + layout.SLOT)
                    which.append(uses.setdefault((site, ~targets[line]), len(uses)))
                elif flags[line] & (layout.RANKED | layout.RECONSTRUCT) and not flags[line] & layout.HELD:
                    dense, whole = self.places.dictionaries[wire.dictionaries[targets[line]]].dense, True
            measured = changed and (wire.dose or self._limit > 0)
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
            spans[number, : layout.ONE] = span
            most, first, doses, every = max(most, span[layout.PARTS]), end, doses + measured, reduce(or_, own, every)
        # Whoever only captures has no entry, and is listed; whoever only reads hidden states is not.
        words[0], words[1] = max(first, 1) if wire.sites else 0, most
        words[layout.COUNTERS] = counters = wire.edits + layout.DOSE_WORDS * doses
        words[layout.NEEDS] = layout.WHOLE * whole + layout.COUNTED * (counters > 0)
        if self._limit > 0:
            # Neither 0 nor infinite as a float32: 0 would switch the limit off, and infinity is no limit.
            limit = min(max(self._limit, float(np.finfo(np.float32).tiny)), FLOAT32_MAX)
            words.view(np.float32)[layout.LIMIT] = limit
        kinds = spans[:, layout.KIND] & layout.KERNELS
        for site, groups, _, captures in wire.sites:
            if not groups:
                kinds[sites[site]] = captures
        return _Form(
            words,
            _shared(kinds.tobytes()),
            doses,
            counters,
            bool(wire.sites),
            bool(every & (layout.ANSWER | layout.REASONING)),
            np.array(starts, np.intp)[:, None] + np.arange(layout.ENTRY),
            np.array(ends, np.int32),
            [*uses],
            np.array(at, np.intp),
            np.array(which, np.intp),
        )


@lru_cache(256)
def _shared(kinds: bytes) -> Words:
    return np.frombuffer(kinds, np.int32)


def _link(table: Words, wire: Wire, places: Places, arrows: Sequence[Arrow]) -> None:
    """Put the dictionaries' slots and values into the entries [entries, ENTRY], and everything into its unit."""
    floats, targets, power = table.view(np.float32), wire.lines[:, TARGET], wire.lines[:, POWER]
    flags = reduce(or_, table[:, layout.FLAGS].tolist(), 0)
    in_units = any(power.tolist())
    size = np.ones(len(table)) if in_units or arrows else np.empty(0)  # of the unit of each
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
        floats[lines, layout.BIAS : layout.THRESHOLD + 1] = place.numbers.take(rows, axis=0)
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
        product = floats[read, layout.MUL] * size[read]  # in float64
        floats[read, layout.MUL] = np.clip(product, -FLOAT32_MAX, FLOAT32_MAX)
    if in_units:
        law = floats[:, layout.ADD : layout.HIGH + 1]
        finite = np.isfinite(law)
        scaled = np.where(finite, law, 0.0) * (size**power)[:, None]
        law[:] = np.where(finite, np.clip(scaled, -FLOAT32_MAX, FLOAT32_MAX), law)


def rows_of_features(info: CoderInfo, features: Words) -> Words:
    """The rows of features, where a file holds only some of them."""
    if info.feature_ids is None:
        return features
    return np.array([*map(info.row_of, features.tolist())], dtype=np.int32)
