"""The request language: a whole spec, from JSON and to JSON, and the functions that build edits. Knows no server.

``from_json`` returns a spec that is well-formed in every field. ``saesteer.planning`` checks that its names exist, and
finds the tokens that it touches. The edits are in edits.py, the rules in rules.py, the reads in returns.py, the error
codes in fields.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

from saesteer.errors import SpecError
from saesteer.language.alike import Alike, Edits, parts_of, with_following
from saesteer.language.edits import (
    MAX_POSITIONS,
    OPS,
    Ablate,
    Add,
    Cap,
    Clamp,
    ClampUnit,
    Edit,
    Gate,
    Interval,
    Mode,
    Reconstruct,
    Scope,
    Strength,
    Use,
)
from saesteer.language.fields import (
    Fields,
    Json,
    Record,
    fail,
    known_field,
    listed,
    mapping,
    may,
    one_of,
    read,
    record,
    show,
)
from saesteer.language.fields import flag as boolean
from saesteer.language.inline import Array, InlineVector, Vector
from saesteer.language.returns import ActivationRead, Consumer, FeatureRead, HiddenRead, ProbeRead, Return
from saesteer.language.rules import RULES, Flag, Stop

__all__ = [
    "MAX_CHARACTERS",
    "MAX_EDITS",
    "MAX_POSITIONS",
    "OPS",
    "RULES",
    "Ablate",
    "ActivationRead",
    "Add",
    "Cap",
    "Clamp",
    "Consumer",
    "Edit",
    "FeatureRead",
    "Flag",
    "Gate",
    "HiddenRead",
    "InlineVector",
    "Interval",
    "ProbeRead",
    "Reconstruct",
    "Return",
    "Scope",
    "Spec",
    "Stop",
    "Strength",
    "Use",
    "Vector",
    "ablate",
    "add",
    "as_spec",
    "cap",
    "clamp",
    "flag",
    "from_json",
    "reconstruct",
    "stop",
    "use",
]

P = ParamSpec("P")
R = TypeVar("R")
VERSION: Literal[1] = 1
MAX_CHARACTERS = 16 * 2**20  # of a spec as JSON text
MAX_VECTORS = MAX_CHARACTERS // 4 * 3  # bytes of all its inline vectors, as many as such a text can hold
MAX_EDITS = 4096  # in one spec; a server's own limit is lower


def _version(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(at, "wrong_type", f"got {show(value)}, expected {VERSION}")
    if value != VERSION:
        fail(at, "unknown_version", f"got {show(value)}, expected {VERSION}")
    return value


_LIST = '{"edits": [...]}'
_OPS: dict[str, type[Edit]] = {**OPS, **RULES}
_op = one_of(*_OPS)


def _edit(value: Any, at: str) -> Edit:
    """An edit or a rule; ``op`` says which kind it is."""
    if isinstance(value, Edit):
        return value
    mapping(value, at)
    if "op" not in value:
        fail(f"{at}.op", "missing_field", f"is missing, expected one of {', '.join(_OPS)}")
    return read(_OPS[_op(value["op"], f"{at}.op")], value, at, extra="op")


def _edits(value: Any, at: str) -> Edits:
    if isinstance(value, Edits):
        return value
    if isinstance(value, Mapping):
        fail(at, "wrong_type", f"got {show(value)}, expected a list, as in {_LIST}")
    items = listed(value, at, MAX_EDITS)
    parts: list[Alike] = []
    place = total = brought = 0
    vectors: set[int] = set()  # by id: edits that are made in Python may share one

    def bring(vector: Any, size: int, field: str) -> None:
        nonlocal brought
        if id(vector) not in vectors:
            vectors.add(id(vector))
            brought += size
        if brought > MAX_VECTORS:
            message = f"makes {brought} bytes of vectors up to here, expected at most {MAX_VECTORS}"
            fail(f"{path}.{field}", "too_many", message)

    while place < len(items):
        path, item = f"{at}[{place}]", items[place]
        numbers = item.get("vector") if isinstance(item, Mapping) else getattr(item, "vector", None)
        if isinstance(numbers, list | tuple):  # before they are read, which takes longer than for bytes
            bring(numbers, 4 * len(numbers), "vector")
        edit = _edit(item, path)
        vector = getattr(edit, "vector", None)
        if isinstance(vector, InlineVector):
            bring(vector, len(vector.data), "vector.data")
        intervals = len(edit.scope.positions or ())
        if total + intervals > MAX_POSITIONS:
            fail(
                f"{path}.scope.positions",
                "too_many",
                f"got {total + intervals} intervals up to here, expected at most {MAX_POSITIONS}",
            )
        room = (MAX_POSITIONS - total) // intervals if intervals else len(items)
        part = with_following(edit, items, place, min(len(items), place + room))
        parts.append(part)
        place += part.size
        total += part.size * intervals
    return Edits(parts)


@dataclass(frozen=True)
class Spec(Record):
    """Everything that a request asks for."""

    label: ClassVar[str] = "saesteer"

    edits: Sequence[Edit] = may(_edits, Edits())  # as ``Edits``, whatever came
    returns: Return = may(record(Return), Return(), key="return")
    defaults: bool = may(boolean, True)  # whether the server's default module applies
    version: Literal[1] = may(_version, VERSION)
    model: str | None = None  # the module that the request's model names, in front of the edits; no field of the JSON

    @classmethod
    def _spelled_out(cls, given: Fields, at: str) -> Fields:
        if "op" in given:
            fail(f"{at}.op", "unknown_field", f"is a field of an edit, which belongs into a list: {_LIST}")
        return given

    def _whole(self, at: str) -> None:
        reads = [(path, len(scope.positions)) for path, scope in self.returns.scopes() if scope.positions]
        total = sum(one.size * len(one.first.scope.positions or ()) for one in parts_of(self.edits)) if reads else 0
        for path, intervals in reads:
            total += intervals
            if total > MAX_POSITIONS:
                message = f"got {total} intervals up to here, expected at most {MAX_POSITIONS}"
                fail(f"{at}.return.{path}.scope.positions", "too_many", message)


def from_json(value: str | Fields) -> Spec:
    """Reads a spec from a JSON object, or from its text.

    Raises:
        SpecError: it is wrong; ``field`` is the path, ``code`` one of ``CODES`` in language/fields.py.
    """
    return read(Spec, _load(value) if isinstance(value, str) else value, "saesteer")


def _load(document: str) -> Any:
    if len(document) > MAX_CHARACTERS:
        fail("saesteer", "too_many", f"got {len(document)} characters of JSON, expected at most {MAX_CHARACTERS}")
    try:
        return json.loads(document, object_pairs_hook=_unique)
    except RecursionError:
        fail("saesteer", "bad_json", "is nested too deeply, expected the JSON object of a spec")
    except json.JSONDecodeError as error:
        fail("saesteer", "bad_json", f"is not JSON ({error}), expected the JSON object of a spec")
    except SpecError:
        raise
    except ValueError:
        fail(
            "saesteer", "out_of_range", "got an integer of thousands of digits, expected a number that float32 can hold"
        )


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found: Json = {}
    for key, value in pairs:
        if key in found:
            fail("saesteer", "duplicate", f"got the key {show(key)} twice in one object, expected it once")
        found[key] = value
    return found


def as_object(steer: Any) -> Any:
    """Return the JSON object that one edit or a list of edits stands for, and anything else as it is."""
    if isinstance(steer, Edit) or (isinstance(steer, Mapping) and "op" in steer):
        return {"edits": [steer]}
    return {"edits": steer} if isinstance(steer, list | tuple) else steer


def as_spec(steer: Any) -> Spec | None:
    """A spec from what Python callers pass: a spec, its JSON, one edit or a list of edits; None stays None.

    Raises:
        SpecError: it is wrong.
    """
    return steer if steer is None or isinstance(steer, Spec) else from_json(as_object(steer))


def _named(build: Callable[P, R]) -> Callable[P, R]:
    """The same function, which refuses an unknown argument as the language refuses a field."""
    known = signature(build).parameters

    @wraps(build)
    def call(*values: P.args, **given: P.kwargs) -> R:
        for key in given.keys() - known:
            known_field(key, build.__name__, known)
        return build(*values, **given)

    return call


Steer = Spec | Edit | Fields | Sequence[Edit | Fields] | None  # as as_spec takes it

Number = float | Strength | Fields  # a mapping as in JSON
When = Gate | Fields | Sequence[Gate | Fields] | None
Within = Scope | Fields | None
Sites = str | Sequence[str]
AnyVector = str | Sequence[float] | Array | InlineVector | Fields

# The functions below have the fields of a record as their arguments, which ``read`` checks as it does JSON.


@_named
def clamp(
    dictionary: str | None = None,
    feature: int | str | None = None,
    value: Number | None = None,
    mode: Mode = "set",
    unit: ClampUnit = "raw",
    only_if_active: bool = False,
    when: When = None,
    scope: Within = None,
    layer: int | None = None,
) -> Clamp:
    """Clamps one feature of a dictionary: sets it, adds to it, scales it, or bounds it by min or max.

    Args:
        dictionary: the dictionary's name on the server; left out where ``feature`` is an address.
        feature: the feature's index, or its address at Neuronpedia, ``gemma-2-2b/20-gemmascope-res-16k/3124``.
        value: in the dictionary's unit; with ``unit="max_act"`` in multiples of the feature's largest known activation.
        mode: ``set`` f' = v, ``add`` f' = f + v, ``scale`` f' = f · v, ``min`` f' = max(f, v), ``max`` f' = min(f, v).
        unit: of the value.
        only_if_active: leave tokens alone where the feature is 0.
        when: a condition or several, such as ``{"dictionary": "gs20", "feature": 99, "above": 3.0}``.
        scope: the tokens, such as ``{"generated": True}``; by default all except the first.
        layer: which dictionary of a set.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Clamp, {key: one for key, one in locals().items() if one is not None}, Clamp.op)


