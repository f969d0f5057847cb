"""A plan becomes the int32 words of one table row (kernels/layout.py). Knows numbers, not requests or devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saesteer.coder import CoderInfo
from saesteer.kernels import layout
from saesteer.plan import FeatureEdit, Group


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one dictionary lies in its site's weights, with what its entries copy."""

    site: int  # index of the site in the tables
    base: int  # first row of the site's w_enc and w_dec
    info: CoderInfo
    bias: NDArray[np.float32]  # [F]
    threshold: NDArray[np.float32]  # [F]; 0 for relu and topk
    max_act: NDArray[np.float32] | None  # [F]


def row_words(
    groups: Sequence[Group], placements: Mapping[str, Placement], sites: int, max_entries: int
) -> NDArray[np.int32]:
    """The words of one row, shortened to what is used.

    Args:
        groups: of one request, in list order.
        placements: of every dictionary that the groups name.
        sites: number of instrumented sites.
        max_entries: room for entries; the plan has already refused more.
    """
    begin = layout.head(sites)
    words = np.zeros(layout.width(sites, max_entries), dtype=np.int32)
    at = begin
    for site in range(sites):
        words[1 + 2 * site] = at
        for group in groups:
            place = placements[group.dictionary]
            if place.site != site:
                continue
            windows = [(edit, window) for edit in group.edits for window in edit.windows]
            end = at + layout.ENTRY * len(windows)
            assert end <= words.size, "the plan lets no more entries through than there is room for"
            for edit, window in windows:
                _entry(words[at : at + layout.ENTRY], edit, window, place, end)
                at += layout.ENTRY
        words[2 + 2 * site] = at
    words[0] = (at - begin) // layout.ENTRY
    return words[:at]


def _entry(
    words: NDArray[np.int32], edit: FeatureEdit, window: tuple[int, int], place: Placement, group_end: int
) -> None:
    topk = place.info.activation == "topk"
    row = place.info.row_of(edit.feature)
    assert row is not None, "the plan refuses features that the dictionary does not hold"
    unit = float(place.max_act[row]) if edit.max_act and place.max_act is not None else 1.0
    words[layout.SLOT] = place.base + row
    words[layout.GROUP_END] = group_end
    words[layout.LO], words[layout.HI] = window
    words[layout.FLAGS] = layout.ONLY_IF_ACTIVE * edit.only_if_active + layout.TOPK * topk
    words[layout.BASE] = place.base
    words[layout.SIZE] = place.info.features
    words[layout.TOP_K] = place.info.k or 0
    floats = words.view(np.float32)
    # The table holds f' − f, so that a large f loses no digits: mul · f + add.
    floats[layout.MUL] = edit.scale - 1.0
    floats[layout.ADD] = edit.shift * unit
    floats[layout.LOW] = edit.low * unit
    floats[layout.HIGH] = edit.high * unit
    floats[layout.BIAS] = place.bias[row]
    floats[layout.THRESHOLD] = place.threshold[row]
    floats[layout.GAIN] = 1.0
