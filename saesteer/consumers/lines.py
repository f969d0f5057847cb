"""The consumer ``logging``: one line for each answer, with norms and strongest features. Keeps no rows."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from saesteer.consumers.consumer import Consumer, Request, Rows
from saesteer.language.fields import show

logger = logging.getLogger("vllm.saesteer.consumers")

_STRONGEST = 5  # features of each read
_READS = 8  # that a line shows


class _Seen:
    """One read of a request, in a few numbers."""

    def __init__(self) -> None:
        self.rows = 0
        self.sum = 0.0  # of norms or scores
        self.top: dict[int | str, float] = {}  # the largest norm or score, or the strongest features

    def add(self, rows: Rows) -> None:
        self.rows += len(rows)
        if rows.kind == "features":
            indices, strengths = (rows.arrays[name].numpy().ravel().tolist() for name in ("indices", "strengths"))
            for index, strength in zip(indices, strengths, strict=True):
                if index >= 0:
                    self.top[index] = max(strength, self.top.get(index, strength))
        else:
            [array] = rows.arrays.values()
            numbers = array.numpy()
            values = numbers[:, 0] if rows.kind == "probe" else np.linalg.norm(numbers.astype(np.float64), axis=1)
            self.sum += float(values.sum())
            self.top["max"] = max(float(values.max()), self.top.get("max", -np.inf))
        self.top = dict(sorted(self.top.items(), key=lambda one: -one[1])[:_STRONGEST])

    def text(self, kind: str) -> str:
        if kind == "features":
            return ", ".join(f"{index} {strength:.4g}" for index, strength in self.top.items()) or "none active"
        what = "score" if kind == "probe" else "norm"
        return f"mean {what} {self.sum / self.rows:.4g}, largest {self.top['max']:.4g}"


class Logging(Consumer):
    """Writes a line to the server's log when an answer ends; it has no options and no parameters."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._seen: dict[Request, dict[tuple[str, ...], _Seen]] = {}

    def take(self, request: Request, rows: Rows) -> None:
        """Add rows to the numbers of their read."""
        self._seen.setdefault(request, {}).setdefault(rows.words, _Seen()).add(rows)

    def end(self, request: Request) -> Any:
        """Write the line."""
        seen = self._seen.pop(request, {})
        told = [f"{' '.join(key)}: {one.rows} rows, {one.text(key[0])}" for key, one in [*seen.items()][:_READS]]
        more = [f"{len(seen) - _READS} more reads"] if len(seen) > _READS else []
        about = f"{len(request.tokens)} tokens, {request.finish}"
        logger.info(
            "request %s, choice %d (%s): %s", show(request.id), request.choice, about, "; ".join([*told, *more])
        )

    def drop(self, request: Request) -> None:
        """Forget its numbers."""
        self._seen.pop(request, None)
