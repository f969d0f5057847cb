"""Memory in which rows come home, and which the process that writes them has, too.

It is made once, and its pages are locked then: to lock new ones takes a step milliseconds.
"""

import os
import weakref
from mmap import mmap

import torch
from torch import Tensor

from saesteer.engine.filer import HELD

_ALIGNED = 512  # bytes that a part is a multiple of, as any dtype needs


class Shared:
    """A block of memory without a name, parts of which are taken and given back.

    Args:
        nbytes: of the block.
        locked: whether its pages are locked, so that a device copies there by itself; False where there is no GPU.

    Raises:
        RuntimeError: they cannot be locked.
    """

    def __init__(self, nbytes: int, *, locked: bool) -> None:
        self.file = os.memfd_create("saesteer")
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, _ALIGNED + nbytes)
        self._bytes = torch.frombuffer(mmap(self.file, 0), dtype=torch.uint8)
        self.landed = self._bytes[:HELD].view(torch.int64)  # how many copies have
        self._free = [(_ALIGNED, _ALIGNED + nbytes)]  # from and to, in order; no two are neighbours
        if locked:
            self._lock()

    def _lock(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = runtime.cudaHostRegister(self._bytes.data_ptr(), self._bytes.nbytes, 0)
        if int(failed):
            raise RuntimeError(
                f"CUDA cannot lock {self._bytes.nbytes} bytes of memory for what requests read: {failed}"
            )
        weakref.finalize(self, _unlock, self._bytes).atexit = False

    def take(self, nbytes: int) -> int | None:
        """The first byte of a part that is long enough; None if none is."""
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        for number, (lo, hi) in enumerate(self._free):
            if size <= hi - lo:
                self._free[number : number + 1] = [(lo + size, hi)] * (size < hi - lo)
                return lo
        return None

    def at(self, lo: int, nbytes: int) -> Tensor:
        """Bytes of it, uint8."""
        return self._bytes[lo : lo + nbytes]

    def give(self, lo: int, hi: int) -> None:
        """Nobody needs these bytes any more, a part that was taken."""
        self._free.append((lo, -(-hi // _ALIGNED) * _ALIGNED))
        self._free.sort()
        joined = self._free[:1]
        for begin, end in self._free[1:]:
            if begin == joined[-1][1]:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
