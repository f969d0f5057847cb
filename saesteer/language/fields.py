"""Checks of single values in a request, which need only the value and its path. Knows no edit and no dictionary.

A check takes a value and its path and returns the value in canonical form, or raises SpecError. A Record is an object
with known fields, each with a check. A record never holds a wrong value, whether it comes from JSON or is made in
Python, and equal records have equal JSON.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from heapq import nlargest
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args

from saesteer.errors import ConfigError, SpecError
from saesteer.language.sites import KINDS, canonical, parse

MAX_NAME = 128  # characters
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
_COMPARABLE = 64  # characters; a longer name gets no suggestion
_COMPARED = 32  # known names that are compared with it letter by letter, at most

Code = Literal[
    "bad_json",  # the text is not JSON
    "conflict",  # two values that are fine alone do not go together
    "duplicate",  # something appears twice that may appear once
    "empty_scope",  # no token could ever be edited
    "missing_field",
    "not_finite",  # NaN or infinity
    "not_served",  # correct, but this version cannot do it
    "out_of_range",
    "results_full",  # the server keeps as many results as it may
    "too_large",  # it may read more bytes than the server brings home for one request
    "too_many",  # over a limit on size or count
    "unknown_field",
    "unknown_max_act",  # the dictionary's max activations are not known; `saesteer calibrate` finds them
    "unknown_name",  # a dictionary, site, op, mode ... that does not exist
    "unknown_version",
    "unreadable",  # a dictionary by rows whose file has changed or vanished
    "wrong_type",
    "zero_vector",  # a vector without a direction
]
CODES: tuple[str, ...] = get_args(Code)

_STRENGTHS = ("strength", "coefficient", "coeff", "multiplier", "alpha")  # elsewhere, for value or scale
_NUMBERS = (int, float)

Json = dict[str, Any]  # an object of JSON
Fields = Mapping[str, Any]  # one that nobody changes
Check = Callable[[Any, str], Any]
R = TypeVar("R", bound="Record")


def fail(at: str, code: Code, message: str) -> NoReturn:
    """Raises SpecError for the field at this path."""
    raise SpecError(message, field=at, code=code)


def show(value: object) -> str:
    """A value as messages show it: short, printable, and safe to encode."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_NAME else f"{value[:40]!r}... ({len(value)} characters)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**40 else "an integer of more than 40 digits"
    return f"a {type(value).__name__}"


