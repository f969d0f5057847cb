"""How a function of ours takes the place of a function of vLLM. Knows no such function."""

from collections.abc import Callable
from functools import wraps
from typing import Any

Original = Callable[..., Any]


def around(stand_in: Callable[..., Any]) -> Callable[[Original], Original]:
    """Turns a function of an original and the original's arguments into one that replaces an original."""

    @wraps(stand_in, updated=())
    def wrap(original: Original) -> Original:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return stand_in(original, *args, **kwargs)

        return call

    del wrap.__wrapped__  # its signature is its own
    return wrap