@_named
def add(
    vector: AnyVector,
    site: Sites,
    scale: Number = 1.0,
    norm: Literal["none", "match"] = "none",
    scales: Sequence[float] | None = None,
    when: When = None,
    scope: Within = None,
) -> Add:
    """Adds a vector at one site or several; ``norm="match"`` first scales it to the stream's length.

    ``scales`` holds one more factor for each layer of a vector that is added at all of its layers.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Add, locals(), Add.op)


@_named
def cap(
    vector: AnyVector,
    site: Sites,
    max: float | None = None,
    min: float | None = None,
    strength: float = 1.0,
    when: When = None,
    scope: Within = None,
) -> Cap:
    """Keeps the projection on a vector at most ``max`` and at least ``min``.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Cap, locals(), Cap.op)


@_named
def ablate(vector: AnyVector, site: Sites, strength: float = 1.0, when: When = None, scope: Within = None) -> Ablate:
    """Removes the projection on a vector.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Ablate, locals(), Ablate.op)


@_named
def reconstruct(
    dictionary: str,
    error: Literal["keep", "drop"] = "drop",
    when: When = None,
    scope: Within = None,
    layer: int | None = None,
) -> Reconstruct:
    """Puts the dictionary's reconstruction in place of the stream, with the clamps directly before it.

    ``layer`` says which dictionary of a set.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Reconstruct, locals(), Reconstruct.op)


@_named
def use(module: str, scale: Number = 1.0) -> Use:
    """Uses a registered module, each of its deltas multiplied by ``scale``.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Use, locals(), Use.op)


@_named
def stop(when: When, run: int = 1, scope: Within = None) -> Stop:
    """Ends the request once the conditions have held for ``run`` tokens in a row; ``for`` in JSON.

    Args:
        when: a condition or several, such as ``{"probe": "risk", "above": 0.5}``.
        run: tokens in a row.
        scope: the tokens that are watched; by default the generated ones.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Stop, {"when": when, "for": run, "scope": scope}, Stop.op)


@_named
def flag(when: When, run: int = 1, scope: Within = None) -> Flag:
    """Marks the answer where the conditions have first held for ``run`` tokens in a row; arguments as ``stop``.

    Raises:
        SpecError: a value is wrong.
    """
    return read(Flag, {"when": when, "for": run, "scope": scope}, Flag.op)
