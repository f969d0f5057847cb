"""What the Triton kernels share: how to read entries, weights and the stream, and the law of a delta. No edits."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels import layout

LIMIT = tl.constexpr(layout.LIMIT)
COUNTERS = tl.constexpr(layout.COUNTERS)
PUBLISHED = tl.constexpr(layout.PUBLISHED)
STEPS = tl.constexpr(layout.STEPS)
HEAD_WORDS = tl.constexpr(layout.HEAD)
SPAN = tl.constexpr(layout.SPAN)
SITE_STRIDE = tl.constexpr(layout.SITE_STRIDE)
VECTOR = tl.constexpr(layout.VECTOR)
ENTRY = tl.constexpr(layout.ENTRY)
BEGIN = tl.constexpr(layout.BEGIN)
END = tl.constexpr(layout.END)
PARTS = tl.constexpr(layout.PARTS)
KIND = tl.constexpr(layout.KIND)
DENSE_BASE = tl.constexpr(layout.DENSE_BASE)
DENSE_SIZE = tl.constexpr(layout.DENSE_SIZE)
DENSE_NORM = tl.constexpr(layout.DENSE_NORM)
GROUPS = tl.constexpr(layout.GROUPS)
LONE = tl.constexpr(layout.LONE)
MANY = tl.constexpr(layout.MANY)
GATED = tl.constexpr(layout.GATED)
DOSE = tl.constexpr(layout.DOSE)
DOSE_MAX = tl.constexpr(layout.DOSE_MAX)
DOSE_SUM = tl.constexpr(layout.DOSE_SUM)
DOSE_TOKENS = tl.constexpr(layout.DOSE_TOKENS)
DOSE_LIMITED = tl.constexpr(layout.DOSE_LIMITED)
SLOT = tl.constexpr(layout.SLOT)
GROUP_END = tl.constexpr(layout.GROUP_END)
LO = tl.constexpr(layout.LO)
HI = tl.constexpr(layout.HI)
FLAGS = tl.constexpr(layout.FLAGS)
GATES = tl.constexpr(layout.GATES)
BASE = tl.constexpr(layout.BASE)
SIZE = tl.constexpr(layout.SIZE)
TOP_K = tl.constexpr(layout.TOP_K)
MUL = tl.constexpr(layout.MUL)
ADD = tl.constexpr(layout.ADD)
LOW = tl.constexpr(layout.LOW)
HIGH = tl.constexpr(layout.HIGH)
BIAS = tl.constexpr(layout.BIAS)
THRESHOLD = tl.constexpr(layout.THRESHOLD)
GAIN = tl.constexpr(layout.GAIN)
ONLY_IF_ACTIVE = tl.constexpr(layout.ONLY_IF_ACTIVE)
RANKED = tl.constexpr(layout.RANKED)
MAGNITUDE = tl.constexpr(layout.MAGNITUDE)
MATCH = tl.constexpr(layout.MATCH)
LAYER_NORM = tl.constexpr(layout.LAYER_NORM)
L2_NORM = tl.constexpr(layout.L2_NORM)
RECONSTRUCT = tl.constexpr(layout.RECONSTRUCT)
GATE = tl.constexpr(layout.GATE)
COUNTER = tl.constexpr(layout.COUNTER)
BARE = tl.constexpr(layout.BARE)
NORMED = tl.constexpr(layout.NORMED)
PAIR = tl.constexpr(layout.PAIR)
TILE = tl.constexpr(layout.TILE)
PARTIALS = tl.constexpr(layout.PARTIALS)
SHORTEST = tl.constexpr(layout.SHORTEST)
LARGEST = tl.constexpr(layout.LARGEST)
LARGEST_HALF = tl.constexpr(layout.LARGEST_HALF)
ITEMS = tl.constexpr(1024)  # items of the work list that are searched at once


# What a kernel must not be specialised on, since another variant would compile while serving. Slices of larger tensors
# (site, norm_weight) may have any alignment.
TILE_ARGUMENTS = (
    "norm_weight",
    "site",
    "work",
    "positions",
    "counts",
    "eps",
    "weight_offset",
    "stride_table",
    "stride_counts",
    "stride_counters",
)


@triton.jit
def rows(weights, starts, want, cols, WIDTH: tl.constexpr):
    """weights[slot, cols] for each wanted slot, zeros for the others: [CHUNK, BLOCK]; starts = slot * WIDTH, int64."""
    mask = want[:, None] & (cols < WIDTH)[None, :]
    return tl.load(weights + starts[:, None] + cols[None, :], mask=mask, other=0.0)


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
def unpack(entry, inside):
    """Slot, window, flags, gates and numbers of each entry; 0 for those outside. Unused words are not loaded."""
    return (
        word(entry + SLOT, inside),
        word(entry + LO, inside),
        word(entry + HI, inside),
        word(entry + FLAGS, inside),
        word(entry + GATES, inside),
        real(entry + MUL, inside),
        real(entry + ADD, inside),
        real(entry + LOW, inside),
        real(entry + HIGH, inside),
        real(entry + BIAS, inside),
        real(entry + THRESHOLD, inside),
        real(entry + GAIN, inside),
    )


@triton.jit
def reads(mul, low, high, flags):
    """Whether a delta depends on f; a plain addition needs no encoder row."""
    return (mul != 0.0) | (low > float("-inf")) | (high < float("inf")) | ((flags & ONLY_IF_ACTIVE) != 0)


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
