"""Small objects of which a request makes dozens, and which nothing changes. Knows no plan."""

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def immutable(cls: type[T], /) -> type[T]: ...


@overload
def immutable(*, eq: bool = True) -> Any: ...


@dataclass_transform(frozen_default=True)
def immutable(cls: Any = None, /, *, eq: bool = True) -> Any:
    """A dataclass with slots that type checkers refuse to change.

    At run time nothing does: a dataclass that is frozen there takes eight times as long to make.

    Args:
        cls: the class.
        eq: whether objects are equal, and have the same hash, by their fields.
    """
    made = dataclass(slots=True, eq=eq, unsafe_hash=eq)
    return made if cls is None else made(cls)
