"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from math import inf, isinf

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.dictionaries.vectors import rows_of
from saesteer.kernels import layout
from saesteer.language.fields import FLOAT32_MAX
from saesteer.language.inline import InlineVector
from saesteer.planning.plan import END, Change, Condition, Direction, Feature, Group, Plan, Whole

_KERNELS = layout.ANY | layout.LONE | layout.MANY
_NORMS = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2_sqrt_d": layout.L2_NORM}
_RANKS = {"topk": layout.RANKED, "abstopk": layout.RANKED | layout.MAGNITUDE, "groupmax": layout.RANKED}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one dictionary lies in its site's weights, with what its entries copy."""

    base: int  # first row of the site's w_enc and w_dec
    number: int  # row of the site's b_dec
    info: CoderInfo
    bias: NDArray[np.float32]  # [F]
    threshold: NDArray[np.float32]  # [F]; 0 for relu and topk, -inf for abstopk
    max_act: NDArray[np.float32] | None  # [F]

    @property
    def norm(self) -> int:
        """The bit of its input norm, or 0."""
        return _NORMS[self.info.in_norm]

    @property
    def flags(self) -> int:
        """Bits of every entry that reads this dictionary."""
        return self.norm | _RANKS.get(self.info.activation, 0)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A vector's direction at a site, and what was divided out of it."""

    slot: int  # -1: none yet
    length: float
    bias: float = 0.0  # of a probe


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where everything lies that a plan may name."""

    sites: Mapping[str, int]  # name → index in the tables
    dictionaries: Mapping[str, Placement]
    vectors: Mapping[tuple[str, Direction], Arrow]  # those that lie there already, by site
    max_entries: int


@dataclass(frozen=True, slots=True, eq=False)
class Inline:
    """A vector that a request brings: an entry waits for the slot that it gets when the row is filled."""

    word: int  # of the row, where the slot's number goes
    site: str
    content: bytes  # digest of the direction
    unit: NDArray[np.float32]  # [d]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a request's table row holds."""

    words: NDArray[np.int32]  # shortened to what is used
    kinds: NDArray[np.int32]  # [sites], of ANY, LONE and MANY: which kernels a step with this request needs there
    edits: int  # changes of the plan; each counts its tokens in its own column, in the plan's order
    doses: int = 0  # sites whose doses are measured, in columns behind those, in the order of a forward pass
    inline: tuple[Inline, ...] = ()

    @property
    def counters(self) -> int:
        """Columns of counts that it uses."""
        return self.edits + layout.DOSE_WORDS * self.doses


_Brought = Mapping[int | None, tuple[NDArray[np.float32], float, bytes]]  # by layer, see below


