"""What a request may read from its own forward pass: features, probes, activations, hidden states. Knows no server.

A read includes position 0, unlike an edit, and leaves first positions alone only if its scope says so.
``saesteer.planning.readouts`` checks what depends on the server.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from saesteer.language import address
from saesteer.language.edits import GENERATED, Interval, Scope, feature, intervals, layer
from saesteer.language.fields import (
    Fields,
    Json,
    Record,
    by,
    fail,
    flag,
    integer,
    list_of,
    mapping,
    may,
    one_of,
    read,
    record,
    show,
    site,
    sites,
    step,
    text,
)
from saesteer.language.sites import KINDS, canonical

MAX_READS = 256  # of each kind in `return`
MAX_TOP_K = 1024
MAX_NAMED = 1024  # features that one read names
MAX_CONSUMERS = 16
MAX_PARAMETERS = 2**16  # characters of JSON, of all consumers together
MAX_NESTED = 32  # lists and objects inside one another, in the parameters of a consumer
TOP_K = 8  # where a read neither says top_k nor names features

EVERYTHING = Scope()
_WORDS = {"all": EVERYTHING, "prompt": Scope(prompt=True), "generated": GENERATED}  # of `positions`
_LISTS = ("features", "probes", "activations")  # the reads of `return` that are lists

Moment = Literal["before", "after"]
Cached = Literal["recompute", "skip"]
Reduce = Literal["none", "mean", "max", "last", "message"]


_cached = by(one_of("recompute", "skip"))


@dataclass(frozen=True)
class TokenRead(Record):
    """A read at a site, of the tokens of a scope."""

    _: KW_ONLY
    scope: Scope = may(record(Scope), GENERATED)
    at: Moment = may(one_of("before", "after"), "before")  # the request's own edits of the site
    cached: Cached = field(default="recompute", metadata=_cached)  # what happens to prompt tokens in the prefix cache


@dataclass(frozen=True)
class FeatureRead(TokenRead):
    """Returns the strongest features of each token, features by name, or both."""

    label: ClassVar[str] = "features"
    example: ClassVar[str] = '{"dictionary": "gs20", "features": [3124]}'

    dictionary: str = field(metadata=by(text))
    top_k: int | None = may(integer(1, MAX_TOP_K))
    features: tuple[int, ...] = may(list_of(feature, MAX_NAMED, key=int), ())
    _: KW_ONLY
    layer: int | None = may(layer)

    @classmethod
    def _spelled_out(cls, given: Fields, at: str) -> Fields:
        return address.several(given, at)

    def _whole(self, at: str) -> None:
        if self.top_k == TOP_K and not self.features:
            object.__setattr__(self, "top_k", None)  # it is the default, and equal reads have equal JSON

    @property
    def strongest(self) -> int:
        """How many of the strongest features are wanted, 0 if only named ones are."""
        return self.top_k or (0 if self.features else TOP_K)


@dataclass(frozen=True)
class ProbeRead(TokenRead):
    """Returns the score of each token by a probe; in JSON, the probe's name alone stands for it as well."""

    label: ClassVar[str] = "probes"

    probe: str = field(metadata=by(text))
    site: str | None = may(site)  # None: that of the probe's only layer


def _positions(value: Any, at: str) -> str | tuple[Interval, ...]:
    if not isinstance(value, str | list | tuple):
        fail(at, "wrong_type", f"got {show(value)}, expected {', '.join(_WORDS)} or a list of [start, end]")
    found: str | tuple[Interval, ...] = (one_of(*_WORDS) if isinstance(value, str) else intervals)(value, at)
    return found


@dataclass(frozen=True)
class ActivationRead(TokenRead):
    """Returns the tensor at a site, or those at several as one, [rows, sites, width].

    ``positions`` is an older word for ``scope``; the record turns it into a scope when it is made.
    """

    label: ClassVar[str] = "activations"
    example: ClassVar[str] = '{"site": "resid_post.20"}'

    site: tuple[str, ...] = field(metadata=by(sites, single=True))  # or a kind alone: every layer that is kept
    reduce: Reduce = may(one_of(*get_args(Reduce)), "none")
    _: KW_ONLY
    scope: Scope = may(record(Scope), EVERYTHING)
    transport: Literal["inline", "handle"] = field(default="inline", metadata=by(one_of("inline", "handle"), key="as"))
    positions: str | tuple[Interval, ...] | None = may(_positions)

    def _whole(self, at: str) -> None:
        if self.positions is None:
            return
        if self.scope is not EVERYTHING:
            fail(f"{at}.positions", "conflict", "is another word for scope, which is given too, expected one of them")
        scope = _WORDS[self.positions] if isinstance(self.positions, str) else Scope(positions=self.positions)
        object.__setattr__(self, "scope", scope)
        object.__setattr__(self, "positions", None)


@dataclass(frozen=True)
class HiddenRead(Record):
    """Returns what lm_head multiplies, for the tokens of a scope."""

    label: ClassVar[str] = "hidden"

    scope: Scope = field(metadata=by(record(Scope)))
    cached: Cached = field(default="recompute", kw_only=True, metadata=_cached)


