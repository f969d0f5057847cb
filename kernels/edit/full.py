"""The Triton kernel for long spans of tokens that are only reconstructed: one program decodes a token.

It does the rows that layout.py calls FULL, behind encode.py. Without the edit kernel's other ways it needs few
registers, so that many programs run at once and hide each other's waits for decoder rows. It sums in another order.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.dense import decode, list_active, room
from saesteer.kernels.edit.entries import items_of, kernel, tile, unpack
from saesteer.kernels.edit.row import columns, minus, plus
from saesteer.kernels.edit.store import gains, store
from saesteer.kernels.edit.words import COUNTER, DENSE_BASE, DENSE_SIZE, FULL, HEAD, KIND, ONE, SPAN


@kernel("stream", "second", "norm_weight", "table", "w_dec", "b_dec", "activations")
def full_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    positions,  # [tokens] of each token in its request
    w_dec,  # [slots, WIDTH]
    b_dec,  # [dictionaries, WIDTH] fp32
    counts,  # [rows, counters] int32
    activations,  # [most_tokens, 2, room(stride_dense)] fp32, from first_token on
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    stride_dense,  # features of the site's largest dictionary, and one more if they are odd
    first_token,
    most_tokens,  # this launch does the tokens from first_token on, at most this number
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row's block
    LISTED: tl.constexpr,  # features searched at once
    DECODED: tl.constexpr,  # decoder rows at once
    AHEAD: tl.constexpr,  # as many of these in flight
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,  # whether this launch does only some of the step's tokens
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """x[token] += gain * (decode(f) + b_dec - x) for all tokens of FULL rows, where f is what the encoder has found."""
    if PDL:
        gdc_wait()
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    span = tl.load(work + 2)
    number = HEAD + SPAN * site_number
    first_item = 0
    if ROUNDS:
        first_item, n_items = items_of(work, n_items, first_token, most_tokens)
    cols = columns(WIDTH, BLOCK)
    for it in range(tl.program_id(0), n_items * span, tl.num_programs(0)):
        item = work + 4 + (first_item + it // span) * 4
        token = tl.load(item) + it % span
        row = tl.load(item + 1).to(tl.int64)
        place = token - first_token
        here = table + row * stride_table + number
        mine = (it % span < tl.load(item + 2)) & (place >= 0) & (place < most_tokens)
        if mine & ((tl.load(here + KIND) & FULL) != 0):
            slot, lo, hi, flags, _, _, _, _, _, _, _, gain = unpack(here + ONE, True)
            position = tl.load(positions + token).to(tl.int32)
            if (lo <= position) & (position < hi) & (gain != 0.0):
                base = tl.load(here + DENSE_BASE)
                dense = activations + place.to(tl.int64) * (2 * room(stride_dense))
                words = (dense + stride_dense).to(tl.pointer_type(tl.int32))
                listed = (dense + room(stride_dense)).to(tl.pointer_type(tl.int32))
                many = list_active(words, listed, 0, tl.load(here + DENSE_SIZE), LISTED)
                tl.debug_barrier()
                bias = b_dec + slot.to(tl.int64) * WIDTH
                found = [tl.load(bias + col, mask=col < WIDTH, other=0.0) for col in cols]
                found = decode(found, dense, listed, many, base, w_dec, cols, WIDTH, DECODED, AHEAD)
                at = token.to(tl.int64) * WIDTH
                x = [tile(stream, second, at + col, col < WIDTH, FORM).to(tl.float32) for col in cols]
                x = plus(x, [block * gain for block in minus(found, x)])
                tl.atomic_add(counts + row * stride_counts + (flags >> COUNTER) * stride_counters, 1, sem="relaxed")
                norm = (norm_weight, eps, weight_offset)
                factors = gains(norm, cols, WIDTH, FORM, HAS_WEIGHT)
                store(stream, second, at, x, cols, True, norm, factors, WIDTH, FORM, HAS_WEIGHT)
            tl.debug_barrier()  # what is listed is listed anew
