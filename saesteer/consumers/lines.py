"""The consumer ``logging``: one line for each answer, with the largest number of each read. Keeps no rows."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from saesteer.consumers.consumer import Consumer, Request, Rows
from saesteer.language.fields import show

logger = logging.getLogger("vllm.saesteer.consumers")

_READS = 8  # that a line shows


class Logging(Consumer):
    """Writes a line to the server's log when an answer ends; it has no options and no parameters.

    The line has for each read the number of its rows, and its largest strength, score or component with its index.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._seen: dict[Request, dict[tuple[str, ...], tuple[int, float, int]]] = {}

    def take(self, request: Request, rows: Rows) -> None:
        """Count the rows of a read, and keep its largest number."""
        seen = self._seen.setdefault(request, {})
        count, largest, index = seen.get(rows.words, (0, -math.inf, -1))
        first, *more = (array.numpy() for array in rows.arrays.values())
        numbers = more[0] if more else first  # of features, the strengths are behind the indices
        if numbers.max(initial=-math.inf) > largest:
            place = int(numbers.argmax())
            largest = float(numbers.flat[place])
            index = int(first.flat[place]) if more else place % first.shape[1]
        seen[rows.words] = count + len(rows), largest, index

    def end(self, request: Request) -> Any:
        """Write the line."""
        seen = self._seen.pop(request, {})
        reads = [
            f"{' '.join(words)}: {count} rows" + f", largest {largest:.4g} at {index}" * (index >= 0)
            for words, (count, largest, index) in seen.items()
        ]
        if reads[_READS:]:
            reads[_READS:] = [f"{len(reads) - _READS} more reads"]
        about = f"{len(request.tokens)} tokens, {request.finish}"
        logger.info("request %s, choice %d (%s): %s", show(request.id), request.choice, about, "; ".join(reads))

    def drop(self, request: Request) -> None:
        """Forget its numbers."""
        self._seen.pop(request, None)