@dataclass(frozen=True)
class Consumer:
    """A consumer that gets what the request reads, with its parameters as JSON text, since a spec can be hashed."""

    name: str
    text: str

    @property
    def parameters(self) -> Json:
        """The JSON object that the request gives to the consumer."""
        found: Json = json.loads(self.text)
        return found


def _probe(value: Any, at: str) -> ProbeRead:
    return read(ProbeRead, {"probe": text(value, at)} if isinstance(value, str) else value, at)


def _hidden(value: Any, at: str) -> bool | HiddenRead:
    if not isinstance(value, bool | Mapping | HiddenRead):
        fail(at, "wrong_type", f"got {show(value)}, expected true, false or an object with scope")
    return value if isinstance(value, bool) else read(HiddenRead, value, at)


def _consumers(value: Any, at: str) -> tuple[Consumer, ...]:
    """An object of parameters by the consumer's name, as consumers in the order of their names."""
    if isinstance(value, tuple) and all(isinstance(one, Consumer) for one in value):  # from Python, or canonical
        value = _parameters_of(value, at)
    mapping(value, at)
    if len(value) > MAX_CONSUMERS:
        fail(at, "too_many", f"got {len(value)} consumers, expected at most {MAX_CONSUMERS}")
    found, total = [], 0
    for name in sorted(value):
        path = step(at, name)
        mapping(value[name], path)
        _check_json(value[name], path, MAX_NESTED)
        one = Consumer(text(name, path), json.dumps(value[name], sort_keys=True, separators=(",", ":")))
        total += len(one.text)
        if total > MAX_PARAMETERS:
            fail(path, "too_many", f"makes {total} characters of JSON, expected at most {MAX_PARAMETERS} in all")
        found.append(one)
    return tuple(found)


def _parameters_of(consumers: tuple[Consumer, ...], at: str) -> Json:
    try:
        found = {one.name: one.parameters for one in consumers}
    except ValueError as error:
        fail(at, "bad_json", f"holds parameters that are not JSON ({error}), expected the text of an object")
    if len(found) < len(consumers):
        fail(at, "duplicate", "names a consumer twice, expected each once")
    return found


def _check_json(value: Any, at: str, depth: int) -> None:
    """Refuse what JSON cannot express; the path is that of the parameters, which may be large."""
    if isinstance(value, Mapping | list | tuple):
        if depth == 0:
            fail(at, "too_many", f"is nested more than {MAX_NESTED} deep, expected at most that")
        for one in mapping(value, at).values() if isinstance(value, Mapping) else value:
            _check_json(one, at, depth - 1)
    elif isinstance(value, float):
        if value != value or abs(value) == float("inf"):
            fail(at, "not_finite", f"holds {show(value)}, expected finite numbers")
    elif isinstance(value, int):
        if abs(value) >= 2**64:
            fail(at, "out_of_range", f"holds {show(value)}, expected integers of at most 64 bits")
    elif value is not None and not isinstance(value, str):
        fail(at, "wrong_type", f"holds {show(value)}, expected the values of JSON")


def _place(one: ActivationRead) -> tuple[str, ...]:
    return tuple(name if name in KINDS else canonical(name) for name in one.site)


@dataclass(frozen=True)
class Return(Record):
    """What a request wants back from its own forward pass."""

    label: ClassVar[str] = "return"

    features: tuple[FeatureRead, ...] = field(
        default=(),
        metadata=by(
            list_of(record(FeatureRead), MAX_READS, key=lambda one: (one.dictionary, one.layer, one.at)),
        ),
    )
    probes: tuple[ProbeRead, ...] = field(
        default=(),
        metadata=by(list_of(_probe, MAX_READS, key=lambda one: (one.probe, one.site and canonical(one.site), one.at))),
    )
    activations: tuple[ActivationRead, ...] = field(
        default=(), metadata=by(list_of(record(ActivationRead), MAX_READS, key=lambda one: (_place(one), one.at)))
    )
    hidden: bool | HiddenRead = may(_hidden, False)  # true: that of the last sampled token
    consumers: tuple[Consumer, ...] = may(_consumers, ())
    dose: bool = may(flag, False)  # how much the edits change each site, relative to the stream

    def scopes(self) -> Iterator[tuple[str, Scope]]:
        """The scope of each read, after the path of the read below ``return``."""
        for name in _LISTS:
            yield from ((f"{name}[{i}]", one.scope) for i, one in enumerate(getattr(self, name)))
        if isinstance(self.hidden, HiddenRead):
            yield "hidden", self.hidden.scope

    def with_scopes(self, change: Callable[[str, Scope], Scope]) -> "Return":
        """The same reads with other scopes.

        Args:
            change: a function: the path of a read below ``return`` and its scope → the new scope.
        """
        ahead = iter([change(path, scope) for path, scope in self.scopes()])
        found: Json = {name: tuple(replace(one, scope=next(ahead)) for one in getattr(self, name)) for name in _LISTS}
        if isinstance(self.hidden, HiddenRead):
            found["hidden"] = replace(self.hidden, scope=next(ahead))
        return replace(self, **found)

    def to_json(self) -> Json:
        """The canonical JSON object: fields with their default value are left out."""
        found = Record.to_json(self)
        if self.probes:
            found["probes"] = [one["probe"] if len(one) == 1 else one for one in found["probes"]]
        if self.consumers:
            found["consumers"] = {one.name: one.parameters for one in self.consumers}
        return found
