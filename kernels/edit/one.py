"""What is done with a token of a row that layout.py calls LONE or SHORT: its only entry, load to store.

The usual decoding step runs through this code between two of the model's products. So all that such a row cannot ask
for is left out, and its numbers stay scalars. The edit kernel calls it for such rows.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from saesteer.kernels.edit.entries import law, reads, tile
from saesteer.kernels.edit.row import plus, times, total
from saesteer.kernels.edit.store import gains, store
from saesteer.kernels.edit.words import COUNTER, HELD, MATCH, READ


@triton.jit
def edit_one(
    stream,
    second,
    at,  # of the token
    numbers,  # of the entry, as `unpack` has them
    source,  # SIZE of the entry: of HELD, the register of f
    here,  # position of the token
    cols,  # its columns
    weights,  # w_enc and w_dec
    register,  # the token's registers
    counter,  # counts of this row, and their stride
    norm,  # its weight, eps and offset
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """x += delta * w_dec[slot] for one token, stored in every form where the delta is not 0; READ fills a register."""
    w_enc, w_dec = weights
    counts, stride_counters = counter
    x = [tile(stream, second, at + col, col < WIDTH, FORM).to(tl.float32) for col in cols]
    slot, lo, hi, flags, gates, mul, add, low, high, bias, threshold, gain = numbers
    start = slot.to(tl.int64) * WIDTH
    asks = (flags & READ) != 0
    held = (flags & HELD) != 0
    applies = (lo <= here) & (here < hi) & (asks == 0)
    encoded = tl.where((applies & reads(mul, low, high, flags)) | asks, WIDTH, 0)
    decoded = tl.where(applies, WIDTH, 0)
    found = tl.load(register + source, mask=held, other=0.0)
    encoder = [tl.load(w_enc + start + col, mask=col < encoded, other=0.0) for col in cols]
    decoder = [tl.load(w_dec + start + col, mask=col < decoded, other=0.0) for col in cols]
    factors = gains(norm, cols, WIDTH, FORM, HAS_WEIGHT)
    pre = tl.sum(total(times(x, [block.to(tl.float32) for block in encoder])), axis=0) + bias
    f = tl.where(held, found, tl.where(pre > threshold, pre, 0.0))
    tl.store(register + gates, tl.minimum(tl.maximum(mul * f + add, low), high), mask=asks)
    delta = law(f, applies, flags, mul, add, low, high, gain)
    changed = delta != 0.0
    tl.atomic_add(counts + (flags >> COUNTER) * stride_counters, 1, mask=changed, sem="relaxed")
    if (flags & MATCH) != 0:
        delta *= tl.sqrt(tl.sum(total(times(x, x)), axis=0))
    x = plus(x, [delta * block.to(tl.float32) for block in decoder])
    store(stream, second, at, x, cols, changed, norm, factors, WIDTH, FORM, HAS_WEIGHT)
