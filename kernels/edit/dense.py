"""What the edit kernel does with a dictionary encoded whole: ranks and reconstructions. It encodes nothing."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.entries import real, rows, word
from saesteer.kernels.edit.row import minus, plus, times, total, zeros
from saesteer.kernels.edit.words import (
    COUNTER,
    ENTRY,
    FACTOR,
    FLAGS,
    GAIN,
    GATES,
    HELD,
    HI,
    L2_NORM,
    LAYER_NORM,
    LO,
    MAGNITUDE,
    RANKED,
    READ,
    RECONSTRUCT,
    SCALED,
    SIZE,
    SLOT,
    TOP_K,
)

BLOCK = tl.constexpr(1024)  # activations compared at once
WORD = tl.constexpr(32)  # activations of a word of bits
SCAN = tl.constexpr(16)  # entries searched at once


@triton.jit
def statistics(x, cols, WIDTH: tl.constexpr):
    """Length, mean and standard deviation (over n - 1) of a token."""
    mean = tl.sum(total(x), axis=0) / WIDTH
    off = minus(x, [tl.where(col < WIDTH, mean, 0.0) for col in cols])
    squares = tl.sum(total(times(off, off)), axis=0)
    # The deviation of a single number is NaN, as in the reference.
    return tl.sqrt(tl.sum(total(times(x, x)), axis=0)), mean, tl.sqrt(squares / (WIDTH - 1.0))


@triton.jit
def norms(flags, length, std, WIDTH: tl.constexpr):
    """The factors into the dictionary and out of it, for each entry's flags."""
    root = tl.sqrt(WIDTH * 1.0)
    safe = tl.maximum(length, 1e-12)
    layer = (flags & LAYER_NORM) != 0
    l2 = (flags & L2_NORM) != 0
    into = tl.where(layer, 1.0 / (std + 1e-5), tl.where(l2, root / safe, 1.0))
    out = tl.where(layer, std, tl.where(l2, safe / root, 1.0))
    return into, out


@triton.jit
def rank(dense, mine, own, base, size, magnitude, CHUNK: tl.constexpr):
    """How many features of [base, base + size) come before each entry's: stronger, or equal and of lower index.

    [CHUNK] int32; base and own count from the first feature of `dense`, and size is 0 for entries without a rank.
    """
    strong = tl.abs(mine)
    first = tl.min(tl.where(size > 0, base, 2147483647), axis=0)
    last = tl.max(base + size, axis=0)
    before = tl.zeros([CHUNK], tl.int32)
    for start in range(first, last, BLOCK):
        other = start + tl.arange(0, BLOCK)
        pre = tl.load(dense + other, mask=other < last, other=0.0)[None, :]
        theirs = tl.where(magnitude[:, None], tl.abs(pre), pre)
        ours = tl.where(magnitude, strong, mine)[:, None]
        inside = (other[None, :] >= base[:, None]) & (other[None, :] < (base + size)[:, None])
        beats = (theirs > ours) | ((theirs == ours) & (other[None, :] < own[:, None]))
        before += tl.sum((beats & inside & (other[None, :] != own[:, None])).to(tl.int32), axis=1)
    return before


@triton.jit
def room(stride_dense):
    """Half of `layout.dense_room`, of an even number of features."""
    return stride_dense + (stride_dense + WORD - 1) // WORD


@triton.jit
def _ones(word):
    """How many bits of each word are set: sums of neighbours, in ever larger fields (Warren, Hacker's Delight, 5-1)."""
    some = word - ((word >> 1) & 0x55555555)
    some = (some & 0x33333333) + ((some >> 2) & 0x33333333)
    some = (some + (some >> 4)) & 0x0F0F0F0F
    return (some * 0x01010101) >> 24


@triton.jit
def _least():
    """The lowest int32, below every key."""
    return tl.full([], -2147483648, tl.int32)


