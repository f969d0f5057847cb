"""The Triton kernel for long spans of tokens with a single entry: they stream past weights held in registers.

It does the rows that layout.py calls LONE. It sums in another order than edit.py.
"""

# mypy: disable-error-code="no-untyped-def"
# (a jitted function's arguments have no Python types)

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from saesteer.kernels.edit.entries import kernel, law, reads, rounded, tile, unpack
from saesteer.kernels.edit.row import columns, plus, put, times, total, zeros
from saesteer.kernels.edit.words import BEGIN, COUNTER, HEAD, KIND, LONE, MATCH, NORMED, PAIR, SPAN, TILE


@kernel("stream", "second", "norm_weight", "table", "w_enc", "w_dec")
def lone_kernel(
    stream,  # [T, WIDTH], in place
    second,  # [T, WIDTH], in place; None for the bare form
    norm_weight,  # [WIDTH] or None
    table,  # [rows, stride_table] int32
    site,  # [1] int32
    work,  # [items + 1, 4] int32
    positions,  # [tokens] of each token in its request
    w_enc,  # [slots, WIDTH]
    w_dec,  # [slots, WIDTH]
    counts,  # [rows, counters] int32
    eps,
    weight_offset,
    stride_table,
    stride_counts,
    stride_counters,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row's block
    LEAST: tl.constexpr,  # tokens of a turn
    AT_ONCE: tl.constexpr,  # of these tokens
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,  # whether it may begin while the kernel in front of it ends
):
    """x[token] += the delta of its row's only entry at this site. A program takes a part of an item per turn."""
    if PDL:
        gdc_wait()
    site_number = tl.load(site)
    n_items = tl.where(site_number < 0, 0, tl.load(work))
    number = HEAD + SPAN * site_number
    cols = columns(WIDTH, BLOCK)
    dtype: tl.constexpr = stream.dtype.element_ty
    if FORM == NORMED and HAS_WEIGHT:
        factors = [tl.load(norm_weight + col, mask=col < WIDTH, other=0.0) for col in cols]

    # As many tokens per turn as make one turn for each program: four loads wait for one another before its first token.
    even = (n_items * TILE + tl.num_programs(0) - 1) // tl.num_programs(0)
    turn = tl.minimum(tl.maximum((even + AT_ONCE - 1) // AT_ONCE * AT_ONCE, LEAST), TILE)
    shares = (TILE + turn - 1) // turn
    for it in range(tl.program_id(0), n_items * shares, tl.num_programs(0)):
        item = work + 4 + (it // shares) * 4
        first = (it % shares) * turn
        first_token = tl.load(item).to(tl.int64)
        row = tl.load(item + 1).to(tl.int64)
        length = tl.load(item + 2)
        entries = table + row * stride_table
        begin = tl.load(entries + number + BEGIN)
        kind = tl.load(entries + number + KIND)
        if ((kind & LONE) != 0) & (first < length):
            first_position = tl.load(positions + first_token).to(tl.int32)  # the others follow it
            entry = entries + begin
            slot, lo, hi, flags, _, mul, add, low, high, bias, threshold, gain = unpack(entry, True)
            slot = slot.to(tl.int64) * WIDTH
            wanted = tl.where(reads(mul, low, high, flags), WIDTH, 0)
            weights = [
                (
                    tl.load(w_enc + slot + col, mask=col < wanted, other=0.0),
                    tl.load(w_dec + slot + col, mask=col < WIDTH, other=0.0),
                )
                for col in cols
            ]
            hits = tl.zeros([AT_ONCE], tl.int32)
            for done in tl.range(0, tl.minimum(turn, length - first), AT_ONCE, num_stages=STAGES):
                within = first + done + tl.arange(0, AT_ONCE)
                exists = within < length
                start = ((first_token + within) * WIDTH)[:, None]
                there = exists[:, None]
                at = [start + col[None, :] for col in cols]
                x = [
                    tile(stream, second, start + col[None, :], there & (col < WIDTH)[None, :], FORM).to(tl.float32)
                    for col in cols
                ]
                pre = tl.sum(total(times(x, [pair[0].to(tl.float32)[None, :] for pair in weights])), axis=1) + bias
                f = tl.where(pre > threshold, pre, 0.0)
                position = first_position + within
                applies = exists & (lo <= position) & (position < hi)
                delta = law(f, applies, flags, mul, add, low, high, gain)
                keep = delta != 0.0
                hits += keep.to(tl.int32)
                if (flags & MATCH) != 0:
                    delta *= tl.sqrt(tl.sum(total(times(x, x)), axis=1))
                change = [delta[:, None] * pair[1].to(tl.float32)[None, :] for pair in weights]
                y = [rounded(block, dtype) for block in plus(x, change)]
                masks = [keep[:, None] & (col < WIDTH)[None, :] for col in cols]
                put(stream, at, y, masks)
                if FORM == PAIR:
                    put(second, at, zeros(y), masks)
                if FORM == NORMED:
                    z = [block.to(tl.float32) for block in y]
                    scale = tl.rsqrt(tl.sum(total(times(z, z)), axis=1) / WIDTH + eps)
                    z = [block * scale[:, None] for block in z]
                    if HAS_WEIGHT:
                        z = times(z, [(part.to(tl.float32) + weight_offset)[None, :] for part in factors])
                    put(second, at, z, masks)
            many = tl.sum(hits, axis=0)
            if many > 0:
                counter = counts + row * stride_counts + (flags >> COUNTER) * stride_counters
                tl.atomic_add(counter, many, sem="relaxed")
