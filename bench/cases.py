"""What the kernel benchmark measures, as rows, and what each line has to reach. Knows no kernels and no tensors."""

from dataclasses import dataclass
from statistics import NormalDist

FEATURES = 16384  # of the dictionary
WIDTHS = (2304, 5376)  # Gemma 2 2B and Gemma 3 27B
PASSES = {"bare": 2, "normed": 3}  # form of the op: times that an edited token passes through memory

ACTIVE = 71  # features that are active on a token, on average
# Encoder rows have unit length and tokens are normally distributed, so a pre-activation is N(0, 1).
THRESHOLD = NormalDist().inv_cdf(1 - ACTIVE / FEATURES)
TOP_K = 64  # of the topk dictionary
CAP = -3.0  # below which nearly no token's projection lies, so that nearly all are capped


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached: microseconds, or a factor.

    Attributes:
        us: for each of WIDTHS that the case is measured at; of the normed form with its weights from memory.
        factor: over the floor of the form and cache that runs, whichever they are.
    """

    us: tuple[float, ...] = ()
    factor: float | None = None

    def target(self, width: int, floor: float, *, usual: bool) -> float | None:
        """Microseconds at this width; None where nothing is asked for.

        Args:
            width: of the tensor.
            floor: microseconds, of the form and cache that runs.
            usual: whether it is the normed form with its weights from memory.
        """
        if self.us:
            return dict(zip(WIDTHS, self.us, strict=False)).get(width) if usual else None
        return None if self.factor is None else self.factor * floor


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: its requests lie one after the other, as a server lays them out.

    Attributes:
        name: as the table shows it.
        lengths: tokens of each request in this step.
        edits: of each steered request, each with a feature of its own.
        every: each so many-th request is steered; 0: none.
        kind: what an edit is: clamp, add, cap, ablate, match (an add in lengths of x), topk (a clamp on a topk
            dictionary) or reconstruct.
        dense: the site must be ready to encode its dictionary whole, though nobody may ask for it.
        goal: what is to be reached; None: the line is there to be known.
        widths: that are measured.
        curve: the plot's curve that it is a point of; else it stands in the table.
    """

    name: str
    lengths: tuple[int, ...]
    edits: int = 1
    every: int = 1
    kind: str = "clamp"
    dense: bool = False
    goal: Goal | None = None
    widths: tuple[int, ...] = WIDTHS
    curve: str | None = None

    @property
    def requests(self) -> int:
        """Of the batch."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Of the batch."""
        return sum(self.lengths)

    @property
    def steered(self) -> list[int]:
        """The requests that are steered."""
        return list(range(0, self.requests, self.every)) if self.every else []

    @property
    def steered_tokens(self) -> int:
        """Of the batch."""
        return sum(self.lengths[request] for request in self.steered)

    @property
    def whole(self) -> bool:
        """Whether the edits need all features of the dictionary."""
        return self.kind in ("topk", "reconstruct")


def moved(case: Case, form: str, cache: str, width: int) -> int:
    """Bytes of bfloat16 that must pass through memory.

    A token passes as often as its form says; a cold feature's rows do once; of a dictionary that is encoded whole, all
    encoder rows do.
    """
    rows: float = PASSES[form] * case.steered_tokens
    if case.whole:
        rows += FEATURES
    if case.kind == "reconstruct":
        rows += min(FEATURES, ACTIVE * case.steered_tokens)
    elif cache == "cold":
        rows += (1 if case.kind in ("add", "match") else 2) * case.edits * len(case.steered)
    return int(rows * width * 2)


def sums(case: Case, width: int) -> int:
    """Multiplications and additions of each edited token with all encoder rows, or with the two rows of each edit."""
    rows = FEATURES if case.whole else case.edits * (1 if case.kind == "add" else 2)
    return 2 * case.steered_tokens * rows * width


DECODE = (1,) * 16
LONG = (512,) * 16
TENTH = (103,) * 32 + (102,) * 48  # each tenth request has 820 of 8192 tokens
MIXED = (*(1,) * 8, 504)  # eight requests decode beside a chunk of a prompt

CASES = (
    Case("idle 16", DECODE, every=0, goal=Goal(us=(1.5, 1.5))),
    Case("idle 8192", LONG, every=0, goal=Goal(us=(3.0, 3.0))),
    Case("16 x 1", DECODE, goal=Goal(us=(2.9, 3.4))),
    Case("256 x 1", (1,) * 256, goal=Goal(us=(3.5, 4.5))),
    Case("8192 x 1", LONG, goal=Goal(factor=1.4)),
    Case("8192 x 1, one in ten", TENTH, every=10, goal=Goal(factor=3.0)),
    Case("16 x 32", DECODE, edits=32, goal=Goal(us=(6.0, 8.5))),
    Case("8192 x 32", LONG, edits=32, goal=Goal(us=(52.0, 110.0))),
    Case("16 x 256", DECODE, edits=256, goal=Goal(us=(25.0, 45.0))),
    Case("16 x reconstruct", DECODE, kind="reconstruct", goal=Goal(us=(30.0,)), widths=(2304,)),
    Case("8192 x reconstruct", LONG, kind="reconstruct", goal=Goal(us=(1700.0,)), widths=(2304,)),
    Case("8192 x 4", LONG, edits=4),
    Case("16 x add", DECODE, kind="add"),
    Case("8192 x add", LONG, kind="add"),
    Case("16 x cap", DECODE, kind="cap"),
    Case("16 x ablate", DECODE, kind="ablate"),
    Case("16 x add, norm match", DECODE, kind="match"),
    Case("16 x 1 of topk", DECODE, kind="topk"),
    Case("16 x 32 of topk", DECODE, edits=32, kind="topk"),
    Case("8 + 504 x 1", MIXED),
    Case("8 + 504 x 32", MIXED, edits=32, goal=Goal(us=(15.0, 25.0))),
    Case("256 x 32", (1,) * 256, edits=32),
    # What a site pays for being able to reconstruct while nobody does.
    Case("idle 16, dense ready", DECODE, every=0, dense=True),
    Case("16 x 1, dense ready", DECODE, dense=True),
)

CURVE_FORM = "normed"  # of the plot: as a server runs it behind a norm
EDITS_CURVE = tuple(1 << power for power in range(9))  # edits of each of 16 tokens
TOKENS_CURVE = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)


def _of_tokens(tokens: int, edits: int) -> Case:
    requests = min(16, tokens)
    name = f"{tokens} x {edits}"
    return Case(name, (tokens // requests,) * requests, edits=edits, curve=f"tokens, {edits}")


CURVES = (
    *(Case(f"16 x {edits}", DECODE, edits=edits, curve="edits") for edits in EDITS_CURVE),
    *(_of_tokens(tokens, edits) for edits in (1, 32) for tokens in TOKENS_CURVE),
)
