"""What the Triton kernels share: reading of entries, weights and streams, products, the law of a delta. No edits."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton
import triton.language as tl

from saesteer.kernels.edit.words import (
    ADD,
    FLAGS,
    HELD,
    HIGH,
    LARGEST,
    LARGEST_HALF,
    LO,
    ONLY_IF_ACTIVE,
    PAIR,
    SLOT,
    THRESHOLD,
    TOP_K,
)

ITEMS = tl.constexpr(1024)  # items of the work list that are searched at once


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit`` for a kernel that is specialised on the alignment of these tensors and on nothing else.

    Another variant would compile while serving. Streams are always aligned, and weights keep their address for life,
    so that warming up compiles what each needs. A slice (site) may be aligned at one site and not at the next, and a
    number may be 1 or divisible by 16 in some calls only.
    """

    def jitted(function: Callable[..., None]) -> Any:
        given = [name for name, one in signature(function).parameters.items() if one.annotation is one.empty]
        return triton.jit(function, do_not_specialize=[name for name in given if name not in aligned])

    return jitted


@triton.jit
def rows(weights, starts, want, cols, WIDTH: tl.constexpr, SHARED: tl.constexpr = False):
    """weights[slot, cols] for each wanted slot, zeros for the others: [CHUNK, BLOCK]; starts = slot * WIDTH, int64.

    SHARED: other programs of this launch wrote them.
    """
    level: tl.constexpr = ".cg" if SHARED else ""
    mask = want[:, None] & (cols < WIDTH)[None, :]
    return tl.load(weights + starts[:, None] + cols[None, :], mask=mask, other=0.0, cache_modifier=level)


@triton.jit
def kept(address):
    """A word of the table or the work list. Each step reads it again, and often one word gives the address of the next.
    The model's weights go through the cache between two sites and should evict something else."""
    return tl.load(address, eviction_policy="evict_last")


@triton.jit
def word(entry, inside):
    """A kept word of each entry; 0 for those outside."""
    return tl.load(entry, mask=inside, other=0, eviction_policy="evict_last")


@triton.jit
def real(entry, inside):
    """A kept word of each entry as float32; 0 for those outside."""
    return word(entry, inside).to(tl.float32, bitcast=True)


@triton.jit
def _pair(entry, inside):
    """Two kept words of each entry, the first at an even offset, in one load; 0 for those outside."""
    both = tl.load(entry.to(tl.pointer_type(tl.int64)), mask=inside, other=0, eviction_policy="evict_last")
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _floats(entry, inside):
    """The same as float32."""
    first, second = _pair(entry, inside)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def unpack(entry, inside):
    """Slot, window, flags, gates and numbers of each entry; 0 for those outside. Unused words are not loaded."""
    slot, _ = _pair(entry + SLOT, inside)
    lo, hi = _pair(entry + LO, inside)
    flags, gates = _pair(entry + FLAGS, inside)
    _, mul = _floats(entry + TOP_K, inside)
    add, low = _floats(entry + ADD, inside)
    high, bias = _floats(entry + HIGH, inside)
    threshold, gain = _floats(entry + THRESHOLD, inside)
    return slot, lo, hi, flags, gates, mul, add, low, high, bias, threshold, gain


@triton.jit
def reads(mul, low, high, flags):
    """Whether a delta depends on f that is read here; a plain addition needs no encoder row."""
    depends = (mul != 0.0) | (low > float("-inf")) | (high < float("inf")) | ((flags & ONLY_IF_ACTIVE) != 0)
    return depends & ((flags & HELD) == 0)


@triton.jit
def law(f, applies, flags, mul, add, low, high, gain):
    """The delta of an entry: gain * (f' - f), 0 where it does not apply."""
    delta = gain * tl.minimum(tl.maximum(mul * f + add, low - f), high - f)
    skipped = ((flags & ONLY_IF_ACTIVE) != 0) & (f == 0.0)
    return tl.where(applies & (skipped == 0), delta, 0.0)


@triton.jit
def tile(stream, second, at, mask, FORM: tl.constexpr):
    """A tile of the stream before the edits, rounded to its dtype."""
    x = tl.load(stream + at, mask=mask, other=0.0)
    if FORM == PAIR:
        addend = tl.load(second + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def product(x, rows, acc, EXACT: tl.constexpr):
    """acc + x . row for each row of `rows`, in fp32; EXACT: its factors, too."""
    if EXACT:
        return tl.dot(x.to(tl.float32), tl.trans(rows.to(tl.float32)), acc, input_precision="ieee")
    else:  # or Triton would compile both
        return tl.dot(x, tl.trans(rows), acc)


@triton.jit
def finite(x, dtype: tl.constexpr):
    """x, made finite in the stream's dtype whatever the edits are: an overflow there would outlive its request."""
    largest: tl.constexpr = LARGEST_HALF if dtype == tl.float16 else LARGEST
    return tl.clamp(x, -largest, largest)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """An edited x in the stream's dtype."""
    return finite(x, dtype).to(dtype)


@triton.jit
def items_of(work, n_items, first_token, most_tokens):
    """The items with tokens in [first_token, first_token + most_tokens): the first one, and their number."""
    before = 0
    until = 0
    for start in range(0, n_items, ITEMS):
        at = start + tl.arange(0, ITEMS)
        inside = at < n_items
        token = tl.load(work + 4 + at * 4, mask=inside, other=0)
        length = tl.load(work + 4 + at * 4 + 2, mask=inside, other=0)
        before += tl.sum((inside & (token + length <= first_token)).to(tl.int32), axis=0)
        until += tl.sum((inside & (token < first_token + most_tokens)).to(tl.int32), axis=0)
    return before, tl.maximum(until - before, 0)
