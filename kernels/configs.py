"""How each kernel is launched, by width: measured rows, pasted from `bench.kernels --sweep`. Never tuned while serving.

Nothing here may depend on the number of tokens: a request gets the same bits alone and in any batch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EditConfig:
    """One way to launch the edit kernel."""

    num_warps: int
    chunk: int  # entries in flight at once; a power of two
    programs: int  # programs per multiprocessor at most
    split: bool  # hold a row as two blocks (2304 in 2048 + 1024) instead of one padded to a power of two
    registers: int | None = None  # most registers a thread may have; None leaves it to the compiler


MAX_WIDTH = 8192

# Widest row that the config is for, ascending. Times are in bench/LOG.md.
EDIT: tuple[tuple[int, EditConfig], ...] = (
    (256, EditConfig(num_warps=1, chunk=4, programs=16, split=False)),
    (1024, EditConfig(num_warps=2, chunk=4, programs=16, split=True)),
    (3072, EditConfig(num_warps=2, chunk=4, programs=8, split=True)),
    (6144, EditConfig(num_warps=4, chunk=4, programs=8, split=True)),
    (MAX_WIDTH, EditConfig(num_warps=16, chunk=4, programs=2, split=True)),
)

MAP_BLOCK = 1024  # batch entries summed, and work items written, at once


def edit_config(width: int) -> EditConfig:
    """The launch of the edit kernel for rows of `width` elements.

    Raises:
        ValueError: the width is not within 1..MAX_WIDTH.
    """
    if width >= 1:
        for widest, config in EDIT:
            if width <= widest:
                return config
    raise ValueError(f"width {width} is not served: expected 1 to {MAX_WIDTH}")


def blocks(width: int, config: EditConfig) -> tuple[int, int]:
    """Two powers of two that cover `width`: (head, tail). The tail is 0 where one block is as good."""
    # Never less than an element a thread: a sum over fewer was wrong on the GPU (Triton 3.6, width 1).
    whole = max(1 << (width - 1).bit_length(), 32 * config.num_warps)
    head = whole >> 1
    if not config.split or whole == width or head >= width:
        return whole, 0
    # A tail with less than 8 elements a thread would spread its rows over the warps, unlike the head.
    tail = max(1 << (width - head - 1).bit_length(), config.num_warps * 256)
    return (head, tail) if tail < head else (whole, 0)
