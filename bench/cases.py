"""What the kernel benchmark measures, as rows. Knows no kernels."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: requests of equal length lie one after the other, as a server lays them out."""

    name: str
    requests: int
    length: int  # tokens of each request in this step
    clamps: int  # of each steered request, all of its own features
    every: int = 1  # each so many-th request is steered; 0: none

    @property
    def steered(self) -> list[int]:
        """The requests that are steered."""
        return list(range(0, self.requests, self.every)) if self.every else []

    @property
    def tokens(self) -> int:
        """Of the whole batch."""
        return self.requests * self.length


CASES = (
    Case("idle 16", requests=16, length=1, clamps=0, every=0),
    Case("idle 8192", requests=4, length=2048, clamps=0, every=0),
    Case("16 x 1", requests=16, length=1, clamps=1),
    Case("256 x 1", requests=256, length=1, clamps=1),
    Case("8192 x 1", requests=4, length=2048, clamps=1),
    Case("8192 x 1, one in ten", requests=64, length=128, clamps=1, every=10),
    Case("16 x 32", requests=16, length=1, clamps=32),
    Case("8192 x 32", requests=4, length=2048, clamps=32),
    Case("16 x 256", requests=16, length=1, clamps=256),
)

WIDTHS = (2304, 5376)  # Gemma 2 2B and Gemma 3 27B
FEATURES = 16384

SWEEP_CASES = ("16 x 1", "8192 x 1", "16 x 32", "8192 x 32", "16 x 256")
# Every combination is timed; programs costs no compilation, the others cost one each, for each width and form.
SWEEP = {
    "num_warps": (4, 8, 16),
    "chunk": (1, 2, 4, 8),
    "split": (False, True),
    "registers": (None, 128),
    "programs": (2, 4, 8, 16),
}
