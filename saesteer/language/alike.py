"""The edits of a spec, in which neighbouring clamps that differ in feature and value alone are one. Knows no server.

A request may bring hundreds of clamps. What they share is read, checked, compared and hashed once, and what differs
stays in tuples; a record for each is made only for those who want to see it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from saesteer.language.edits import Clamp, Edit
from saesteer.language.fields import FLOAT32_MAX, INT32_MAX, varied

_NUMBERS = (int, float)
_SHARED = attrgetter("dictionary", "layer", "mode", "unit", "only_if_active", "when", "scope")


class Alike(NamedTuple):
    """One edit, or several clamps."""

    first: Edit
    features: tuple[int, ...] = ()  # of each clamp; none where the edit is no clamp, or its value is read
    values: tuple[float, ...] = ()

    @classmethod
    def alone(cls, edit: Edit) -> "Alike":
        """One edit."""
        if edit.__class__ is Clamp and edit.value.__class__ is float:
            return cls(edit, (edit.feature,), (edit.value,))
        return cls(edit)

    @property
    def size(self) -> int:
        """How many edits they are."""
        return len(self.features) or 1

    def each(self) -> Iterator[Edit]:
        """The edits, one by one."""
        yield self.first
        for feature, value in zip(self.features[1:], self.values[1:], strict=True):
            yield varied(self.first, feature=feature, value=value)

    def part(self, start: int, end: int) -> "Alike":
        """Some of the edits."""
        features, values = self.features[start:end], self.values[start:end]
        first = varied(self.first, feature=features[0], value=values[0]) if start else self.first
        return Alike(first, features, values)


class Edits(Sequence[Edit]):
    """Edits in their order. Equal ones have equal parts, whether they came as JSON or were made in Python.

    Args:
        parts: of neighbours, some may be alike.
    """

    def __init__(self, parts: Iterable[Alike] = ()) -> None:
        self.parts = (*parts,)
        if len(self.parts) > 1:
            self.parts = tuple(_joined([*several]) for _, several in groupby(self.parts, _kind))

    @cached_property
    def _each(self) -> tuple[Edit, ...]:
        return tuple(chain.from_iterable(part.each() for part in self.parts))

    def __len__(self) -> int:
        return sum(part.size for part in self.parts)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self._each)

    def __getitem__(self, at: Any) -> Any:
        return self._each[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edits) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return repr(self._each)


def parts_of(edits: Sequence[Edit]) -> tuple[Alike, ...]:
    """The edits, in which neighbours that are alike are one."""
    return (edits if isinstance(edits, Edits) else Edits(map(Alike.alone, edits))).parts


def with_following(edit: Edit, items: Sequence[Any], at: int, end: int) -> Alike:
    """A clamp with those behind it whose JSON differs from its own in the numbers of feature and value alone.

    Args:
        edit: read from one of the items. It may be no clamp; then nothing follows.
        items: JSON values, of which those behind may be anything.
        at: which item the edit is.
        end: the items from there on are not looked at.
    """
    found, was = Alike.alone(edit), items[at]
    if at + 1 >= end or not found.features or was.__class__ is not dict:
        return found
    if was.get("feature").__class__ is not int:  # an address names its dictionary, which those behind may not
        return found
    shared = itemgetter(*[key for key in was if key not in ("feature", "value")])
    mine, size = shared(was), len(was)
    texts = all(one.__class__ is str for one in mine)  # a text equals nothing but a text, while 1 is true
    form = repr(mine)
    features, values = [*found.features], [*found.values]
    with suppress(KeyError):
        for n in range(at + 1, end):
            one = items[n]
            if one.__class__ is not dict or len(one) != size or shared(one) != mine:
                break
            feature, value = one["feature"], one["value"]
            if feature.__class__ is not int or value.__class__ not in _NUMBERS:
                break
            if not (0 <= feature <= INT32_MAX and -FLOAT32_MAX <= value <= FLOAT32_MAX):
                break  # what is wrong is refused where it is read by itself
            if not texts and repr(shared(one)) != form:
                break
            features.append(feature)
            values.append(value + 0.0)
    return Alike(edit, (*features,), (*values,))


def _kind(part: Alike) -> object:
    """What neighbouring clamps must have in common to be one."""
    return _SHARED(part.first) if part.features else object()


def _joined(several: Sequence[Alike]) -> Alike:
    if len(several) == 1:
        return several[0]
    features = chain.from_iterable(one.features for one in several)
    return Alike(several[0].first, (*features,), (*chain.from_iterable(one.values for one in several),))
