"""What entries of an answer say of what was read, as a client without our library would take it."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def tensor(entry: Mapping[str, Any]) -> NDArray[np.float32]:
    """The numbers of an entry."""
    assert entry["dtype"] == "float32"
    return np.frombuffer(b64decode(entry["data"]), "<f4").reshape(entry["shape"])


def positions(entry: Mapping[str, Any]) -> list[int]:
    """The positions of an entry, whether they stand in its rows or beside its numbers."""
    return [row["position"] for row in entry["rows"]] if "rows" in entry else [*entry["positions"]]
