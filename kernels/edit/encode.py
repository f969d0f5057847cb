"""The Triton kernel that encodes whole dictionaries for tokens whose edits need it. It applies no activation."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saesteer.kernels.edit.dense import WORD, room
from saesteer.kernels.edit.entries import items_of, kernel, product, tile
from saesteer.kernels.edit.words import (
    DENSE_ALL,
    DENSE_BASE,
    DENSE_NORM,
    DENSE_SIZE,
    HEAD,
    L2_NORM,
    LAYER_NORM,
    PAIR,
    SPAN,
    WHOLE,
)


@kernel("stream", "second", "table", "w_enc", "b_enc", "threshold", "activations")
def encode_kernel(
    stream,  # [T, WIDTH]
    second,  # [T, WIDTH] for PAIR
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    w_enc,  # [slots, WIDTH]
    b_enc,  # [slots] fp32
    threshold,  # [slots] fp32
    activations,  # [most_tokens, 2, room(stride_dense)] fp32, from first_token on; the second half is not written
    stride_table,
    stride_dense,  # features of the largest dictionary at this site, and one more if they are odd
    first_token,
    most_tokens,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROUNDS: tl.constexpr,  # whether this launch does only some of the step's tokens
    EXACT: tl.constexpr,  # stream and weights do not share a 16-bit dtype: products in fp32
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """activations[token - first_token, i] = scale_in * (x . w_enc[base + i]) + b_enc[base + i], for tokens that ask.

    Bit i of the int32 words behind them, from stride_dense on, says whether that is above threshold[base + i]. What is
    not, nearly all, may not be stored where the site's span does not ask for it.
    """
    if PDL:
        gdc_wait()
        # The edit kernel begins with what does not depend on this one. So only now, as it does not wait for others.
        gdc_launch_dependents()
    span = tl.load(work + 2)
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work) * (tl.load(work + 3) & WHOLE))  # none if nobody asks
    first_item = 0
    if ROUNDS:
        first_item, n_items = items_of(work, n_items, first_token, most_tokens)
    units = n_items * span
    number = HEAD + SPAN * site_number
    unit_tiles = (units + BLOCK_M - 1) // BLOCK_M
    # A program keeps its tokens and goes through features; neighbours have the same ones, which are read once.
    across = tl.maximum(tl.minimum(unit_tiles, tl.num_programs(0)), 1)
    along = tl.num_programs(0) // across
    first_unit = tl.where(tl.program_id(0) < across * along, tl.program_id(0) % across, unit_tiles)

    for unit_tile in range(first_unit, unit_tiles, across):
        unit = unit_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        item = work + 4 + (first_item + unit // span) * 4
        within = unit % span
        listed = unit < units
        listed = listed & (within < tl.load(item + 2, mask=listed, other=0))
        row = tl.load(item + 1, mask=listed, other=0).to(tl.int64)
        here = table + row * stride_table + number
        bases = tl.load(here + DENSE_BASE, mask=listed, other=0)
        sizes = tl.load(here + DENSE_SIZE, mask=listed, other=0)
        norms = tl.load(here + DENSE_NORM, mask=listed, other=0)
        token = tl.load(item, mask=listed, other=0).to(tl.int64) + within
        place = token - first_token
        x_at = token * WIDTH
        out = activations + place[:, None] * (2 * room(stride_dense))
        everything = (norms & DENSE_ALL) != 0
        left = (listed & (sizes > 0) & (place >= 0) & (place < most_tokens)).to(tl.int32)
        # One dictionary after the other; usually there is one or none.
        while tl.max(left, axis=0) > 0:
            base = tl.min(tl.where(left > 0, bases, 2147483647), axis=0)
            mine = (left > 0) & (bases == base)
            size = tl.max(tl.where(mine, sizes, 0), axis=0)
            left = tl.where(mine, 0, left)
            for first in range(tl.program_id(0) // across * BLOCK_N, size, along * BLOCK_N):
                feature = first + tl.arange(0, BLOCK_N)
                held = feature < size
                e_at = (base + feature).to(tl.int64) * WIDTH
                # Early, so that they come with the weights.
                bias = tl.load(b_enc + base + feature, mask=held, other=0.0)
                least = tl.load(threshold + base + feature, mask=held, other=0.0)
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                squares = tl.zeros([BLOCK_M], tl.float32)
                length = tl.zeros([BLOCK_M], tl.float32)
                if HAS_NORMS:  # the variance in one pass, around an element of the row itself
                    near = tl.load(stream + x_at, mask=mine, other=0.0).to(tl.float32)
                    if FORM == PAIR:
                        near += tl.load(second + x_at, mask=mine, other=0.0).to(tl.float32)
                for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
                    cols = start + tl.arange(0, BLOCK_K)
                    inside = cols < WIDTH
                    x = tile(stream, second, x_at[:, None] + cols[None, :], mine[:, None] & inside[None, :], FORM)
                    e = tl.load(w_enc + e_at[:, None] + cols[None, :], mask=held[:, None] & inside[None, :], other=0.0)
                    if HAS_NORMS:
                        off = tl.where(inside[None, :], x.to(tl.float32) - near[:, None], 0.0)
                        total += tl.sum(off, axis=1)
                        squares += tl.sum(off * off, axis=1)
                        length += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
                    acc = product(x, e, acc, EXACT)
                if HAS_NORMS:
                    std = tl.sqrt(tl.maximum(squares - total * total / WIDTH, 0.0) / (WIDTH - 1.0))
                    length = tl.maximum(tl.sqrt(length), 1e-12)
                    into = tl.where((norms & LAYER_NORM) != 0, 1.0 / (std + 1e-5), 1.0)
                    into = tl.where((norms & L2_NORM) != 0, tl.sqrt(WIDTH * 1.0) / length, into)
                    acc *= into[:, None]
                acc += bias[None, :]
                active = (held[None, :] & (acc > least[None, :])).to(tl.int32)
                # Two neighbours at once, as a thread has them; there is room for one more. Of a few tokens, all are
                # stored: to choose takes longer.
                if BLOCK_M <= 16:
                    pairs = feature // 2 < (size + 1) // 2
                    tl.store(out + feature[None, :], acc, mask=mine[:, None] & pairs[None, :])
                else:
                    pairs = first + tl.arange(0, BLOCK_N // 2)[None, :, None] * 2
                    some = tl.max(tl.reshape(active, [BLOCK_M, BLOCK_N // 2, 2]), axis=2)[:, :, None] > 0
                    some |= everything[:, None, None] & (pairs < size)
                    places = out[:, :, None] + pairs + tl.arange(0, 2)[None, None, :]
                    both = tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2])
                    tl.store(places, both, mask=mine[:, None, None] & some)
                bits = tl.reshape(active, [BLOCK_M, BLOCK_N // WORD, WORD]) << tl.arange(0, WORD)[None, None, :]
                word = first // WORD + tl.arange(0, BLOCK_N // WORD)
                words = (out + stride_dense).to(tl.pointer_type(tl.int32)) + word[None, :]
                tl.store(words, tl.sum(bits, axis=2), mask=mine[:, None] & (word * WORD < size)[None, :])
