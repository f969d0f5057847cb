"""What a plan is made of: groups of changes at sites, conditions, and the catalog of what may be named. Knows no rules.

Everything here is plain Python. It does not know where a name lies in memory, nor the numbers of a vector.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as option
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from saesteer.dictionaries.vectors import FeatureRow, Function, VectorSet
from saesteer.language.edits import Part, Scope
from saesteer.language.fields import INT32_MAX, Check
from saesteer.language.inline import Vector
from saesteer.language.sites import SUMS, op_site, parse
from saesteer.language.spec import Spec
from saesteer.planning.immutable import distinct, immutable

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo

END = INT32_MAX  # the open end of a window
CAPTURE = "capture"  # field of what nobody but the operator reads
MOST_RULES = 64  # of one request, and different features and probes that they watch
MOST_CONDITIONS = 31  # that edits of one request wait for at a time: the bits of an int32 without its sign

Window = tuple[int, int]  # absolute positions [lo, hi)


def member(name: str, layer: int) -> str:
    """The key of the dictionary at a layer of a set, which messages show as well: ``gs@20``."""
    return f"{name}@{layer}"


def behind(at: str, count: int) -> str:
    """The path of the edit that stands so many places behind another in its list."""
    head, _, number = at[:-1].rpartition("[")
    return f"{head}[{int(number) + count}]"


def layer_of(info: "CoderInfo") -> int | None:
    """The layer of a dictionary: that of the site where it reads."""
    site = info.site_in or info.site_out
    return None if site is None else parse(site)[1]


Fit = Literal["same", "base", "declared", "other", "unknown"]


class Origin(NamedTuple):
    """The language model that a dictionary was trained on, and what the server knows about it.

    It is the served one, or the base of the served one; the operator says that it fits; or it is another, or unknown.
    """

    model: str
    fit: Fit


@dataclass(frozen=True, slots=True)
class Catalog:
    """What requests may name on a server."""

    dictionaries: "Mapping[str, CoderInfo]"  # by name; the members of sets by their own keys, see ``key``
    sites: frozenset[str] | None  # canonical names of the instrumented sites; None: all
    max_entries: int  # limit for one request: changes times windows, plus conditions
    vectors: Mapping[str, VectorSet] = option(default_factory=dict)
    modules: Mapping[str, Spec] = option(default_factory=dict)
    width: int | None = None  # width of the stream; None: any
    inline_rows: int | None = None  # different vectors that one request may bring for one site; None: any number
    default: str | None = None  # the module that every request uses in front of its own edits, unless it opts out
    scope: Scope | None = None  # of edits that name none
    pinned: frozenset[tuple[str, "Direction"]] = frozenset()  # vectors of modules that lie at a site already
    digests: Mapping[str, str] = option(default_factory=dict)  # digest of what each module does, by content
    other_widths: Mapping[str, int] = option(default_factory=dict)  # of kinds of sites not as wide as the stream
    rows: "Mapping[Feature, FeatureRow]" = option(default_factory=dict)  # what a planned request brings of files
    sets: Mapping[str, tuple[int, ...]] = option(default_factory=dict)  # the layers of each set, by its name
    parts: bool = False  # whether a reasoning parser tells the parts of an answer
    reads: frozenset[str] | None = None  # sites whose op keeps its tensor for requests that read it; None: all
    consumers: Mapping[str, Check] = option(default_factory=dict)  # by name, the check of a request's parameters
    addresses: Mapping[str, str] = option(default_factory=dict)  # np:MODEL/SOURCE → a dictionary's key
    origin: Callable[[str], Origin | None] = option(default=lambda _: None)  # of the dictionary with a key, if known
    stages: tuple[int, ...] = ()  # the layers with which the later stages of a pipeline begin
    sums: Mapping[str, str] = option(default_factory=lambda: SUMS)  # as ``op_site`` takes them, of this model
    pregain: bool = True  # whether mlp_in_pregain is what the op of resid_mid makes of it
    layers: int | None = None  # of the model; None: any number
    largest: Callable[[Any, int], float | None] = lambda *_: None  # activation of a dictionary's feature, if known

    def key(self, name: str, layer: int | None) -> str:
        """The key in ``dictionaries`` of what a request names by a dictionary and a layer, if it is there."""
        return member(name, layer) if name in self.sets and layer is not None else self.addresses.get(name, name)

    def named(self, key: str) -> tuple[str, int | None]:
        """The inverse of ``key``: the name in requests, and the layer of a member of a set."""
        name, _, layer = key.rpartition("@")
        here = layer.isdecimal() and int(layer) in self.sets.get(name, ())
        return (name, int(layer)) if here else (key, None)

    def has_op(self, site: str) -> bool:
        """Whether there is an op at this canonical site."""
        return self.sites is None or site in self.sites

    def op_site(self, site: str) -> str:
        """The site whose op makes an edit of this canonical site."""
        return site if self.sites is None or site in self.sites else op_site(site, self.sites, self.sums)

    def function_of(self, probe: object) -> Function:
        """What becomes of a probe's products, by the probe's name; nothing if no vector has this name."""
        return self.vectors[probe].function if isinstance(probe, str) and probe in self.vectors else "linear"

    def stage_of(self, site: str) -> int:
        """The stage of a pipeline that has the op of this canonical site: where its tensor is consumed."""
        kind, layer = parse(self.op_site(site))
        return bisect_right(self.stages, layer + (kind == "resid_post"))

    def width_at(self, site: str) -> int | None:
        """The width of the tensor at a site; None: any."""
        return self.other_widths.get(parse(site)[0], self.width)


@immutable
class Feature:
    """A feature of a dictionary: its encoder row reads, its decoder row writes."""

    dictionary: str
    feature: int
    target: int = 0  # which of the sites that it writes, whose decoder row it is; only of a cross-layer transcoder


@immutable
class Direction:
    """A vector at unit length, which reads and writes."""

    vector: Vector  # the vector's name, or the vector itself
    layer: int | None  # layer of its row; None: it has one row for any site


@immutable
class Whole:
    """A dictionary's reconstruction in place of the stream."""

    dictionary: str


