"""What a request may ask for: a record for each kind of edit, with its scope and its gates. Knows no server.

A record is checked when it is made (fields.py). ``saesteer.planning`` checks what depends on the server's dictionaries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from typing import Any, ClassVar, Literal

from saesteer.language import address
from saesteer.language.fields import (
    INT32_MAX,
    Fields,
    Json,
    Record,
    by,
    fail,
    flag,
    integer,
    list_of,
    may,
    number,
    one_of,
    read,
    record,
    show,
    sites,
    text,
)
from saesteer.language.inline import Vector, vector
from saesteer.language.sites import MAX_LAYER

MAX_POSITIONS = 4096  # intervals in one scope, and in all scopes of a spec together
MAX_CONDITIONS = 16  # in one `when`
NAMES = ("dictionary", "vector", "probe", "module")  # the fields that may hold a name

Mode = Literal["set", "add", "scale", "min", "max"]
ClampUnit = Literal["raw", "max_act"]
Part = Literal["reasoning", "answer"]  # of the generated tokens
Interval = tuple[int, int | None]

feature = integer(0, INT32_MAX, "a feature of its dictionary, numbered from 0")
layer = integer(0, MAX_LAYER)  # of a set's dictionary, which is missing where the dictionary is alone under its name
_place = integer(1 - INT32_MAX, INT32_MAX - 1)


def interval(value: Any, at: str) -> Interval:
    """``[start, end]``, half-open; end may be null, and negative numbers count from the end of the prompt."""
    if not isinstance(value, list | tuple):
        fail(at, "wrong_type", f"got {show(value)}, expected [start, end]")
    if len(value) != 2:
        fail(at, "wrong_type", f"got {show(value)}, expected two numbers, [start, end]")
    start = _place(value[0], f"{at}[0]")
    if value[1] is None:
        return start, None
    end = _place(value[1], f"{at}[1]")
    if end == 0 or ((start < 0) == (end < 0) and end <= start):
        fail(
            at,
            "empty_scope",
            f"[{start}, {end}] holds no position, expected a start below the end, which is not part of it",
        )
    return start, end


Message = int | str  # the index of a chat message, or the role of all messages that have it


def _message(value: Any, at: str) -> Message:
    if isinstance(value, str):
        return text(value, at)
    if isinstance(value, bool) or not isinstance(value, Integral):
        fail(at, "wrong_type", f"got {show(value)}, expected a role such as user, or the index of a message")
    place: int = _place(value, at)
    return place


# Negative indices count from the last message.
messages = list_of(_message, MAX_POSITIONS, least=("empty_scope", "role or index of a message"), alone=True)
intervals = list_of(interval, MAX_POSITIONS, least=("empty_scope", "[start, end]"))


@dataclass(frozen=True)
class Scope(Record):
    """The tokens that an edit touches. ``saesteer.planning.windows`` turns a scope into absolute positions.

    ``saesteer.planning.messages`` turns chat messages into positions, where the conversation is available.
    """

    label: ClassVar[str] = "scope"
    example: ClassVar[str] = '{"generated": true}'

    prompt: bool | None = may(flag)
    generated: bool | None = may(flag)
    positions: tuple[Interval, ...] | None = may(intervals)
    skip_first: int | None = may(integer(0, INT32_MAX - 1))
    messages: tuple[Message, ...] | None = may(messages)
    part: Part | None = may(one_of("reasoning", "answer"))
    response: bool = may(flag, False)  # the last token of the prompt and all generated ones

    def _whole(self, at: str) -> None:
        others = {"prompt": self.prompt, "generated": self.generated, "part": self.part, "messages": self.messages}
        if self.response and (beside := [name for name, one in others.items() if one is not None]):
            found = "names the last token of the prompt and all generated ones"
            fail(f"{at}.response", "conflict", f"{found}, expected it without {beside[0]}")
        if self.part is not None and (self.prompt or self.generated is False or self.messages is not None):
            fail(f"{at}.part", "conflict", "names generated tokens, expected no messages and no other flag")
        if self.prompt is False and self.generated is False:
            fail(at, "empty_scope", "prompt and generated are both false, expected one of them to be true")
        if self.messages is not None and not (not self.generated if self.prompt is None else self.prompt):
            fail(
                at,
                "empty_scope",
                "has messages, whose tokens are all in the prompt, expected prompt not to be left out",
            )


GENERATED = Scope(generated=True)  # of what reads or watches by default, so that prompts stay cached


@dataclass(frozen=True)
class Source(Record):
    """A feature or a probe, whose value at the same token is read before any edit of its site."""

    dictionary: str | None = may(text)
    feature: int | None = may(feature)
    probe: str | None = may(text)
    _: KW_ONLY
    layer: int | None = may(layer)

    @classmethod
    def _spelled_out(cls, given: Fields, at: str) -> Fields:
        return address.one(given, at)

    def _whole(self, at: str) -> None:
        if self.probe is not None and (self.dictionary, self.feature, self.layer) != (None, None, None):
            fail(f"{at}.probe", "conflict", "stands next to a dictionary's feature, expected one of the two")
        if self.probe is None and self.dictionary is None:
            fail(f"{at}.dictionary", "missing_field", "is missing, expected dictionary and feature, or probe")
        if self.probe is None and self.feature is None:
            fail(f"{at}.feature", "missing_field", "is missing, expected next to dictionary")


@dataclass(frozen=True)
class Gate(Source):
    """One condition of a `when`: a feature or probe strictly above a bound, below one, or both."""

    label: ClassVar[str] = "when"
    example: ClassVar[str] = '{"dictionary": "gs20", "feature": 99, "above": 3.0}'

    above: float | None = may(number)
    below: float | None = may(number)

    def _whole(self, at: str) -> None:
        Source._whole(self, at)
        if self.above is None and self.below is None:
            fail(f"{at}.above", "missing_field", "is missing, expected above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            fail(f"{at}.below", "conflict", f"got {self.below} with above {self.above}, expected more than above")


def _check_order(one: "Strength | Cap", at: str) -> None:
    if one.min is not None and one.max is not None and one.min > one.max:
        fail(f"{at}.min", "conflict", f"got {one.min} with max {one.max}, expected at most max")


@dataclass(frozen=True)
class Strength(Source):
    """A strength of each token: min(max(slope · p + bias, min), max), where p is the feature or the probe."""

    label: ClassVar[str] = "scale"

    slope: float = may(number, 1.0)
    bias: float = may(number, 0.0)
    min: float | None = may(number)
    max: float | None = may(number)

    def _whole(self, at: str) -> None:
        Source._whole(self, at)
        _check_order(self, at)


_READ = (Strength, Mapping)  # as a union, it would be made again in each call


def strength(value: Any, at: str) -> float | Strength:
    """A number, or what is read to make one."""
    if value.__class__ is float or not isinstance(value, _READ):  # most are numbers, and a Mapping is slow to rule out
        return number(value, at)
    return read(Strength, value, at)


_scales = list_of(number, MAX_LAYER + 1, least=("out_of_range", "number"))
gates = list_of(record(Gate), MAX_CONDITIONS, alone=True)  # one, or several that must all hold


@dataclass(frozen=True)
class Edit(Record):
    """One change that a request asks for."""

    op: ClassVar[str]

    def __post_init__(self) -> None:
        self._settle(self.op)

    @property
    def when(self) -> tuple[Gate, ...]:
        """The conditions on which it depends; ``use`` has none of its own."""
        return ()

    @property
    def scope(self) -> Scope:
        """The tokens that it touches; ``use`` leaves them to the edits of its module."""
        return Scope()

    @property
    def read_strength(self) -> tuple[str, Strength] | None:
        """The field that holds a strength that is read, and the strength."""
        for key in ("scale", "value"):
            if isinstance(one := getattr(self, key, None), Strength):
                return key, one
        return None

    def sources(self) -> Iterator[tuple[str, Source]]:
        """What the edit reads to decide whether and how strongly to act, and its path below the edit."""
        yield from ((f"when[{n}]", gate) for n, gate in enumerate(self.when))
        if self.read_strength is not None:
            yield self.read_strength

    def mentions(self) -> Iterator[tuple[str, str, str]]:
        """Every name in the edit and its gates: its kind, one of ``NAMES``, its path below the edit, and the name."""
        for path, one in [("", self), *((f"{path}.", source) for path, source in self.sources())]:
            for kind in NAMES:
                if isinstance(name := getattr(one, kind, None), str):
                    yield kind, f"{path}{kind}", name

    def to_json(self) -> Json:
        """The canonical JSON object: ``op`` comes first, fields with their default value are left out."""
        return {"op": self.op, **Record.to_json(self)}


@dataclass(frozen=True)
class TokenEdit(Edit):
    """An edit of the tokens of a scope, where the conditions hold."""

    _: KW_ONLY
    when: tuple[Gate, ...] = may(gates, (), single=True)
    scope: Scope = may(record(Scope), Scope())


@dataclass(frozen=True)
class VectorEdit(TokenEdit):
    """An edit along a vector, at one site or several."""

    vector: Vector = field(metadata=by(vector))
    site: tuple[str, ...] = field(metadata=by(sites, single=True))


@dataclass(frozen=True)
class Clamp(TokenEdit):
    """Changes one feature from f to f'; a group of neighbouring clamps makes x' = x + Σ (f' − f) d."""

    op: ClassVar[str] = "clamp"

    dictionary: str = field(metadata=by(text, missing="a dictionary's name, or an address in feature"))
    feature: int = field(metadata=by(feature))
    value: float | Strength = field(metadata=by(strength))  # in units of `unit`; in mode scale a factor
    mode: Mode = may(one_of("set", "add", "scale", "min", "max"), "set")
    unit: ClampUnit = may(one_of("raw", "max_act"), "raw")
    only_if_active: bool = may(flag, False)
    _: KW_ONLY
    layer: int | None = may(layer)

    @classmethod
    def _spelled_out(cls, given: Fields, at: str) -> Fields:
        return address.one(given, at)

    def _whole(self, at: str) -> None:
        if self.mode == "scale" and self.unit == "max_act":
            fail(f"{at}.unit", "conflict", "got max_act with mode scale, expected raw: a factor has no unit")
        if isinstance(self.value, Strength) and self.mode != "add":
            found = f"got a strength that is read, which needs mode add; with mode {self.mode} expected a number"
            fail(f"{at}.value", "conflict", found)


@dataclass(frozen=True)
class Add(VectorEdit):
    """x' = x + scale · v; with norm match, v is first scaled to the length of x."""

    op: ClassVar[str] = "add"

    scale: float | Strength = may(strength, 1.0)
    norm: Literal["none", "match"] = may(one_of("none", "match"), "none")
    scales: tuple[float, ...] | None = may(_scales)  # more factors, by layer

    def _whole(self, at: str) -> None:
        if self.scales is not None and "." in "".join(self.site):
            fail(f"{at}.scales", "conflict", "is one number for each layer, expected a kind alone as site")


@dataclass(frozen=True)
class Cap(VectorEdit):
    """p = x · v̂; x' = x + strength · (clip(p, min, max) − p) · v̂."""

    op: ClassVar[str] = "cap"

    min: float | None = may(number)
    max: float | None = may(number)
    strength: float = may(number, 1.0)

    def _whole(self, at: str) -> None:
        if self.min is None and self.max is None:
            fail(f"{at}.max", "missing_field", "is missing, expected min, max or both")
        _check_order(self, at)


@dataclass(frozen=True)
class Ablate(VectorEdit):
    """x' = x − strength · (x · v̂) · v̂; strength 1 removes, 2 mirrors, −1 doubles."""

    op: ClassVar[str] = "ablate"

    strength: float = may(number, 1.0)


@dataclass(frozen=True)
class Reconstruct(TokenEdit):
    """Puts the dictionary's reconstruction in place of x, with the group of clamps directly before it."""

    op: ClassVar[str] = "reconstruct"

    dictionary: str = field(metadata=by(text))
    error: Literal["keep", "drop"] = may(one_of("keep", "drop"), "drop")
    _: KW_ONLY
    layer: int | None = may(layer)


@dataclass(frozen=True)
class Use(Edit):
    """Applies the edits of a registered module, every delta multiplied by scale."""

    op: ClassVar[str] = "use"

    module: str = field(metadata=by(text))
    scale: float | Strength = may(strength, 1.0)


# By op; the rules, which change nothing, are in rules.py.
OPS: dict[str, type[Edit]] = {one.op: one for one in (Clamp, Add, Cap, Ablate, Reconstruct, Use)}