def listing(names: Iterable[Any], most: int = 20) -> str:
    """Known names or numbers in one phrase; of many, only the first."""
    known = sorted(names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return (", ".join(map(str, known[:most])) or "none") + rest


def closest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` if a known name is close, else an empty text.

    difflib's time grows with the square of a name's length and with the number of known names. So long names get no
    suggestion, and of many known names it compares only those that share the most pairs of letters with this one.
    """
    if len(name) > _COMPARABLE:
        return ""
    pairs = [name[i : i + 2] for i in range(len(name) - 1)]
    likely = nlargest(_COMPARED, known, key=lambda one: sum(map(one.__contains__, pairs)))
    found = get_close_matches(name, likely, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def step(at: str, key: object) -> str:
    """The path of a field below ``at``; a key that is not a plain word is quoted and shortened."""
    plain = isinstance(key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", key, re.ASCII)
    if isinstance(key, str) and len(key) > MAX_NAME:
        key = f"{key[:40]}..."
    return f"{at}.{key}" if plain else f"{at}[{show(key)}]"


def text(value: Any, at: str) -> str:
    """A name: 1 to 128 printable characters."""
    if not isinstance(value, str):
        fail(at, "wrong_type", f"got {show(value)}, expected a name")
    if not 0 < len(value) <= MAX_NAME or not value.isprintable():
        fail(at, "out_of_range", f"got {show(value)}, expected a name of 1 to {MAX_NAME} printable characters")
    return value


def flag(value: Any, at: str) -> bool:
    """A boolean; 0 and 1 are refused."""
    if not isinstance(value, bool):
        fail(at, "wrong_type", f"got {show(value)}, expected true or false")
    return value


def number(value: Any, at: str) -> float:
    """A finite number within float32, not a boolean. −0.0 becomes 0.0, since equal specs have equal JSON."""
    if value.__class__ is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:  # as most are; false for NaN
        return value + 0.0
    if value.__class__ not in _NUMBERS and (isinstance(value, bool) or not isinstance(value, Real)):
        fail(at, "wrong_type", f"got {show(value)}, expected a number{_unquoted(value)}")
    if value != value or value in (float("inf"), float("-inf")):
        fail(at, "not_finite", f"got {show(float(value))}, expected a finite number")
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # type: ignore[operator]  # reals of every kind compare with floats
        fail(at, "out_of_range", f"got {show(value)}, expected a number that float32 can hold, up to {FLOAT32_MAX:.6g}")
    return float(value) + 0.0


def _unquoted(value: object) -> str:
    plain = isinstance(value, str) and len(value) < _COMPARABLE and re.fullmatch(r"-?\d+(\.\d+)?", value)
    return f" (did you mean {value} without quotes?)" if plain else ""


def integer(low: int, high: int, what: str = "") -> Check:
    """An integer from ``low`` to ``high``, in words if they say more; 34.0 is one, as tables of numbers write it."""

    def check(value: Any, at: str) -> int:
        if value.__class__ is float and value.is_integer():
            value = int(value)
        if value.__class__ is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
            fail(at, "wrong_type", f"got {show(value)}, expected an integer{_unquoted(value)}")
        found = int(value)
        if not low <= found <= high:
            fail(at, "out_of_range", f"got {show(found)}, expected {what or f'an integer from {low} to {high}'}")
        return found

    return check


def one_of(*words: str) -> Check:
    """One of a few words."""

    def check(value: Any, at: str) -> str:
        if not isinstance(value, str):
            fail(at, "wrong_type", f"got {show(value)}, expected one of {', '.join(words)}")
        if value not in words:
            fail(at, "unknown_name", f"got {show(value)}{closest(value, words)}, expected one of {', '.join(words)}")
        return value

    return check


def optional(check: Check, default: Any = None) -> Check:
    """The same check, except that null means absent."""
    return lambda value, at: default if value is None else check(value, at)


def listed(value: Any, at: str, most: int) -> Sequence[Any]:
    """A list of at most ``most`` items, which are not checked."""
    if not isinstance(value, list | tuple):
        fail(at, "wrong_type", f"got {show(value)}, expected a list")
    if len(value) > most:
        fail(at, "too_many", f"got {len(value)} items, expected at most {most}")
    return value


def list_of(
    check: Check,
    most: int,
    key: Callable[[Any], object] | None = None,
    least: tuple[Code, str] | None = None,
    *,
    alone: bool = False,
) -> Check:
    """A list of at most ``most`` items.

    Args:
        check: of each item.
        most: items.
        key: no two items have the same.
        least: the code with which an empty list is refused, and what an item is.
        alone: an item without a list around it stands for a list of one.
    """

    def check_all(value: Any, at: str) -> tuple[Any, ...]:
        if alone and not isinstance(value, list | tuple):
            return (check(value, at),)
        listed(value, at, most)
        if least and not value:
            fail(at, least[0], f"got an empty list, expected at least one {least[1]}")
        items = tuple(check(item, f"{at}[{i}]") for i, item in enumerate(value))
        if key is not None:
            first: dict[object, int] = {}
            for i, one in enumerate(map(key, items)):
                if first.setdefault(one, i) != i:
                    fail(f"{at}[{i}]", "duplicate", f"is at {at}[{first[one]}] already, expected it once")
        return items

    return check_all


def site(value: Any, at: str) -> str:
    """A site with its layer, as written; use ``canonical`` to compare sites."""
    try:
        parse(text(value, at))
    except ConfigError as error:
        fail(at, "unknown_name", str(error))
    return str(value)


def sites(value: Any, at: str) -> tuple[str, ...]:
    """One site, a list of sites, or a kind alone, which stands for every layer that there is."""
    if isinstance(value, str):
        return (value,) if value in KINDS else (site(value, at),)
    if isinstance(value, tuple) and len(value) == 1 and value[0] in KINDS:
        return value  # canonical already
    found: tuple[str, ...] = _sites(value, at)
    return found


_sites = list_of(site, 1024, key=canonical, least=("out_of_range", "site"))


def by(check: Check, *, key: str | None = None, single: bool = False, missing: str | None = None) -> Json:
    """Metadata of a Record's field.

    Args:
        check: of its value.
        key: its name in JSON, if it has another name in Python.
        single: a list of one item is written as that item.
        missing: what is expected where it is left out, in words; None: the field itself.
    """
    return {"check": check, "key": key, "single": single, "missing": missing}


def may(check: Check, default: Any = None, **more: Any) -> Any:
    """A Record's field that may be left out; null is the same, as clients write what is unset. More goes to ``by``."""
    return field(default=default, metadata=by(optional(check, default), **more))


def plain(value: Any) -> Any:
    """A value in the types of JSON: records, arrays and tensors as well, and what objects and lists hold."""
    if isinstance(value, Record):
        return value.to_json()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return [plain(item) for item in value] if several else value


@dataclass(frozen=True)
class Record:
    """An object with known fields, checked when it is made, in Python or from JSON.

    Records have no slots: one is made of a dict of its values, in a third of the time.
    """

    label: ClassVar[str]  # the path of a record that is not part of a spec yet
    example: ClassVar[str] = ""  # in JSON, for whoever gives something else

    def __post_init__(self) -> None:
        self._settle(self.label)

    def _settle(self, at: str) -> None:
        for key, one in table(type(self)).items():
            value = getattr(self, one.name)
            if value is not one.default:  # a default needs no check, and most fields have it
                object.__setattr__(self, one.name, one.metadata["check"](value, f"{at}.{key}"))
        self._whole(at)

    @classmethod
    def _spelled_out(cls, given: Fields, at: str) -> Fields:
        """A JSON object without short forms that stand for other fields; most records have none."""
        return given

    def _whole(self, at: str) -> None:
        """Refuses values that are right alone and contradict each other."""

    def __deepcopy__(self, memo: object) -> Self:
        """Itself, since neither a record nor what it holds ever changes: vLLM copies what a request brings."""
        return self

    def to_json(self) -> Json:
        """The canonical JSON object: fields with their default value are left out."""
        found: Json = {}
        for key, one in table(type(self)).items():
            value = getattr(self, one.name)
            if one.default is MISSING or value != one.default:
                found[key] = plain(value[0] if one.metadata["single"] and len(value) == 1 else value)
        return found


def read(cls: type[R], value: Any, at: str, *, extra: str | None = None) -> R:
    """A record from a JSON object, or the record itself.

    Args:
        cls: the record's class.
        value: the object.
        at: its path.
        extra: a field that the caller has already read.

    Raises:
        SpecError: anything about it is wrong.
    """
    if isinstance(value, cls):
        return value
    value = cls._spelled_out(mapping(value, at, cls.example), at)
    known = table(cls)
    for key in value:
        if key not in known and (key != extra or extra is None):
            known_field(key, at, [*([extra] if extra else []), *known])
    defaults, required = _blank(cls)
    if not required <= value.keys():
        key = next(key for key in known if key in required and key not in value)
        expected = known[key].metadata["missing"] or f"next to {listing(map(str, value))}"
        fail(f"{at}.{key}", "missing_field", f"is missing, expected {expected}")
    made = object.__new__(cls)
    values = made.__dict__
    values.update(defaults)
    for key, one in known.items():
        if key in value:
            values[one.name] = one.metadata["check"](value[key], f"{at}.{key}")
    made._whole(at)
    return made


def varied(one: R, **values: Any) -> R:
    """The same record with other values under names in Python, which are known to be right."""
    made = object.__new__(type(one))
    made.__dict__.update(one.__dict__, **values)
    return made


def record(cls: type[Record]) -> Check:
    """A record of this class."""
    return lambda value, at: read(cls, value, at)


def mapping(value: Any, at: str, example: str = "") -> Fields:
    """A JSON object whose keys are strings."""
    if value.__class__ is not dict and not isinstance(value, Mapping):
        such = f" such as {example}" if example else ""
        fail(at, "wrong_type", f"got {show(value)}, expected an object{such}")
    for key in value:
        if not isinstance(key, str):
            fail(at, "wrong_type", f"got the key {show(key)}, expected keys that are strings")
    return value


def known_field(key: str, at: str, known: Iterable[str]) -> NoReturn:
    """Refuses a field that does not exist."""
    known = list(known)
    meant = "value" if key in _STRENGTHS and "value" in known else "scale" if key in _STRENGTHS else key
    fail(step(at, key), "unknown_field", f"is not a field{closest(meant, known)}, expected only {', '.join(known)}")


_TABLES: dict[type, dict[str, Field[Any]]] = {}


def table(cls: type[Record]) -> dict[str, Field[Any]]:
    """The fields of a record by their names in JSON, in order; those that every edit has come last."""
    if cls not in _TABLES:
        own = sorted((one for one in fields(cls) if one.metadata), key=attrgetter("kw_only"))
        _TABLES[cls] = {one.metadata["key"] or one.name: one for one in own}
    return _TABLES[cls]


_BLANKS: dict[type, tuple[Json, frozenset[str]]] = {}


def _blank(cls: type[Record]) -> tuple[Json, frozenset[str]]:
    """The default values of a record by their names in Python, and the keys of the fields without one."""
    if cls not in _BLANKS:
        defaults = {one.name: one.default for one in table(cls).values() if one.default is not MISSING}
        _BLANKS[cls] = defaults, frozenset(key for key, one in table(cls).items() if one.default is MISSING)
    return _BLANKS[cls]