# The unit of shift, low and high: none, the feature's largest known activation, the length of the vector as it was
# given, or the length of the stream.
Unit = Literal["raw", "max_act", "vector", "stream"]


@immutable
class Read:
    """min(max(scale · f + shift, low), high), where f is a feature or a probe's x · v + bias, before edits of the site.

    A register keeps it for each token, for changes here or at later sites. A whole dictionary is read as what it makes
    of x, which is kept for a reconstruction at a later site; its numbers have no meaning.
    """

    site: str  # canonical
    target: Feature | Direction | Whole  # a direction as it was given, not at unit length
    register: int
    scale: float
    shift: float
    low: float
    high: float
    field: str  # path of its first mention in the request


@immutable
class Change:
    """f' = min(max(scale · f + shift, low), high); x' = x + gain · strength · (f' − f) · d, in windows of positions.

    For a reconstruction, only gain, gates, strength and windows have a meaning.
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
    held: Read | None = None  # what read f or the reconstruction, where that is another site
    strength: Read | None = None  # what else multiplies the gain; None: 1
    part: Part | None = None  # of the positions in the windows, only those in this part of the answer
    op: str = option(default="clamp", compare=False)  # op of the edit
    asked: tuple[str, Any] | None = option(default=None, compare=False)  # mode and value of a clamp, if it is a number


@immutable
class Clamps:
    """Changes by neighbouring clamps of one dictionary in memory, alike but for features and values.

    A request may bring hundreds: what they share is planned once, and what differs stays in arrays.
    """

    first: Change
    features: tuple[int, ...]
    values: tuple[float, ...]  # the scale of each change, or its shift
    scales: bool  # whether the values are scales

    @property
    def windows(self) -> tuple[Window, ...]:
        """Those of each change."""
        return self.first.windows

    @property
    def part(self) -> Part | None:
        """That of each change."""
        return self.first.part

    @property
    def field(self) -> str:
        """That of the first change."""
        return self.first.field

    @property
    def target(self) -> Feature:
        """That of the first change."""
        assert isinstance(self.first.target, Feature)
        return self.first.target

    def each(self) -> Iterator[Change]:
        """The changes, one by one."""
        first, name = self.first, self.target.dictionary
        for n, (feature, value) in enumerate(zip(self.features, self.values, strict=True)):
            scale, shift = (value, first.shift) if self.scales else (first.scale, value)
            yield replace(first, target=Feature(name, feature), field=behind(first.field, n), scale=scale, shift=shift)


@distinct
class Group:
    """Changes at one site that all read the same x, to which all their deltas are then added."""

    site: str  # canonical
    parts: tuple[Change | Clamps, ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes, one by one."""
        parts = ([*part.each()] if isinstance(part, Clamps) else [part] for part in self.parts)
        return tuple(chain.from_iterable(parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and (self.site, self.changes) == (other.site, other.changes)

    def __hash__(self) -> int:
        return hash((self.site, self.changes))


@immutable
class Condition:
    """Whether above < f < below before any edit of the site, where f is a feature or a probe's x · v + bias."""

    site: str  # canonical
    target: Feature | Direction  # a direction as it was given, not at unit length
    above: float
    below: float
    bit: int
    field: str  # path of its first mention in the request


@immutable
class Readout:
    """What a request reads of one tensor, for each token of its windows."""

    kind: Literal["features", "probe", "activation", "hidden"]
    field: str  # its path in the request
    site: str | None  # canonical name of the tensor's site; None: what lm_head multiplies
    op: str | None  # the site whose op keeps the tensor
    after: bool  # after the request's edits of the site
    windows: tuple[Window, ...]  # disjoint, ascending
    summed: bool = False  # before edits of the site, but after all that its op makes, which come earlier
    last: bool = False  # the row that sampled the last token, whose position is known at the end
    dictionary: str | None = None  # its key in the catalog
    top_k: int = 0  # how many of the strongest features
    features: tuple[int, ...] = ()  # by their index in the dictionary
    probe: Direction | None = None  # as it was given, not at unit length; its bias is in the catalog
    reduce: str = "none"  # or a name of REDUCTIONS
    starts: tuple[int, ...] = ()  # where chat messages begin, if each of them is reduced to a row
    whole: bool = False  # it is one of the sites of a read of several, whose rows are one tensor
    inline: bool = True
    recompute: bool = True  # prompt tokens in the prefix cache are computed again; otherwise they are left out
    captured: bool = False  # the operator captures its rows as well
    part: Part | None = None  # as of a change

    @property
    def reduced_there(self) -> str:
        """How the worker reduces its rows, which does not know the border between the parts of an answer."""
        return self.reduce if self.part is None else "none"

    @property
    def captured_after(self) -> bool:
        """Whether it takes the tensor as the op leaves it."""
        return self.after or self.summed

    @property
    def shown(self) -> bool:
        """Whether the answer has it, because the request asks for it."""
        return self.field != CAPTURE


@immutable
class Rule:
    """Fires once: at the first position at which all conditions have held for so many positions in a row."""

    op: Literal["stop", "flag"]
    field: str  # path of the rule in the request
    windows: tuple[Window, ...]  # disjoint, ascending; a position outside ends a run
    bounds: tuple[tuple[int, float, float], ...]  # number of a measure of the plan, and above < its value < below
    run: int  # positions in a row
    part: Part | None = None  # as of a change


@immutable
class Plan:
    """What a spec does, with the groups of one site in the order in which they apply."""

    groups: tuple[Group, ...] = ()
    conditions: tuple[Condition, ...] = ()
    reads: tuple[Read, ...] = ()
    relative: bool = option(default=False, compare=False)  # it may differ for a prompt of another length
    readouts: tuple[Readout, ...] = ()  # they change nothing: a plan with nothing else edits nothing
    rules: tuple[Rule, ...] = ()  # as little
    measures: tuple[Readout, ...] = ()  # what the rules watch; no answer has it

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def parts(self) -> Iterator[Change | Clamps]:
        """The parts of all groups, in their order."""
        return chain.from_iterable(group.parts for group in self.groups)

    @property
    def inputs(self) -> tuple[Condition | Read, ...]:
        """What its edits read at each token before they act."""
        return (*self.conditions, *self.reads)

    def rows(self, catalog: Catalog) -> dict[Feature, str]:
        """The features of dictionaries by rows whose rows it needs, each with the path of its first mention."""
        found: dict[Feature, str] = {}
        edited = ((one.target, one.field) for one in (*self.parts, *self.inputs) if isinstance(one.target, Feature))
        reads = (one for one in (*self.readouts, *self.measures) if one.dictionary is not None)
        read = ((Feature(str(one.dictionary), feature), one.field) for one in reads for feature in one.features)
        for target, field in chain(edited, read):
            if catalog.dictionaries[target.dictionary].by_rows:
                found.setdefault(target, field)
        return found
