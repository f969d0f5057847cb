"""What the parts of an answer wait for in a row: the tokens of which one ends the reasoning. Knows ids, no parser."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from saesteer.kernels import layout
from saesteer.kernels.reference import close_ref_


class Border(NamedTuple):
    """Where the reasoning of a sequence ends, as far as the host knows it."""

    closing: tuple[int, ...]  # ids of which each ends the reasoning by itself, at most MOST_CLOSING of them
    start: int  # position of the first generated token
    found: int = layout.NEVER  # position of the token that ended it, the last one before start if the prompt did

    def after(self, ids: Sequence[int], computed: int) -> "Border":
        """The border of a sequence whose first tokens no step computes any more, such as cached ones.

        Args:
            ids: of these tokens at least.
            computed: how many they are.
        """
        if self.found < self.start:
            return self
        ends = (at for at in range(self.start, computed) if ids[at] in self.closing)
        return self._replace(found=next(ends, layout.NEVER))

    def put(self, words: NDArray[np.int32], sites: int) -> None:
        """Let a row wait for the border, or move its windows there if it is known.

        Args:
            words: of the row; changed in place.
            sites: number of its sites.
        """
        if self.found < layout.NEVER:
            close_ref_(torch.from_numpy(words), sites, self.found)
            return
        closing = self.closing + self.closing[-1:] * (layout.MOST_CLOSING - len(self.closing))
        words[layout.FROM], words[layout.CLOSING : layout.CLOSING + layout.MOST_CLOSING] = self.start, closing
