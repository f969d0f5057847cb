"""What a plan is made of: groups of changes at sites, conditions, and the catalog of what may be named. Knows no rules.

Everything here is plain Python. Where a name lies in memory, and what a vector's numbers are, is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as option
from typing import Literal, Protocol

from saesteer.language.fields import INT32_MAX
from saesteer.language.inline import Vector
from saesteer.language.spec import Spec

END = INT32_MAX  # the open end of a window
MOST_CONDITIONS = 31  # of one request, that something still waits for: bits of an int32 without its sign

Window = tuple[int, int]  # absolute positions [lo, hi)


class Dictionary(Protocol):
    """What the plan asks of a dictionary: a part of ``CoderInfo``."""

    @property
    def features(self) -> int:
        """Number of features."""

    @property
    def site_in(self) -> str | None:
        """Where it reads."""

    @property
    def site_out(self) -> str | None:
        """Where it writes."""

    @property
    def activation(self) -> str:
        """How its features become active."""

    @property
    def k(self) -> int | None:
        """How many features are active at most, where they are ranked."""

    @property
    def has_max_act(self) -> bool:
        """Whether the largest activation of each feature is known."""

    @property
    def skip_first(self) -> int:
        """First positions that its format leaves alone."""

    @property
    def can_reconstruct(self) -> bool:
        """Whether its file holds all that a reconstruction needs."""


class Vectors(Protocol):
    """What the plan asks of named vectors: a part of ``VectorSet``."""

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers that have a row; None where one vector stands for any site."""

    @property
    def width(self) -> int:
        """Its length as a list of numbers."""

    @property
    def digests(self) -> Mapping[int | None, str]:
        """A digest of each row's numbers, by layer."""

    @property
    def bias(self) -> float:
        """Of a probe."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What requests may name on a server."""

    dictionaries: Mapping[str, Dictionary]
    sites: frozenset[str] | None  # canonical names of the instrumented sites; None: all
    max_entries: int  # of one request: changes times windows, and conditions
    vectors: Mapping[str, Vectors] = option(default_factory=dict)
    modules: Mapping[str, Spec] = option(default_factory=dict)
    width: int | None = None  # of the stream; None: any
    inline_rows: int | None = None  # different vectors that one request may bring for one site; None: any number
    pinned: frozenset[tuple[str, "Direction"]] = frozenset()  # vectors of modules that lie at a site already
    digests: Mapping[str, str] = option(default_factory=dict)  # of what each module does, by content


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a dictionary: its encoder row reads, its decoder row writes."""

    dictionary: str
    feature: int


@dataclass(frozen=True, slots=True)
class Direction:
    """A vector at unit length, which reads and writes."""

    vector: Vector  # its name, or itself
    layer: int | None  # of its row; None: it has one row, for any site


@dataclass(frozen=True, slots=True)
class Whole:
    """A dictionary's reconstruction in place of the stream."""

    dictionary: str


# What shift, low and high are measured in: as they are, in the feature's largest known activation, in the length of the
# vector as it was given, or in the length of the stream.
Unit = Literal["raw", "max_act", "vector", "stream"]


@dataclass(frozen=True, slots=True)
class Change:
    """f' = min(max(scale · f + shift, low), high); x' = x + gain · (f' − f) · d, in windows of positions.

    For a reconstruction only gain, gates and windows mean something.
    """

    target: Feature | Direction | Whole
    windows: tuple[Window, ...]  # disjoint, ascending
    field: str  # path of the edit in the request
    scale: float = 1.0
    shift: float = 0.0
    low: float = float("-inf")
    high: float = float("inf")
    unit: Unit = "raw"
    only_if_active: bool = False
    gain: float = 1.0
    gates: int = 0  # bits of the conditions that must all hold
    op: str = option(default="clamp", compare=False)  # of the edit


@dataclass(frozen=True, slots=True)
class Group:
    """Changes at one site that all read the same x; then all deltas are added."""

    site: str  # canonical
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether above < f < below for a feature, or a probe's x · v + bias, before any edit of the site."""

    site: str  # canonical
    target: Feature | Direction  # a direction as it was given, not at unit length
    above: float
    below: float
    bit: int
    field: str  # path of its first mention in the request


@dataclass(frozen=True, slots=True)
class Plan:
    """What a spec does, with the groups of one site in the order in which they apply."""

    groups: tuple[Group, ...] = ()
    conditions: tuple[Condition, ...] = ()
    relative: bool = option(default=False, compare=False)  # it may be another for a prompt of another length

    def __bool__(self) -> bool:
        return bool(self.groups)
