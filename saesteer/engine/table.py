"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.kernels import layout
from saesteer.language.fields import FLOAT32_MAX
from saesteer.planning.wire import ALONG, UNITS, WHOLE, Wire

_KERNELS = layout.ANY | layout.LONE | layout.MANY
_NORMS = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2_sqrt_d": layout.L2_NORM}
_RANKS = {"topk": layout.RANKED, "abstopk": layout.RANKED | layout.MAGNITUDE, "groupmax": layout.RANKED}
_MAX_ACT, _VECTOR, _STREAM = (UNITS[unit] for unit in ("max_act", "vector", "stream"))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one dictionary lies in its site's weights, and the values that its entries copy."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where everything that a plan may name lies."""

    sites: Mapping[str, int]  # name → index in the tables, in ascending order
    dictionaries: Mapping[str, Placement]


@dataclass(frozen=True, slots=True, eq=False)
class Arrow:
    """A vector at unit length, and the length that it was divided by."""

    digest: bytes  # digest of the vector's numbers
    unit: NDArray[np.float32]  # [d]
    length: float

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
    kinds: NDArray[np.int32]  # [sites], of ANY, LONE and MANY: which kernels a step with this request needs there
    edits: int  # changes of the plan; each counts its tokens in its own column, in the plan's order
    doses: int  # sites whose doses are measured, in the columns after these, in forward order
    uses: tuple[tuple[str, Arrow], ...]  # sites and vectors, whose slots are known when the row is filled
    at: NDArray[np.intp]  # indices of the words that take slots
    which: NDArray[np.intp]  # for each such word, the index of its use
    change: int = 0  # change of pins after which all slots were slots of pins; 0: there are other slots, or none yet

    @property
    def counters(self) -> int:
        """The number of columns of counts that it uses."""
        return self.edits + layout.DOSE_WORDS * self.doses


def make_row(wire: Wire, places: Places, arrows: Sequence[Arrow], *, limit: float = 0.0) -> Row:
    """The row of one request.

    Args:
        wire: the plan of the request.
        places: the places of the sites and dictionaries that it names.
        arrows: the vectors of ``wire.digests``.
        limit: the largest dose by which a site may change a token; a limit turns the measurement on. 0: any dose.
    """
    entries, begin, sites = wire.entries, layout.head(len(places.sites)), [*places.sites]
    number = np.array([places.sites[name] for name in wire.sites])[entries["site"]]
    lines, dense = _lines(wire, places, arrows, number)
    source = np.arange(len(entries)).repeat(entries["windows"])  # for each table entry, its line in the plan
    order = number[source].argsort(kind="stable")  # conditions stay in front, groups in their order
    source = source[order]
    site, group = number[source], entries["group"][source]
    words = np.zeros(begin + layout.ENTRY * len(source), dtype=np.int32)
    table = words[begin:].reshape(-1, layout.ENTRY)
    table[:] = lines[source]
    table[:, layout.LO : layout.HI + 1] = wire.windows[order]
    last = np.ones(len(source), dtype=bool)  # whether it is the last of its group
    last[:-1] = (site[1:] != site[:-1]) | (group[1:] != group[:-1])
    ends = last.nonzero()[0] + 1
    table[:, layout.GROUP_END] = begin + layout.ENTRY * ends[last.cumsum() - last]

    edits, doses, most, first = int((entries["group"] >= 0).sum()), 0, 1, 0
    flags, gates = table[:, layout.FLAGS].tolist(), table[:, layout.GATES].tolist()
    spans = words[layout.HEAD :][: layout.SPAN * len(sites)].reshape(-1, layout.SPAN)
    groups = zip(ends.tolist(), site[ends - 1].tolist(), group[ends - 1].tolist(), strict=True)
    for here, found in groupby(groups, key=itemgetter(1)):
        several = [*found]
        end, _, kind = several[-1]
        measured = (wire.dose or limit > 0) and kind >= 0  # a site with conditions alone changes nothing
        span = layout.span_words(
            flags[first:end],
            gated=any(gates[first:end]),
            groups=len(several),
            begin=begin + layout.ENTRY * first,
            dense=dense.get(here, (0, 0, 0)),
            doses=edits + layout.DOSE_WORDS * doses if measured else 0,
        )
        spans[here], most, first, doses = span, max(most, span[layout.PARTS]), end, doses + measured
    words[:3] = len(source), most, bool(dense)
    if limit > 0:
        # Neither 0 nor infinite as a float32: 0 would switch the limit off, and infinity is no limit.
        words.view(np.float32)[layout.LIMIT] = min(max(limit, float(np.finfo(np.float32).tiny)), FLOAT32_MAX)

    uses: dict[tuple[int, int], int] = {}
    at = (entries["feature"][source] == ALONG).nonzero()[0]
    pairs = zip(site[at].tolist(), entries["of"][source[at]].tolist(), strict=True)
    which = np.array([uses.setdefault(pair, len(uses)) for pair in pairs], dtype=np.intp)
    used = tuple((sites[here], arrows[one]) for here, one in uses)
    slots = begin + layout.ENTRY * at + layout.SLOT
    row = Row(words, spans[:, layout.KIND] & _KERNELS, edits, doses, used, slots, which)
    words[layout.COUNTERS] = row.counters
    return row


