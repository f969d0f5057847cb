"""What is bound to a site: the tensors that the op uses there and a compiler need not know. Knows no requests.

To add a tensor of the engine, add its field and its check here, and make it in saesteer/engine/engine.py.
No signature changes: ops, layers and launches hand the whole record on, to the kernel that reads the new field.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.arguments import FLOATS, FP32, INT32, INTS, need, need_line, need_table, need_work, wrong
from saesteer.kernels.edit.configs import MAX_WIDTH, TILED_ABOVE, at_once, configs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Bound:
    """The tensors of one site. They keep their addresses for life, since captured CUDA graphs hold these.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or layout.
    """

    index: Tensor  # [1] int32, the site's number in the table; below 0 where there is nothing to do, see layout.py
    table: Tensor  # [rows, words] int32, see layout.py
    work: Tensor  # [max_tokens + 1, 4] int32, see layout.py; filled by ops.map_
    positions: Tensor  # [>= max_tokens] int32 or int64, of each token in its request, where a request's are consecutive
    # [1] int32 on the CPU: the kinds of layout.py that the step's rows have, BEFORE and AFTER for those that only
    # capture, 0 when nobody is steered. It spares launches outside of CUDA graphs; nothing looks at it during capture.
    kinds: Tensor
    w_enc: Tensor  # [slots, d] contiguous, any float dtype
    w_dec: Tensor  # [slots, d], like w_enc; the number of slots may differ
    b_enc: Tensor  # [slots] fp32, read where whole dictionaries are encoded
    threshold: Tensor  # [slots] fp32, like b_enc
    b_dec: Tensor  # [dictionaries, d] fp32, read for reconstructions
    cells: Tensor  # [>= max_tokens] int32, see layout.py; changed in place
    registers: Tensor  # [>= max_tokens, C] fp32, like cells
    scratch: Tensor  # [>= layout.scratch_words] fp32, zeros at first; only the kernels use it, only on a GPU
    # [>= max_tokens, d] any float dtype, see layout.py; changed in place. None where no transcoder is reconstructed.
    kept: Tensor | None = None
    # [>= max_tokens, d] in the dtype of the stream, see layout.py; changed in place. None where nothing is read out.
    before: Tensor | None = None
    after: Tensor | None = None
    dense_size: int  # features of the largest dictionary that an entry may rank or reconstruct here; 0 for none
    has_norms: bool  # whether an entry may ask for an input norm

    def __post_init__(self) -> None:
        slots, width, tokens = self.b_enc.shape[0], self.w_dec.shape[-1], self.work.shape[0] - 1
        words = layout.scratch_words(width, self.dense_size, layout.TILE) if self.w_enc.is_cuda else 0
        need(self.w_dec, "w_dec", FLOATS, "slots", width)
        need(self.w_enc, "w_enc", FLOATS, slots, width)
        if not 1 <= width <= MAX_WIDTH:
            raise wrong(self.w_dec, "w_dec", f"a width of 1 to {MAX_WIDTH}")
        need(self.b_enc, "b_enc", FP32, slots)
        need(self.threshold, "threshold", FP32, slots)
        need(self.b_dec, "b_dec", FP32, "dictionaries", width)
        need(self.index, "index", INT32, 1)
        need_table(self.table)
        need_work(self.work)
        need_line(self.positions, "positions", INTS, tokens)
        need_line(self.cells, "cells", INT32, tokens)
        need(self.registers, "registers", FP32, len(self.cells), "registers")
        if self.kept is not None:
            need(self.kept, "kept", FLOATS, len(self.cells), width)
        for name, captured in (("before", self.before), ("after", self.after)):
            if captured is not None:
                need(captured, name, FLOATS, len(self.cells), width)
        if (self.before is None) != (self.after is None):
            raise ValueError("one of before and after is None: expected both or neither")
        need(self.kinds, "kinds", INT32, 1, host=True)
        need_line(self.scratch, "scratch", FP32, words)

    @property
    def width(self) -> int:
        """The width d of the tensor at this site; sites may differ."""
        return self.w_dec.shape[1]

    def launch_sizes(self, max_tokens: int) -> list[int]:
        """Numbers of tokens that together launch every variant which steps of up to `max_tokens` can launch here."""
        tuned = configs(self.width)
        tables = (tuned.edit, tuned.encode)
        round_ = at_once(self.scratch.numel(), self.width, layout.even(self.dense_size), max_tokens)
        borders = {1, TILED_ABOVE, round_, max_tokens, *(most for table in tables for most, _ in table)}
        return sorted(size for size in borders if 0 < size <= max_tokens)


# By the address of `index`. A record keeps its index alive, so nothing else gets this address meanwhile. This table
# keeps no record alive, so an engine that ends takes its sites along.
_sites: WeakValueDictionary[int, Bound] = WeakValueDictionary()


class Spread(NamedTuple):
    """Of a tensor whose columns are spread evenly over ranks: how all of it is had, and which part is this rank's."""

    gather: Callable[[Tensor], Tensor]  # a part, [tokens, columns] → the whole; on all ranks in the same steps
    rank: Callable[[], int]


_spread: WeakKeyDictionary[Bound, Spread] = WeakKeyDictionary()


def spread(bound: Bound, how: Spread) -> None:
    """Let the op edit the whole where it gets a part; without this, a part is a tensor of the wrong width."""
    _spread[bound] = how


def spread_at(bound: Bound) -> Spread | None:
    """How the site's tensor is spread over ranks, if it is."""
    return _spread.get(bound)


def bind(bound: Bound) -> None:
    """Let the ops find `bound` by the tensor `bound.index`, for as long as the caller keeps `bound`."""
    _sites[bound.index.data_ptr()] = bound


def bound_at(site: Tensor) -> Bound:
    """What is bound to the site.

    Raises:
        ValueError: nothing is.
    """
    try:
        return _sites[site.data_ptr()]
    except KeyError:
        message = "nothing is bound to it: call bind first, and keep what you bind"
        raise ValueError(f"site is a tensor at address {site.data_ptr():#x}: {message}") from None