@triton.jit
def _key(pre, magnitude):
    """An int32 that has the order of the activations, or of their magnitudes."""
    bits = tl.where(magnitude, tl.abs(pre), pre + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _count(dense, size, magnitude, key, below):
    """How many keys are above `key`, and how many of index below `below` are equal to it."""
    lanes = tl.arange(0, BLOCK)
    above = 0
    equal = 0
    for start in range(0, size, BLOCK):
        at = start + lanes
        keys = _key(tl.load(dense + at, mask=at < size, other=0.0), magnitude)
        above += tl.sum(((at < size) & (keys > key)).to(tl.int32), axis=0)
        equal += tl.sum(((at < tl.minimum(size, below)) & (keys == key)).to(tl.int32), axis=0)
    return above, equal


@triton.jit
def _kth(dense, size, k, magnitude):
    """The key of the k-th strongest feature, and the index below which features with this key are among the k."""
    # The largest key that at least k features reach, bit by bit from the top.
    above, equal = _count(dense, size, magnitude, 0, size)
    key = tl.where(above + equal >= k, 0, _least())
    for bit in range(31):
        tried = key + (1 << (30 - bit))
        above, equal = _count(dense, size, magnitude, tried, size)
        key = tl.where(above + equal >= k, tried, key)
    above, equal = _count(dense, size, magnitude, key, size)
    low = 0
    high = size
    while low < high:
        middle = (low + high) // 2
        _, some = _count(dense, size, magnitude, key, middle)
        enough = above + some >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return key, low


@triton.jit
def _whole(entries, begin, end, here, bits, register):
    """The reconstruction among a group's entries that applies to this token: their number, 0 or 1, and its words."""
    found = 0
    slot = 0
    flags = 0
    size = 0
    k = 0
    gain = 0.0
    for start in range(begin, end, SCAN * ENTRY):
        at = start + tl.arange(0, SCAN) * ENTRY
        inside = at < end
        entry = entries + at
        its_flags = word(entry + FLAGS, inside)
        gates = word(entry + GATES, inside)
        decoded = (its_flags & (RECONSTRUCT | HELD)) == RECONSTRUCT  # what is kept is in its place already
        applies = inside & decoded & ((bits & gates) == gates)
        applies = applies & (word(entry + LO, inside) <= here) & (here < word(entry + HI, inside))
        # Windows of one reconstruction do not overlap, so at most one applies.
        found += tl.sum(applies.to(tl.int32), axis=0)
        slot += tl.sum(word(entry + SLOT, applies), axis=0)
        flags += tl.sum(word(entry + FLAGS, applies), axis=0)
        size += tl.sum(word(entry + SIZE, applies), axis=0)
        k += tl.sum(word(entry + TOP_K, applies), axis=0)
        scaled = applies & ((its_flags & SCALED) != 0)
        factor = tl.load(register + word(entry + FACTOR, scaled), mask=scaled, other=1.0)
        gain += tl.sum(factor * real(entry + GAIN, applies), axis=0)
    found = tl.where(gain == 0.0, 0, found)  # at no strength it changes nothing, as a delta of 0
    return found, slot, flags, size, k, gain


@triton.jit
def list_active(words, listed, begin, until, LISTED: tl.constexpr):
    """List the features of [begin, until) whose bit in `words` is set, in order; their number."""
    many = 0
    for start in range(begin, until, LISTED):
        at = start + tl.arange(0, LISTED // WORD) * WORD
        left = tl.load(words + at // WORD, mask=at < until, other=0)
        ones = _ones(left)
        order = many + tl.cumsum(ones, axis=0) - ones
        many += tl.sum(ones, axis=0)
        while tl.max((left != 0).to(tl.int32), axis=0) > 0:  # each word's lowest bit; few have more than two
            tl.store(listed + order, at + _ones((left & -left) - 1), mask=left != 0)
            order += (left != 0).to(tl.int32)
            left &= left - 1
    return many


@triton.jit
def decode(
    change,
    dense,
    listed,
    many,
    dense_base,
    w_dec,
    cols,
    WIDTH: tl.constexpr,
    DECODED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """change + the decoder rows of the listed features, each times its activation."""
    for one in tl.range(0, many, DECODED, num_stages=AHEAD):
        lanes = one + tl.arange(0, DECODED)
        feature = tl.load(listed + lanes, mask=lanes < many, other=0)
        f = tl.load(dense + feature, mask=lanes < many, other=0.0)
        starts = (dense_base + feature).to(tl.int64) * WIDTH
        decoders = [rows(w_dec, starts, lanes < many, col, WIDTH).to(tl.float32) for col in cols]
        change = plus(change, [tl.sum(f[:, None] * part, axis=0) for part in decoders])
    return change


@triton.jit
def reconstruct(
    entries,  # of the row
    begin,  # word offsets of the group
    end,
    here,  # position of the token
    bits,  # its cells
    register,  # its registers
    x,  # fp32
    cols,  # its columns
    w_dec,
    threshold,
    b_dec,
    dense,  # activations of this token before the activation function, from feature dense_base on
    dense_base,
    dense_size,
    stride_dense,  # features of the site's largest dictionary, and one more if they are odd
    counter,  # counts of this row, and their stride
    share,  # number of this part of the token
    parts,  # of the token
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,  # features searched at once
    DECODED: tl.constexpr,  # decoder rows at once
    AHEAD: tl.constexpr,  # as many of these in flight
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,  # whether the encoder may still be at work
):
    """This part of decode(f) - x, 1 if there is a reconstruction, and its flags. Adds the features in order."""
    change = zeros(x)
    found, slot, flags, size, k, gain = _whole(entries, begin, end, here, bits, register)
    if PDL:
        gdc_wait()
    if found > 0:
        magnitude = (flags & MAGNITUDE) != 0
        key = _least()
        below = size
        if (flags & RANKED) != 0:
            key, below = _kth(dense, size, k, magnitude)
        blocks = (dense_size + LISTED - 1) // LISTED
        each = (blocks + parts - 1) // parts * LISTED
        # Early, so that nothing waits for it. The last part has no other entries to do.
        bias = b_dec + slot.to(tl.int64) * WIDTH
        last = share + 1 == parts
        biased = tl.where(last, WIDTH, 0)
        change = [tl.load(bias + col, mask=col < biased, other=0.0) for col in cols]
        # First list the active features, then add their rows, both in order.
        listed = (dense + room(stride_dense)).to(tl.pointer_type(tl.int32)) + share * each
        until = tl.minimum(share * each + each, dense_size)
        many = 0
        if (flags & RANKED) != 0:
            for start in range(share * each, until, BLOCK):
                at = start + tl.arange(0, BLOCK)
                inside = at < until
                pre = tl.load(dense + at, mask=inside, other=0.0)
                active = inside & (pre > tl.load(threshold + dense_base + at, mask=inside, other=0.0))
                keys = _key(pre, magnitude)
                active = active & ((keys > key) | ((keys == key) & (at < below)) | (at >= size))
                order = tl.cumsum(active.to(tl.int32), axis=0) - 1
                tl.store(listed + many + order, at, mask=active)
                many += tl.sum(active.to(tl.int32), axis=0)
        else:  # the encoder has compared them with their thresholds
            words = (dense + stride_dense).to(tl.pointer_type(tl.int32))
            many = list_active(words, listed, share * each, until, LISTED)
        tl.debug_barrier()
        change = decode(change, dense, listed, many, dense_base, w_dec, cols, WIDTH, DECODED, AHEAD)
        image = tl.where((flags & READ) != 0, 0, flags)  # what a transcoder makes of x is none
        shift = 0.0
        if HAS_NORMS:
            length, mean, std = statistics(x, cols, WIDTH)
            _, out = norms(image, length, std, WIDTH)
            change = [block * out for block in change]
            shift = tl.where((image & LAYER_NORM) != 0, mean, 0.0)
        if last:
            change = plus(change, minus([tl.where(col < WIDTH, shift, 0.0) for col in cols], x))
            tl.atomic_add(counter[0] + (flags >> COUNTER) * counter[1], 1, mask=image == flags, sem="relaxed")
        change = [block * gain for block in change]
    return change, found, flags
