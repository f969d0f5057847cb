"""The layout of the device tensors that the kernels share, in int32 words. It knows nothing of requests or vLLM.

table [rows, width] int32: one row for each running request. Row 0 belongs to nobody and stays empty.

    word 0                number of entries of the row, or 1 if it only reads; 0: nothing is edited or read
    word 1                the largest PARTS of its sites
    word 2                bits: WHOLE and COUNTED
    word 3                position of the first generated token, while entries wait for the end of the reasoning;
                          0: none waits
    word 4                largest dose that a token may get at a site, a float32 bit pattern; 0.0: any dose
    word 5                columns of counts that the row uses
    words 6 and 7         tokens of which each ends the reasoning by itself; one alone stands twice
    from word HEAD        SPAN words for each site: where its entries are, what they need, and, if there is only one,
                          the entry itself
    from ``head(sites)``  all other entries, of ENTRY words each, ordered by site, by group, then as in the request

A group is a run of entries that all read the same x. If a site has gates or reads, they are one group. The words MUL to
GAIN of an entry are float32 bit patterns.

An entry with ANSWER or REASONING edits a part of the generated tokens. The device samples the token that ends the
reasoning, so the entry waits for it: until border_ has found it, an ANSWER has ~HI in place of HI, an empty window, and
a REASONING has all of its window. Then LO of the one and HI of the other move to the position behind that token.

news [words] int32: what a changed batch brings to the device. The map kernel puts it where it belongs:

    VECTOR + width words  for each vector, padded to an even number: two 64-bit addresses, its own width, a word that
                          nobody reads, then its values as float32; width is that of the widest
    a word for each row   of the table: the number of its line below, or -1; padded, and left out if there are no lines
    lines                 new contents of rows, each as long as a row of the table; the counts of these rows become 0

work [max_tokens + 1, 4] int32: work[0] is (number of items, largest PARTS of their rows, span, all bits of their word
2). The items (first token, row, tokens, 0) follow; each has at most ``span`` consecutive tokens
of one request. The list depends on the batch alone: kernels read positions where they need them.

sites [sites, SITE_STRIDE] int32, of which only the first column is used: a site's number, or ~number if no row of the
work list has an entry or a capture there. The op then returns before it looks at a row. The map kernel writes this with
the list.

cells [max_tokens] int32: for each token one bit for each gate of its row, valid from the gate's site to the last site.
registers [max_tokens, C] float32: for each token what its row's reads have found, valid from the read's site on, until
another read of the row takes the register.
kept [max_tokens, width]: for each token what a transcoder makes of what it reads, until it is put in place elsewhere.
before, after [max_tokens, width]: for each token of a row that captures the site's tensor, that tensor as it comes and
as the row's edits leave it, valid until the next step.
counts [rows, counters] int32: how many tokens each edit of the row has changed so far. DOSE_WORDS for each site whose
doses are measured stand behind the edits' columns. A token's dose at a site is |y - x| / max(|x|, SHORTEST), where x
comes into the site and y is what all groups make of it, both made finite, y neither rounded nor limited yet. A token
that no edit changed has no dose.

published [PUBLISHED, 1 + rows * counters] int32, in host memory. Each step in which a listed row has counters fills the
next line, in turn, with its number (0 to STEPS - 1) and, where its rows of counts would stand, the counters that the
listed rows use; what stands elsewhere is of earlier steps. The host can read a line as soon as it can read anything
that the device made after it.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_

NEEDS = 2  # word 2 of a row
FROM = 3  # word 3 of a row
LIMIT = 4  # word 4 of a row
COUNTERS = 5  # word 5 of a row
CLOSING = 6  # first word of MOST_CLOSING
HEAD = 8  # words in front of the sites' spans
ENTRY = 16  # words of an entry
SPAN = 8 + ENTRY  # words of a site's span

# Bits of NEEDS.
WHOLE = 1  # some site needs a whole dictionary encoded
COUNTED = 2  # the row has counters

# A site's span.
BEGIN = 0  # word offset of its first entry in the row
END = 1  # word offset behind its last one
PARTS = 2  # most programs that may share one token; above 1 only for a single group
KIND = 3  # bits, below
DENSE_BASE = 4  # first slot of the dictionary that must be encoded whole
DENSE_SIZE = 5  # number of its features, and of a skip connection's inputs behind them; 0: no entry needs it
DENSE_NORM = 6  # its input norm, as a bit of FLAGS, and DENSE_ALL
GROUPS = 7  # number of its groups, gates included
ONE = 8  # here stands the only entry of a site that has one, so that no load waits for BEGIN, which names this place

DENSE_ALL = 1  # bit of DENSE_NORM: some entry asks for activations that are not above their thresholds

# Bits of KIND. One of the first four names the kernel for the row's longer spans of tokens. LONE and SHORT have a
# short way through the edit kernel.
ANY = 1  # the edit kernel, which can do everything
LONE = 2  # the kernel for a single entry without gates, ranks, reconstruction or input norms
MANY = 4  # the kernel for one group of up to MOST_MANY such entries, none in lengths of x
FULL = 8  # the kernel for a single reconstruction without gates, ranks or input norms, which is not kept for elsewhere
KERNELS = ANY | LONE | MANY | FULL
GATED = 16  # set if some entry writes or reads cells or registers
BEFORE = 32  # the row's tokens are captured as they come
AFTER = 64  # they are captured as the edits leave them
SHORT = 128  # beside ANY: a single entry as of LONE, but for a register that it writes (READ) or has f from (HELD)
DOSE = 16  # from this bit on: the first column of the site's doses, 0 if they are not measured

# An entry.
SLOT = 0  # row of the site's w_enc and w_dec; for READ of w_enc alone, for HELD of w_dec; for RECONSTRUCT of b_dec
GROUP_END = 1  # word offset where this entry's group ends
LO = 2  # first position of the window
HI = 3  # first position behind the window
FLAGS = 4  # bits below, and the entry's column in counts from bit COUNTER on
GATES = 5  # bits of cells that must all be set; for GATE, the bit that it writes; for READ, the register
FACTOR = 6  # for SCALED, the register of the factor
SIZE = 7  # features of the range in which it is ranked, or which is reconstructed; for HELD, the register of f
TOP_K = 8  # most features of the range that are active
MUL = 9
ADD = 10
LOW = 11
HIGH = 12
BIAS = 13
THRESHOLD = 14
GAIN = 15

# Bits of FLAGS.
ONLY_IF_ACTIVE = 1
RANKED = 2  # active only if fewer than TOP_K features of its range come before it; ranges follow each other from
# DENSE_BASE on
MAGNITUDE = 4  # ranked by absolute value; the activation may be negative
MATCH = 8  # the delta is in lengths of x
LAYER_NORM = 16  # the dictionary reads (x - mean) / (std + 1e-5)
L2_NORM = 32  # the dictionary reads x * sqrt(width) / |x|
# x' = the whole decoded dictionary, plus the deltas of the other entries of its group. Features behind SIZE are a skip
# connection's inputs and have no rank. With READ, x' goes into kept; with HELD, it is what is kept.
RECONSTRUCT = 64
GATE = 128  # leaves x alone and writes LOW < f < HIGH into a bit of cells
READ = 256  # leaves x alone and writes min(max(MUL · f + ADD, LOW), HIGH) into a register
HELD = 512  # f is what a register holds; it is neither ranked nor encoded here
SCALED = 1024  # the delta is also multiplied by what a register holds
ANSWER = 2048  # its window begins behind the token that ends the reasoning
REASONING = 4096  # its window ends there
COUNTER = 16

# A site's doses in counts. Tokens are added in any order, so the last digits of a sum may differ from run to run.
DOSE_MAX = 0  # float32 bit pattern, which orders like an integer since no dose is negative
DOSE_SUM = 1  # float32 bit pattern
DOSE_TOKENS = 2
DOSE_LIMITED = 3  # tokens whose dose was above the limit
DOSE_WORDS = 4

# Forms of the op: what its second tensor is.
BARE = 0  # it has none
NORMED = 1  # the RMS norm of the stream, computed anew for edited tokens
PAIR = 2  # an addend: the stream is the sum of both

VECTOR = 6  # words of news in front of a vector's values
VECTOR_WIDTH = 4  # the word with its width

SITE_STRIDE = 4  # words, so that each site's number is aligned as compilers expect of a tensor
PART = 4  # entries of a part, as long as MOST_PARTS is not reached
MOST_MANY = 256
MOST_PARTS = 16
TILE = 64  # most tokens of an item in a step of many tokens
PARTIALS = 1024  # rows of scratch for parts of tokens, and arrivals in front of them
LEAST_ROW = 64  # words of such a row at least
LARGEST = 1e15  # element of an edited stream, so that its squares have a finite sum; NaN becomes this, too
LARGEST_HALF = 32768.0  # the same in fp16: half of its range, since later layers add to the stream
SHORTEST = 1e-12  # smallest |x| that a dose is divided by
MOST_CLOSING = 2  # tokens that may end the reasoning
NEVER = (1 << 31) - 1  # position of what has not come; open windows end here, too
# Steps whose counts the host has. Two are on their way at most, or one more than a pipeline has stages: vLLM begins
# no further one before the oldest was read.
PUBLISHED = 16
STEPS = 1 << 30  # then their numbers start again at 0; a multiple of PUBLISHED


def head(sites: int) -> int:
    """Word offset of a row's first entry: the words before it, rounded up to whole entries."""
    return -(-(HEAD + SPAN * sites) // ENTRY) * ENTRY


def one_at(site: int) -> int:
    """Word offset of the only entry of the site of this number."""
    return HEAD + SPAN * site + ONE


def width(sites: int, max_entries: int) -> int:
    """Words of a table row."""
    return head(sites) + ENTRY * max_entries


def counters(sites: int, max_entries: int) -> int:
    """Columns of counts: at most one for each entry, and the doses of each site that can have one."""
    return max_entries + DOSE_WORDS * min(sites, max_entries)


def even(words: int) -> int:
    """`words` rounded up to an even number, so that 64-bit addresses may follow."""
    return words + words % 2


def vector_words(width: int) -> int:
    """Words of a vector in the news, if the widest has this width."""
    return even(VECTOR + width)


def news_words(table: tuple[int, int], vectors: int, lines: int, width: int) -> int:
    """Words of the news.

    Args:
        table: its rows, and the words of each.
        vectors: number of new vectors.
        lines: number of new rows.
        width: of the widest vector.
    """
    return vectors * vector_words(width) + (even(table[0]) + lines * table[1] if lines else 0)


def span_words(
    flags: Sequence[int],
    *,
    gated: bool,
    groups: int,
    begin: int,
    dense: tuple[int, int, int],
    doses: int = 0,
    captures: int = 0,
) -> list[int]:
    """The words of a site in front of ONE, from which the kernels choose how to run it.

    Args:
        flags: FLAGS of each of its entries.
        gated: whether an entry writes or reads cells.
        groups: number of groups, gates included.
        begin: word offset of the first entry; of a single one, `one_at` its site.
        dense: first slot, size and norm of the dictionary that must be encoded whole; zeros for none.
        doses: column of counts where the site's doses begin; 0: not measured. Only the edit kernel measures them.
        captures: BEFORE, AFTER, both or neither. Of a row with entries, only the edit kernel captures.
    """
    assert 0 <= doses < 1 << 31 - DOSE
    n = len(flags)
    if not n:
        return [begin, begin, 1, ANY | captures, 0, 0, 0, 0] if captures else [0] * ONE
    every = reduce(or_, flags)
    parts = 1
    keeps = all(one & READ and one & RECONSTRUCT for one in flags)
    if groups == 1 and (keeps or not every & (GATE | READ)):
        decodes = every & RECONSTRUCT and any(one & RECONSTRUCT and not one & HELD for one in flags)
        parts = MOST_PARTS if decodes else min(MOST_PARTS, -(-n // PART))
    if captures & AFTER:  # it is complete where one program has all of the token
        parts = 1
    general = RANKED | RECONSTRUCT | LAYER_NORM | L2_NORM | GATE | SCALED
    registers = every & (READ | HELD)
    locked = gated and not (n == 1 and every & READ)  # GATES of a READ is its register
    if not (gated or doses or captures or registers) and n == 1 and every & general == RECONSTRUCT:
        kind = FULL
    elif locked or doses or captures or every & general or (registers and n > 1):
        kind = ANY | GATED * gated | captures | doses << DOSE
    elif n == 1:
        kind = ANY | SHORT if registers else LONE
    else:
        kind = MANY if groups == 1 and n <= MOST_MANY and not every & MATCH else ANY
    only_active = all(one & RECONSTRUCT and not one & RANKED for one in flags)
    base, size, norm = dense
    return [
        begin,
        begin + ENTRY * n,
        parts,
        kind,
        base,
        size,
        norm | DENSE_ALL * (size > 0 and not only_active),
        groups,
    ]


def dense_words(width: int) -> int:
    """Word offset of the dense activations in scratch: behind the arrivals and partial sums of parts of tokens."""
    return PARTIALS * (1 + max(width, LEAST_ROW))


def dense_room(dense_size: int) -> int:
    """Words of a token's dense activations and a bit for each, and as many again for the list of those decoded."""
    return 2 * (even(dense_size) + -(-dense_size // 32))


def scratch_words(width: int, dense_size: int, dense_tokens: int) -> int:
    """Words of the kernels' scratch memory.

    Args:
        width: of the stream.
        dense_size: features of the largest dictionary that is ever encoded whole; 0 for none.
        dense_tokens: tokens that are encoded at once, a multiple of TILE; more tokens take several rounds.
    """
    return dense_words(width) + dense_room(dense_size) * dense_tokens
