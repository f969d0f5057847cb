"""Page-locked host memory in which rows come home, made once: to lock new pages takes a step milliseconds."""

from collections import deque
from weakref import finalize

import torch
from torch import Tensor

_ALIGNED = 512  # bytes that a part is a multiple of, as any dtype needs


class Pinned:
    """A block of memory, of which each step takes a part; a part comes back when nobody holds its bytes any more.

    Args:
        nbytes: of the block.
        locked: whether its pages are locked, so that a device copies there by itself; False where there is no GPU.
    """

    def __init__(self, nbytes: int, *, locked: bool) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=locked)
        self._free = [(0, nbytes)]  # from and to, in order; no two are neighbours
        # What has come back since then: any thread may let go of a part, and `copied` alone takes and joins them.
        self._back: deque[tuple[int, int]] = deque()

    def copied(self, rows: Tensor) -> memoryview | None:
        """The bytes of contiguous rows, on their way into a part by the current stream; None if none is long enough."""
        size = -(-rows.nbytes // _ALIGNED) * _ALIGNED
        self._join()
        for number, (lo, hi) in enumerate(self._free):
            if size <= hi - lo:
                self._free[number : number + 1] = [(lo + size, hi)] * (size < hi - lo)
                break
        else:
            return None
        part = self._memory[lo : lo + rows.nbytes]
        part.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        array = part.numpy()
        finalize(array, self._back.append, (lo, lo + size)).atexit = False  # slices of its bytes hold the array, too
        return array.data

    def _join(self) -> None:
        if not self._back:
            return
        while self._back:
            self._free.append(self._back.popleft())
        self._free.sort()
        joined = self._free[:1]
        for lo, hi in self._free[1:]:
            if lo == joined[-1][1]:
                joined[-1] = joined[-1][0], hi
            else:
                joined.append((lo, hi))
        self._free = joined
