"""Replaces a function of vLLM with one of ours. Does not know any such function."""

from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from typing import Any

Original = Callable[..., Any]


def around(stand_in: Callable[..., Any]) -> Callable[[Original], Original]:
    """Turn a function that takes an original and its arguments into one that replaces the original.

    The replacement keeps the original as ``__wrapped__``.
    """

    @wraps(stand_in, updated=())
    def wrap(original: Original) -> Original:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return stand_in(original, *args, **kwargs)

        return call

    del wrap.__wrapped__  # it has its own signature
    return wrap


def around_method_of(owner: Any) -> Callable[[Callable[..., Any]], None]:
    """Put a function that takes an original and its arguments around one object's method of the same name."""

    def put(stand_in: Callable[..., Any]) -> None:
        original = getattr(owner, stand_in.__name__)
        # A partial has no frame of its own: some of these are called in every step of the engine.
        setattr(owner, stand_in.__name__, update_wrapper(partial(stand_in, original), original))

    return put
