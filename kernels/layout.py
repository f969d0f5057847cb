"""Layout of the device tensors that the kernels share: offsets in int32 words. Knows nothing of requests or vLLM.

table [rows, width] int32, one row for each running request; row 0 belongs to nobody and stays empty.

    word 0                number of entries of the row; 0 = not steered
    word 1                the most parts of its sites (PARTS below)
    word 2                1 where some site needs a whole dictionary encoded
    word 3                0
    word 4                largest dose that a token may get at a site, a float32 bit pattern; 0.0 = any
    word 5                columns of counts that the row uses
    words 6 and 7         0
    from word HEAD        SPAN words for each site: where its entries lie, and what they need
    from ``head(sites)``  entries of ENTRY words each, by site, by group, in list order

A group is a run of entries that all read the same x. Gates, if there are any, are the first group of their site.
Words MUL to GAIN of an entry are float32 bit patterns.

news [words] int32: what comes to the device with a changed batch, put where it belongs by whatever writes the list:

    VECTOR + width words  for each vector, made even: two addresses of 64 bits, then its values, float32
    rows of the table     for each of them the number of its line below or -1, made even; none if there are no lines
    lines                 of a row each, as long as a row of the table; counts of these rows are emptied

work [max_tokens + 1, 4] int32: work[0] = (number of items, most parts of their rows, span, whether one of them needs a
whole dictionary encoded), then the items (first token, row, tokens, 0): at most ``span`` neighbouring
tokens of one request each. It depends on the batch alone: positions are read where they are needed.

sites [sites, SITE_STRIDE] int32, of which the first column is used: a site's number, or ~number where no row of the
work list has an entry there, so that its op is done before it looks at a row. Written with the work list.

cells [max_tokens] int32: for each token a bit for each gate of its row, from the gate's site to the last one.
counts [rows, counters] int32: tokens that each edit of the row has changed so far; behind the edits' columns DOSE_WORDS
for each site whose doses are measured. A token's dose at a site is |y - x| / max(|x|, SHORTEST): x as it comes there, y
as all groups leave it, both made finite, y not yet rounded and not yet limited. What no edit changed has no dose.

published [PUBLISHED, 1 + rows * counters] int32, memory of the host: after each step in which somebody is steered, one
in turn holds the step's number, from 0 to STEPS, and then counts as they stand, one counter of all rows behind the
other, as many counters as some row uses. It can be read once anything can that the device has made after it.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_

LIMIT = 4  # word 4 of a row
COUNTERS = 5  # word 5 of a row
HEAD = 8  # words in front of the sites' spans
SPAN = 8  # words of a site's span
ENTRY = 16  # words of an entry

# A site's span.
BEGIN = 0  # word offset of its first entry in the row
END = 1  # word offset behind its last one
PARTS = 2  # programs that may share one token: more than 1 only for a single group
KIND = 3  # bits, below
DENSE_BASE = 4  # first slot of the dictionary of which every feature is needed
DENSE_SIZE = 5  # its features; 0: no entry needs them
DENSE_NORM = 6  # its input norm, as a bit of FLAGS
GROUPS = 7  # number of its groups, gates included

# Bits of KIND. One of the first three says which kernel takes the row's longer spans of tokens.
ANY = 1  # the one that can do everything
LONE = 2  # a single entry without gates, ranks, reconstruction or input norms
MANY = 4  # a single group of up to MOST_MANY of such, none in lengths of x
GATED = 8  # some entry writes or reads cells
DOSE = 16  # from this bit on: the first column of the site's doses, 0 where they are not measured

# An entry.
SLOT = 0  # row of the site's w_enc and w_dec; for RECONSTRUCT row of b_dec
GROUP_END = 1  # word offset where this entry's group ends
LO = 2  # first position of the window
HI = 3  # first position behind the window
FLAGS = 4  # bits below, and the entry's column in counts from bit COUNTER on
GATES = 5  # bits of cells that must all be set; for GATE the bit that it writes
BASE = 6  # first of the features that it is ranked among, or that are reconstructed
SIZE = 7  # number of them
TOP_K = 8  # how many of them are active at most
MUL = 9
ADD = 10
LOW = 11
HIGH = 12
BIAS = 13
THRESHOLD = 14
GAIN = 15

# Bits of FLAGS.
ONLY_IF_ACTIVE = 1
RANKED = 2  # active only when fewer than TOP_K of its range come before it
MAGNITUDE = 4  # ranked by the absolute value, which need not be positive
MATCH = 8  # the delta is in lengths of x
LAYER_NORM = 16  # the dictionary reads (x - mean) / (std + 1e-5)
L2_NORM = 32  # the dictionary reads x * sqrt(width) / |x|
RECONSTRUCT = 64  # x' = the whole decoded dictionary, with the deltas of the other entries of its group
GATE = 128  # changes nothing: writes LOW < f < HIGH into a bit of cells
COUNTER = 16

# A site's doses in counts. Its tokens are added in any order, so the last digits of a sum may differ from run to run.
DOSE_MAX = 0  # float32 bit pattern; as an integer it has the same order, for no dose is below 0
DOSE_SUM = 1  # float32 bit pattern
DOSE_TOKENS = 2
DOSE_LIMITED = 3  # tokens whose dose was above the limit
DOSE_WORDS = 4

# Forms of the op: what its second tensor is.
BARE = 0  # there is none
NORMED = 1  # the RMS norm of the stream, to be made anew for edited tokens
PAIR = 2  # an addend: the stream is the sum of both

VECTOR = 4  # words of news in front of a vector's values

SITE_STRIDE = 4  # words: each site's own lie as compilers expect a tensor to lie
PART = 4  # entries of a part, while there are parts enough
MOST_MANY = 256
MOST_PARTS = 16
TILE = 64  # tokens of an item in a step of many tokens
PARTIALS = 1024  # rows of scratch for parts of tokens
LEAST_ROW = 64  # words of such a row at least
LARGEST = 1e15  # of an edited stream, so that its squares have a finite sum; what is no number has this size, too
LARGEST_HALF = 32768.0  # the same in fp16, half of what it holds: the layers behind add to it
SHORTEST = 1e-12  # |x| that a dose is divided by at least
MOST_GATES = 32  # of one row
PUBLISHED = 4  # steps whose counts the host has; two are on their way at most
STEPS = 1 << 30  # then their numbers begin anew; a multiple of PUBLISHED


def head(sites: int) -> int:
    """Word offset of a row's first entry: what stands before them, rounded up to whole entries."""
    return -(-(HEAD + SPAN * sites) // ENTRY) * ENTRY


def width(sites: int, max_entries: int) -> int:
    """Words of a table row."""
    return head(sites) + ENTRY * max_entries


def counters(sites: int, max_entries: int) -> int:
    """Columns of counts: at most one for each entry, and the doses of each site that can have one."""
    return max_entries + DOSE_WORDS * min(sites, max_entries)


def even(words: int) -> int:
    """So many words, or one more: what lies behind them is where addresses may be read."""
    return words + words % 2


def vector_words(width: int) -> int:
    """Words of a vector in the news."""
    return even(VECTOR + width)


def news_words(table: tuple[int, int], vectors: int, lines: int, width: int) -> int:
    """Words of the news.

    Args:
        table: rows of it, and words of each.
        vectors: that come, of this width.
        lines: rows that come.
        width: of a vector.
    """
    return vectors * vector_words(width) + (even(table[0]) + lines * table[1] if lines else 0)


def span_words(
    flags: Sequence[int], *, gated: bool, groups: int, begin: int, dense: tuple[int, int, int], doses: int = 0
) -> list[int]:
    """The words of a site, from which the kernels choose how to run it.

    Args:
        flags: FLAGS of each of its entries.
        gated: whether an entry writes or reads cells.
        groups: number of groups, gates included.
        begin: word of the first entry.
        dense: first slot, size and norm of the dictionary that must be encoded whole; zeros for none.
        doses: column of counts where the site's doses begin, 0 where none are measured: only the edit kernel does that.
    """
    assert 0 <= doses < 1 << 31 - DOSE
    n = len(flags)
    if not n:
        return [0] * SPAN
    every = reduce(or_, flags)
    parts = 1
    if groups == 1 and not every & GATE:
        parts = MOST_PARTS if every & RECONSTRUCT else min(MOST_PARTS, -(-n // PART))
    if gated or doses or every & (RANKED | RECONSTRUCT | LAYER_NORM | L2_NORM | GATE):
        kind = ANY | GATED * gated | doses << DOSE
    elif n == 1:
        kind = LONE
    else:
        kind = MANY if groups == 1 and n <= MOST_MANY and not every & MATCH else ANY
    return [begin, begin + ENTRY * n, parts, kind, *dense, groups]


def dense_words(width: int) -> int:
    """Word offset of the dense activations in scratch: behind the arrivals and partial sums of parts of tokens."""
    return PARTIALS * (1 + max(width, LEAST_ROW))


def scratch_words(width: int, dense_size: int, dense_tokens: int) -> int:
    """Words of the kernels' scratch memory.

    Args:
        width: of the stream.
        dense_size: features of the largest dictionary that is ever encoded whole; 0 for none.
        dense_tokens: tokens that are encoded at once, a multiple of TILE; more take several rounds.
    """
    return dense_words(width) + 2 * dense_size * dense_tokens
