"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saesteer.coder import RANKED, CoderInfo
from saesteer.kernels import layout
from saesteer.plan import FeatureEdit, Group

_NORMS = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2_sqrt_d": layout.L2_NORM}
_RANKS = {"topk": layout.RANKED, "abstopk": layout.RANKED | layout.MAGNITUDE, "groupmax": layout.RANKED}
_ANY = layout.RANKED | layout.RECONSTRUCT | layout.LAYER_NORM | layout.L2_NORM  # only one kernel does these


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one dictionary lies in its site's weights, with what its entries copy."""

    site: int  # index of the site in the tables
    base: int  # first row of the site's w_enc and w_dec
    number: int  # row of the site's b_dec
    info: CoderInfo
    bias: NDArray[np.float32]  # [F]
    threshold: NDArray[np.float32]  # [F]; 0 for relu and topk, -inf for abstopk
    max_act: NDArray[np.float32] | None  # [F]

    @property
    def flags(self) -> int:
        """Bits of every entry that reads this dictionary."""
        return _NORMS[self.info.in_norm] | _RANKS.get(self.info.activation, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a request's table row holds."""

    words: NDArray[np.int32]  # shortened to what is used
    kinds: int  # of all its sites, without GATED: which kernels a step with this request needs


def make_row(groups: Sequence[Group], placements: Mapping[str, Placement], sites: int, max_entries: int) -> Row:
    """The row of one request.

    Args:
        groups: of one request, in list order.
        placements: of every dictionary that the groups name.
        sites: number of instrumented sites.
        max_entries: room for entries; the plan has already refused more.
    """
    begin = layout.head(sites)
    words = np.zeros(layout.width(sites, max_entries), dtype=np.int32)
    at, counter, kinds, most = begin, 0, 0, 1
    for site in range(sites):
        start = at
        here = [group for group in groups if placements[group.dictionary].site == site]
        dense = (0, 0)
        for group in here:
            place = placements[group.dictionary]
            end = at + layout.ENTRY * sum(len(edit.windows) for edit in group.edits)
            assert end <= words.size, "the plan lets no more entries through than there is room for"
            if place.info.activation in RANKED:
                dense = (place.base, place.info.features)
            for edit in group.edits:
                for window in edit.windows:
                    _entry(words[at : at + layout.ENTRY], edit, window, place, end, counter)
                    at += layout.ENTRY
                counter += 1
        span = words[layout.HEAD + layout.SPAN * site :][: layout.SPAN]
        span[:] = _span(words[start:at].reshape(-1, layout.ENTRY), len(here), start, dense)
        most, kinds = max(most, int(span[layout.PARTS])), kinds | int(span[layout.KIND])
    words[0] = (at - begin) // layout.ENTRY
    words[1] = most
    return Row(words[:at], kinds & ~layout.GATED)


def _span(entries: NDArray[np.int32], groups: int, begin: int, dense: tuple[int, int]) -> list[int]:
    """The words of a site, from which the kernels choose how to run it."""
    n = len(entries)
    if not n:
        return [begin, begin, 1, 0, 0, 0, 0, 0]
    flags = int(np.bitwise_or.reduce(entries[:, layout.FLAGS]))
    gated = bool(entries[:, layout.GATES].any())
    single = groups == 1 and not flags & layout.GATE
    parts = 1
    if single:
        parts = layout.MOST_PARTS if flags & layout.RECONSTRUCT else min(layout.MOST_PARTS, -(-n // 4))
    if gated or flags & _ANY:
        kind = layout.ANY | layout.GATED * gated
    elif single and n >= layout.MANY_ENTRIES and not flags & layout.MATCH:
        kind = layout.MANY
    else:
        kind = layout.FEW
    return [begin, begin + layout.ENTRY * n, parts, kind, *dense, 0, 0]


def _entry(
    words: NDArray[np.int32],
    edit: FeatureEdit,
    window: tuple[int, int],
    place: Placement,
    group_end: int,
    counter: int,
) -> None:
    info = place.info
    row = info.row_of(edit.feature)
    assert row is not None, "the plan refuses features that the dictionary does not hold"
    unit = float(place.max_act[row]) if edit.max_act and place.max_act is not None else 1.0
    words[layout.SLOT] = place.base + row
    words[layout.GROUP_END] = group_end
    words[layout.LO], words[layout.HI] = window
    words[layout.FLAGS] = place.flags | layout.ONLY_IF_ACTIVE * edit.only_if_active | counter << layout.COUNTER
    if info.activation in RANKED:
        words[layout.BASE : layout.TOP_K + 1] = _range(place, row)
    floats = words.view(np.float32)
    # The table holds f' − f, so that a large f loses no digits: mul · f + add.
    floats[layout.MUL] = edit.scale - 1.0
    floats[layout.ADD] = edit.shift * unit
    floats[layout.LOW] = edit.low * unit
    floats[layout.HIGH] = edit.high * unit
    floats[layout.BIAS] = place.bias[row]
    floats[layout.THRESHOLD] = place.threshold[row]
    floats[layout.GAIN] = 1.0


def _range(place: Placement, row: int) -> tuple[int, int, int]:
    """Among which slots a feature is ranked, and how many of them are active."""
    info = place.info
    assert info.k is not None
    if info.activation == "groupmax":
        size = info.features // info.k
        return place.base + row // size * size, size, 1
    return place.base, info.features, info.k