def _lines(
    wire: Wire, places: Places, arrows: Sequence[Arrow], number: NDArray[np.intp]
) -> tuple[NDArray[np.int32], dict[int, tuple[int, int, int]]]:
    """The words of each condition and change, except windows, ends of groups and slots of vectors.

    Args:
        wire: the plan.
        places: as in ``make_row``.
        arrows: as in ``make_row``.
        number: [lines], the index of each line's site.

    Returns:
        int32 [lines, ENTRY], and by site the slots and input norm of the dictionary that is needed whole.
    """
    entries = wire.entries
    words, unit = np.zeros((len(entries), layout.ENTRY), dtype=np.int32), np.ones(len(entries))
    floats, flags = words.view(np.float32), words[:, layout.FLAGS]
    feature, of, measure, law = (entries[name] for name in ("feature", "of", "unit", "law"))
    conditions = int((entries["group"] < 0).sum())
    flags[:] = layout.ONLY_IF_ACTIVE * entries["active"]
    flags += np.arange(-conditions, len(entries) - conditions) << layout.COUNTER
    flags[:conditions] = layout.GATE
    words[:, layout.GATES] = entries["gates"]
    dense: dict[int, tuple[int, int, int]] = {}
    for one, name in enumerate(wire.dictionaries):
        place = places.dictionaries[name]
        info, k = place.info, place.info.k or 0
        lines = ((of == one) & (feature != ALONG)).nonzero()[0]
        flags[lines] |= place.flags
        ranked, whole = info.activation in RANKED, feature[lines] == WHOLE
        if ranked or whole.any():
            dense |= dict.fromkeys(number[lines].tolist(), (place.base, info.features, place.norm))
            words[lines if ranked else lines[whole], layout.BASE : layout.TOP_K + 1] = place.base, info.features, k
            flags[lines[whole]] |= layout.RECONSTRUCT
            words[lines[whole], layout.SLOT] = place.number
            lines = lines[~whole]
        rows = feature[lines]
        if info.feature_ids is not None:
            rows = np.array([*map(info.row_of, rows.tolist())], dtype=np.int32)
        words[lines, layout.SLOT] = place.base + rows
        if info.activation == "groupmax":
            size = info.features // k
            words[lines, layout.BASE] = place.base + rows // size * size
            words[lines, layout.SIZE : layout.TOP_K + 1] = size, 1
        floats[lines, layout.BIAS], floats[lines, layout.THRESHOLD] = place.bias[rows], place.threshold[rows]
        if place.max_act is not None:
            unit[lines] = np.where(measure[lines] == _MAX_ACT, place.max_act[rows], 1.0)
    if arrows:
        lines = (feature == ALONG).nonzero()[0]
        flags[lines[measure[lines] == _STREAM]] |= layout.MATCH
        floats[lines, layout.THRESHOLD] = -np.inf
        lengths = np.array([arrow.length for arrow in arrows])[of[lines]]
        unit[lines] = np.where(measure[lines] == _VECTOR, lengths, 1.0)
        bounded = lines[lines < conditions]  # bounds on x · v; the table has bounds on x · v / |v|
        law = law.copy()
        law[bounded, 2:4] /= lengths[: len(bounded), None]
    # The table holds f' − f, so that a large f loses no digits: mul · f + add.
    floats[:, layout.MUL] = law[:, 0] - 1.0
    floats[:, layout.GAIN] = law[:, 4]
    endless = np.isinf(law[:, 1:4])
    measured = np.where(endless, 0.0, law[:, 1:4]) * unit[:, None]  # products, kept finite as float32 below
    floats[:, layout.ADD : layout.HIGH + 1] = np.where(
        endless, law[:, 1:4], np.minimum(np.maximum(measured, -FLOAT32_MAX), FLOAT32_MAX)
    )
    return words, dense
