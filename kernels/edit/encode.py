"""The Triton kernel that encodes whole dictionaries for tokens whose edits need it. It applies no activation."""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saesteer.kernels.edit.entries import items_of, kernel, tile
from saesteer.kernels.edit.words import DENSE_BASE, DENSE_NORM, DENSE_SIZE, HEAD, L2_NORM, LAYER_NORM, PAIR, SPAN, WHOLE


@kernel("stream", "second", "table", "w_enc", "b_enc", "activations")
def encode_kernel(
    stream,  # [T, WIDTH]
    second,  # [T, WIDTH] for PAIR
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    w_enc,  # [slots, WIDTH]
    b_enc,  # [slots] fp32
    activations,  # [most_tokens, 2, stride_dense] fp32, from first_token on; the second half is not written
    stride_table,
    stride_dense,  # features of the largest dictionary at this site
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
    """activations[token - first_token, i] = scale_in * (x . w_enc[base + i]) + b_enc[base + i], for tokens that ask."""
    if PDL:
        gdc_launch_dependents()  # the edit kernel waits for this one to end, but is set up meanwhile
        gdc_wait()
    span = tl.load(work + 2)
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work) * (tl.load(work + 3) & WHOLE))  # none if nobody asks
    first_item = 0
    if ROUNDS:
        first_item, n_items = items_of(work, n_items, first_token, most_tokens)
    units = n_items * span
    number = HEAD + SPAN * site_number
    unit_tiles = (units + BLOCK_M - 1) // BLOCK_M
    feature_tiles = (stride_dense + BLOCK_N - 1) // BLOCK_N

    for it in range(tl.program_id(0), unit_tiles * feature_tiles, tl.num_programs(0)):
        # Tiles of the same features are consecutive, so that their weights are read from memory once.
        unit = (it % unit_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        first = (it // unit_tiles) * BLOCK_N
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
        left = (listed & (sizes > first) & (place >= 0) & (place < most_tokens)).to(tl.int32)
        # One dictionary after the other; usually there is one or none.
        while tl.max(left, axis=0) > 0:
            base = tl.min(tl.where(left > 0, bases, 2147483647), axis=0)
            mine = (left > 0) & (bases == base)
            size = tl.max(tl.where(mine, sizes, 0), axis=0)
            feature = first + tl.arange(0, BLOCK_N)
            held = feature < size
            x_at = token * WIDTH
            e_at = (base + feature).to(tl.int64) * WIDTH
            bias = tl.load(b_enc + base + feature, mask=held, other=0.0)  # early, so that it comes with the weights
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
                if EXACT:
                    acc = tl.dot(x.to(tl.float32), tl.trans(e.to(tl.float32)), acc, input_precision="ieee")
                else:
                    acc = tl.dot(x, tl.trans(e), acc)
            if HAS_NORMS:
                std = tl.sqrt(tl.maximum(squares - total * total / WIDTH, 0.0) / (WIDTH - 1.0))
                length = tl.maximum(tl.sqrt(length), 1e-12)
                into = tl.where((norms & LAYER_NORM) != 0, 1.0 / (std + 1e-5), 1.0)
                into = tl.where((norms & L2_NORM) != 0, tl.sqrt(WIDTH * 1.0) / length, into)
                acc *= into[:, None]
            acc += bias[None, :]
            out = activations + place[:, None] * (2 * stride_dense) + feature[None, :]
            tl.store(out, acc, mask=mine[:, None] & held[None, :])
            left = tl.where(mine, 0, left)
