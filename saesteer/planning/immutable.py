"""Small objects of which a request makes dozens, and which nothing changes. Knows no plan.

Type checkers refuse to change them, and nothing does at run time: a dataclass that is frozen there takes eight times as
long to make.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots, whose objects are equal, and have the same hash, by their fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, eq_default=False)
def distinct(cls: type[T]) -> type[T]:
    """Make a class the same, except that each of its objects equals itself alone."""
    return dataclass(slots=True, eq=False)(cls)