def unit_of(vectors: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Vectors [..., d] at unit length, float32, and the lengths [...] that they had.

    In float64, where no square of a float32 number overflows or vanishes.
    """
    wide = vectors.astype(np.float64)
    lengths = np.sqrt(np.einsum("...d,...d->...", wide, wide))
    return (wide / lengths[..., None]).astype(np.float32), lengths


@lru_cache(32)
def _brought(vector: tuple[float, ...] | InlineVector) -> _Brought:
    """What a request brings: by layer the unit direction, its length and a digest of the direction.

    The last ones are remembered, since clients send one set of directions with request after request.
    """
    rows = rows_of(vector)
    units, lengths = unit_of(np.stack(list(rows.values())))
    contents = (sha256(unit.data).digest() for unit in units)
    return dict(zip(rows, zip(units, lengths.tolist(), contents, strict=True), strict=True))


def make_row(plan: Plan, places: Places, *, dose: bool = False, limit: float = 0.0) -> Row:
    """The row of one request.

    Args:
        plan: of its spec.
        places: of all that it names.
        dose: measure how much each site changes each token, relative to the token's length.
        limit: the largest such dose, which is measured then; 0 = any.
    """
    writer = _Writer(plan, places, measured=dose or limit > 0)
    if limit > 0:
        # Neither 0 nor infinite as a float32: the one would switch it off, the other is none.
        writer.floats[layout.LIMIT] = min(max(limit, float(np.finfo(np.float32).tiny)), FLOAT32_MAX)
    return writer.row()


class _Writer:
    """Writes the entries of one row, site by site."""

    def __init__(self, plan: Plan, places: Places, *, measured: bool) -> None:
        self.plan, self.places, self.measured = plan, places, measured
        self.at = layout.head(len(places.sites))
        self.words = np.zeros(layout.width(len(places.sites), places.max_entries), dtype=np.int32)
        self.floats = self.words.view(np.float32)
        self.inline: list[Inline] = []
        # By id, since vectors that are equal but not the same are compared byte by byte, for each site again.
        self.brought: dict[int, _Brought] = {}

    def row(self) -> Row:
        begin, most, whole, doses = self.at, 1, False, 0
        counters = list(accumulate((len(group.changes) for group in self.plan.groups), initial=0))
        edits = counters[-1]
        conditions_at, groups_at = defaultdict(list), defaultdict(list)
        for condition in self.plan.conditions:
            conditions_at[condition.site].append(condition)
        for place, group in enumerate(self.plan.groups):
            groups_at[group.site].append((place, group))
        for name, number in self.places.sites.items():
            conditions, groups = conditions_at.get(name, ()), groups_at.get(name, ())
            if not conditions and not groups:
                continue  # its span holds nothing, as the row was made
            start, dense = self.at, (0, 0, 0)
            for target in [one.target for one in conditions] + [c.target for _, g in groups for c in g.changes]:
                dense = max(dense, self._dense(target))
            if conditions:
                end = self.at + layout.ENTRY * len(conditions)
                for condition in conditions:
                    self._condition(condition, end)
            for place, group in groups:
                self._group(group, counters[place])
            measured = self.measured and bool(groups)  # a site with conditions alone changes nothing
            span = self.words[layout.HEAD + layout.SPAN * number :][: layout.SPAN]
            entries = self.words[start : self.at].reshape(-1, layout.ENTRY)
            span[:] = layout.span_words(
                entries[:, layout.FLAGS].tolist(),
                gated=bool(entries[:, layout.GATES].any()),
                groups=len(groups) + bool(conditions),
                begin=start,
                dense=dense,
                doses=edits + layout.DOSE_WORDS * doses if measured else 0,
            )
            doses += measured
            most, whole = max(most, int(span[layout.PARTS])), whole or dense[1] > 0
        self.words[0] = (self.at - begin) // layout.ENTRY
        self.words[1] = most
        self.words[2] = whole
        spans = self.words[layout.HEAD :][: layout.SPAN * len(self.places.sites)].reshape(-1, layout.SPAN)
        kinds = spans[:, layout.KIND] & _KERNELS
        row = Row(self.words[: self.at].copy(), kinds, edits, doses, tuple(self.inline))
        row.words[layout.COUNTERS] = row.counters
        return row

    def _dense(self, target: object) -> tuple[int, int, int]:
        """Slots and input norm of the dictionary whose every feature is needed, if it is one; else zeros."""
        if isinstance(target, Direction):
            return 0, 0, 0
        assert isinstance(target, Feature | Whole)
        place = self.places.dictionaries[target.dictionary]
        if isinstance(target, Whole) or place.info.activation in RANKED:
            return place.base, place.info.features, place.norm
        return 0, 0, 0

    def _group(self, group: Group, counter: int) -> None:
        end = self.at + layout.ENTRY * sum(len(change.windows) for change in group.changes)
        assert end <= self.words.size, "the plan lets no more entries through than there is room for"
        for number, change in enumerate(group.changes, counter):
            for window in change.windows:
                words = self._next(end, window)
                words[layout.FLAGS] = number << layout.COUNTER
                words[layout.GATES] = change.gates
                self._change(words, change, group.site)

    def _next(self, group_end: int, window: tuple[int, int]) -> NDArray[np.int32]:
        words = self.words[self.at : self.at + layout.ENTRY]
        self.at += layout.ENTRY
        words[layout.GROUP_END] = group_end
        words[layout.LO], words[layout.HI] = window
        return words

    def _change(self, words: NDArray[np.int32], change: Change, site: str) -> None:
        floats = words.view(np.float32)
        floats[layout.GAIN] = change.gain
        target = change.target
        if isinstance(target, Whole):
            place = self.places.dictionaries[target.dictionary]
            words[layout.SLOT] = place.number
            words[layout.FLAGS] |= layout.RECONSTRUCT | place.flags
            words[layout.BASE : layout.TOP_K + 1] = place.base, place.info.features, place.info.k or 0
            return
        unit = 1.0
        if isinstance(target, Feature):
            row = self._feature(words, target)
            max_act = self.places.dictionaries[target.dictionary].max_act
            unit = float(max_act[row]) if change.unit == "max_act" and max_act is not None else 1.0
        else:
            length = self._direction(words, target, site).length
            unit = length if change.unit == "vector" else 1.0
        words[layout.FLAGS] |= layout.ONLY_IF_ACTIVE * change.only_if_active
        words[layout.FLAGS] |= layout.MATCH * (change.unit == "stream")
        # The table holds f' − f, so that a large f loses no digits: mul · f + add.
        floats[layout.MUL] = change.scale - 1.0
        floats[layout.ADD] = _times(change.shift, unit)
        floats[layout.LOW] = _times(change.low, unit)
        floats[layout.HIGH] = _times(change.high, unit)

    def _condition(self, condition: Condition, group_end: int) -> None:
        words = self._next(group_end, (0, END))
        floats = words.view(np.float32)
        words[layout.FLAGS] = layout.GATE
        words[layout.GATES] = condition.bit
        above, below = condition.above, condition.below
        if isinstance(condition.target, Feature):
            self._feature(words, condition.target)
        else:
            arrow = self._direction(words, condition.target, condition.site)
            above, below = ((bound - arrow.bias) / arrow.length for bound in (above, below))
        floats[layout.LOW], floats[layout.HIGH] = _times(above, 1.0), _times(below, 1.0)
        floats[layout.GAIN] = 1.0

    def _feature(self, words: NDArray[np.int32], target: Feature) -> int:
        """What an entry holds to read a feature; the feature's row in its dictionary."""
        place = self.places.dictionaries[target.dictionary]
        info, row = place.info, place.info.row_of(target.feature)
        assert row is not None, "the plan refuses features that the dictionary does not hold"
        words[layout.SLOT] = place.base + row
        words[layout.FLAGS] |= place.flags
        if info.activation in RANKED:
            assert info.k is not None
            if info.activation == "groupmax":
                size = info.features // info.k
                words[layout.BASE : layout.TOP_K + 1] = place.base + row // size * size, size, 1
            else:
                words[layout.BASE : layout.TOP_K + 1] = place.base, info.features, info.k
        floats = words.view(np.float32)
        floats[layout.BIAS] = place.bias[row]
        floats[layout.THRESHOLD] = place.threshold[row]
        return row

    def _direction(self, words: NDArray[np.int32], target: Direction, site: str) -> Arrow:
        """What an entry holds to read a projection: all of it, whatever its sign."""
        words.view(np.float32)[layout.THRESHOLD] = -inf
        arrow = self.places.vectors.get((site, target))
        if arrow is not None:
            words[layout.SLOT] = arrow.slot
            return arrow
        assert not isinstance(target.vector, str), "the plan refuses names that nobody knows"
        brought = self.brought.get(id(target.vector)) or _brought(target.vector)
        self.brought[id(target.vector)] = brought
        unit, length, content = brought[target.layer]
        at = self.at - layout.ENTRY + layout.SLOT
        self.inline.append(Inline(at, site, content, unit))
        return Arrow(-1, length)


def _times(value: float, unit: float) -> float:
    """A product that stays a finite float32, or an infinite bound."""
    return value if isinf(value) else min(max(value * unit, -FLOAT32_MAX), FLOAT32_MAX)
