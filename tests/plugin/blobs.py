"""What a worker sends of reads, made up from positions, and what an answer says of it. Knows no engine."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from saesteer.engine.brought import Blob
from saesteer.planning.answers import Reported
from saesteer.planning.plan import Readout, Window
from tests.entries import tensor

SITE = "resid_post.3"


def readout(kind: Any, windows: Sequence[Window], **more: Any) -> Reported:
    """A readout by a name of its own."""
    made = Readout(kind, "saesteer.return", SITE, SITE, after=False, windows=tuple(windows), **more)
    return Reported(made, ({"name": f"{kind} {more.get('reduce', '')}".strip()},), "float32")


def row(at: int) -> list[float]:
    """The tensor of a position: whole numbers, whose sums are exact, with maxima at several positions."""
    return [float(at), float(-at), float(at * 7 % 5)]


def strongest(at: int) -> list[int]:
    """Fewer active features at odd positions."""
    return [at % 11, -1] if at % 2 else [at % 11, 11 + at % 3]


def blob(number: int, one: Readout, spans: list[Window]) -> Blob:
    """What the worker sends for these positions."""
    at = [p for lo, hi in spans for p in range(lo, hi)]
    x = np.array([row(p) for p in at], dtype="<f4")
    if one.kind == "features":
        indices = np.array([strongest(p) for p in at], dtype="<i4")
        arrays = [indices, indices.astype("<f4") / 2, x[:, :1]]
    elif one.kind == "probe":
        arrays = [x[:, 0]]
    else:
        arrays = [{"none": x, "mean": x.sum(0), "max": x.max(0), "last": x[-1]}[one.reduce]]
    return [number, [list(span) for span in spans], *(array.astype(array.dtype).tobytes() for array in arrays)]


def inside(windows: Sequence[Window], lo: int, hi: int) -> list[Window]:
    """The positions of these windows from lo on and below hi."""
    return [(max(lo, a), min(hi, b)) for a, b in windows if max(lo, a) < min(hi, b)]


def numbers(entry: Any) -> Any:
    """The rows of an entry."""
    return tensor(entry).tolist()


def of_kind(fields: Any, name: str) -> list[Any]:
    """The activations of that name in an answer."""
    return [one for one in fields["activations"] if one["name"] == name]


class Shelf:
    """A file of rows, in memory, with so many bytes for each of some sites; what is kept goes into a store."""

    def __init__(self, store: list[tuple[Any, bytes]], sites: int, width: int = 16) -> None:
        self.store, self.width, self.size, self.rows = store, width, width * sites, dict[int, bytes]()

    def write(self, places: Iterable[tuple[int, int]], data: bytes) -> None:
        at = 0
        for first, count in places:
            for place in range(first, first + count):
                self.rows[place] = data[at : at + self.size]
                at += self.size
        assert at == len(data)

    def keep(self, content: Any, places: Sequence[int]) -> list[str]:
        sites = self.size // self.width
        for at in range(sites):
            own = slice(self.width * at, self.width * (at + 1))
            self.store.append((dict(content), b"".join(self.rows[place][own] for place in places)))
        return [f"handle {len(self.store) - sites + at}" for at in range(sites)]
