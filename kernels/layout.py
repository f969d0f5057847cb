"""Layout of the device tables that the kernels read: offsets in int32 words. Knows nothing of requests or vLLM.

table [rows, width] int32, one row for each running request; row 0 belongs to nobody and stays empty.

    word 0                number of entries of the row; 0 = not steered
    words 1+2s, 2+2s      begin and end of site s's entries, as word offsets into the row
    from ``head(sites)``  entries of ENTRY words each, by site, by group, in list order

Words MUL to GAIN of an entry are float32 bit patterns.
work [max_tokens + 1, 4] int32: work[0, 0] is the number of items, work[1 + i] = (token, row, position, 0).
"""

ENTRY = 16

SLOT = 0  # row of the site's w_enc and w_dec
GROUP_END = 1  # word offset where this entry's group ends
LO = 2  # first position of the window
HI = 3  # first position behind the window
FLAGS = 4
BASE = 5  # first slot of the entry's dictionary
SIZE = 6  # features of the entry's dictionary
TOP_K = 7
MUL = 8
ADD = 9
LOW = 10
HIGH = 11
BIAS = 12
THRESHOLD = 13
GAIN = 14

ONLY_IF_ACTIVE = 1
TOPK = 2

# Forms of the op: what its second tensor is.
BARE = 0  # there is none
NORMED = 1  # the RMS norm of the stream, to be made anew for edited tokens
PAIR = 2  # an addend: the stream is the sum of both


def head(sites: int) -> int:
    """Word offset of a row's first entry: count and spans, rounded up to whole entries."""
    return -(-(1 + 2 * sites) // ENTRY) * ENTRY


def width(sites: int, max_entries: int) -> int:
    """Words of a table row."""
    return head(sites) + ENTRY * max_entries
