"""How the time of something grows with its size, whatever else this machine and Python's collector do meanwhile."""

import gc
from collections.abc import Callable


def growth(seconds: Callable[[int], float], few: int, many: int) -> float:
    """How many times longer many take than few.

    Args:
        seconds: the processor time of so many.
        few: of these, and of many, the quickest of three runs counts, in which Python collects nothing.
        many: in a process that holds much, one collection takes longer than all the rest.
    """
    gc.collect()
    gc.disable()
    try:
        least = [min(seconds(size) for _ in range(3)) for size in (few, many)]
    finally:
        gc.enable()
    return least[1] / least[0]
