"""A digest of a sample of a dictionary's weights, as they are stored. Knows no format, and folds nothing.

It tells retrained weights from those before, for one megabyte of each array at most, and is the same whatever the dtype
in which the dictionary is loaded. A change of single features may lie between what it reads.
"""

import hashlib
import math
from collections.abc import Iterator

from saesteer.loaders.arrays import DTYPES, Arrays
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import readable, state_of, wrong

PIECES, PIECE_BYTES = 64, 16 << 10  # of each array, evenly spread


def sample(draft: Draft) -> str:
    """Hex digest of what decides the activations: the facts that are not in the arrays, and pieces of each array.

    Raises:
        LoadError: a file cannot be read, or is not the one of which the draft was made.
    """
    facts = draft.activation, draft.k, draft.in_norm, draft.feature_unit, draft.feature_ids, draft.threshold
    folds = draft.decoder_norm, draft.lengths, draft.centred, draft.below_zero, sorted(draft.transposed)
    of = hashlib.sha256(repr((facts, folds)).encode())
    if draft.order is not None:
        of.update(draft.order.numpy().tobytes())
    for role, key in sorted(draft.present.items()):
        if role == "max_act":  # another measurement of the same weights
            continue
        file = draft.holding(role)
        array = file.find(key)
        of.update(f"{role} {array.shape} {array.dtype} {array.fortran}".encode())
        for piece in _pieces(file, key):
            of.update(piece)
    for file in draft.files:
        with readable(f"{file.path}: header", "the file that was there before"):
            now = state_of(file.path.stat())
        if now != file.state:
            raise wrong(file.path, "weights", "changed since they were opened", "the same file: run the command again")
    return of.hexdigest()


def _pieces(file: Arrays, key: str) -> Iterator[bytes]:
    """All bytes of a small array; of a large one, as many pieces as fit, from its first byte on."""
    array = file.find(key)
    size = math.prod(array.shape) * DTYPES[array.dtype].itemsize
    if array.pitch is None:
        line, pitch, lines = PIECE_BYTES, PIECE_BYTES, -(-size // PIECE_BYTES)
    else:
        rows = array.shape[-1 if array.fortran else 0]
        line, pitch, lines = min(PIECE_BYTES, size // rows), array.pitch, rows
    with readable(f"{file.path}: {key}", "a complete file"), file.opened(array) as stream:
        for number in range(0, lines, -(-lines // PIECES)):
            stream.seek(array.start + number * pitch)
            yield stream.read(min(line, size - number * line))
