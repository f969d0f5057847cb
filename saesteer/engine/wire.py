"""A plan as the entries of a table row, with names and digests where the holder of the weights has places.

Knows the words of an entry (kernels/layout.py), but neither weights nor slots. The front end encodes (encode.py), the
worker decodes; ``saesteer.hf`` does both. A vector that the request brings travels with the plan, as the same bytes. So
do the rows of a feature whose dictionary stays in its file; what else the worker would know of it stands in the entry.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import CoderInfo
from saesteer.kernels import layout
from saesteer.planning.digests import DIGEST
from saesteer.planning.immutable import distinct

# A line is an entry whose SLOT is a feature's number, without GROUP_END and the dictionary's values, and these words:
TARGET = layout.ENTRY  # index in Wire.dictionaries, or for a vector or a feature's rows ~index in Wire.digests
POWER = TARGET + 1  # ADD, LOW and HIGH are in units of the target's max_act or length to this power: 0, 1 or -1
LINE = POWER + 1
FEATURE = "feature "  # in front of a dtype: its max_act or 1 as float32, then encoder row and decoder row
_NORMS = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2_sqrt_d": layout.L2_NORM}


@distinct
class Wire:
    """A plan as the worker reads it."""

    head: bytes  # which says all but the digests and the lines
    # In forward order: name, lines of each group, whether anything is changed, what is captured (layout.BEFORE, AFTER).
    sites: Sequence[tuple[str, Sequence[int], bool, int]]
    dictionaries: Sequence[str]
    digests: Sequence[bytes]  # one for each vector, DIGEST bytes long
    edits: int  # number of changes; each counts its tokens in a column of its own
    dose: bool  # whether to measure how much each site changes each token
    readouts: Sequence[Sequence[Any]]  # as encode.py makes them
    lines: NDArray[np.int32]  # [entries, LINE], ordered as in the table


def decode(plan: bytes) -> Wire:
    """The inverse of ``encode`` for a plan that is not empty."""
    at = 4 + int.from_bytes(plan[:4], "little")
    head = plan[4:at]
    (sites, dictionaries, vectors, edits, dose), readouts = _parsed(head)
    digests = [plan[at + DIGEST * n : at + DIGEST * (n + 1)] for n in range(vectors)]
    lines = np.frombuffer(plan, "<i4", offset=at + DIGEST * vectors).reshape(-1, LINE)
    return Wire(head, sites, dictionaries, digests, edits, dose, readouts, lines)


@lru_cache(64)
def _parsed(head: bytes) -> tuple[Any, ...]:
    """The inverse, with readouts."""
    return tuple(json.loads(str(head, "ascii")))


def norm_of(info: CoderInfo) -> int:
    """The bit of a dictionary's input norm, or 0."""
    return layout.L2_NORM if info.reads_pregain else _NORMS[info.in_norm]
