"""Tensors out of answers and fetched results, and the rows of a chat message. Knows no connection and no torch."""

import json
import math
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saesteer.client.responses import document_of
from saesteer.errors import ARRAYS, ServerError, needs
from saesteer.language.fields import Fields
from saesteer.language.sites import canonical

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # dtypes, as safetensors calls them


def numbers(entry: Fields) -> "NDArray[np.float32]":
    """The numbers of an entry of ``activations`` or ``hidden``, float32 [rows, width], or [rows, sites, width].

    Those of a bfloat16 or float16 tensor are widened, which is exact. The handle of an entry fetches them itself if it
    comes from ``saesteer.LLM``; one from a server is fetched by a client's ``fetch``.

    Raises:
        ServerError: the entry does not hold as many numbers as it says, or has a handle of a server in their place.
    """
    if "data" in entry:
        return _widened(b64decode(entry["data"]), entry["dtype"], entry["shape"])
    handle = entry["handle"]
    if not hasattr(handle, "numbers"):
        raise ServerError(f"the numbers are on the server: fetch the handle {handle} with the client", status=200)
    found: NDArray[np.float32] = handle.numbers()
    return found


def handles_of(entries: Iterable[Fields]) -> list[str]:
    """The handles of the entries of an answer that have a row for each position."""
    return [entry["handle"] for entry in entries if "handle" in entry and "reduce" not in entry]


def result_of(status: int, content: bytes) -> "NDArray[np.float32]":
    """The numbers of a fetched result, a safetensors file, as ``numbers`` has them.

    Raises:
        RequestRefused, ServerError: as ``document_of``, or it is no such file.
    """
    if status != 200:
        document_of(status, content)
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        about = json.loads(content[8:start])["activations"]
        first, last = about["data_offsets"]
        return _widened(content[start + first : start + last], _NAMES[about["dtype"]], about["shape"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ServerError("the server sent something that is no result", status=200) from exc


def _widened(data: bytes, dtype: str, shape: Sequence[int]) -> "NDArray[np.float32]":
    with needs(ARRAYS):
        import numpy as np  # the rest of the client needs none
    if dtype == "bfloat16":
        found = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(data, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32)
    if found.size != math.prod(shape):
        raise ServerError(f"the server sent {found.size} numbers as a tensor of {list(shape)}", status=200)
    return found.reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What one choice has read of the tensors at sites, with every position's row."""

    messages: tuple[Fields, ...]  # role, index, start and end of each chat message, as the answer has them
    _read: Mapping[tuple[str, str], list[tuple[Sequence[int], "NDArray[np.float32]"]]]  # by site and moment

    @classmethod
    def of(cls, report: Fields, fetched: Mapping[str, "NDArray[np.float32]"] | None = None) -> "Capture":
        """The capture of an answer's ``saesteer``, for instance of ``saesteer.LLM``; clients have ``capture``.

        Args:
            report: the answer's fields.
            fetched: by handle, the numbers that are still on a server.

        Raises:
            ServerError: as ``numbers``.
        """
        import numpy as np

        read: dict[tuple[str, str], list[tuple[Sequence[int], NDArray[np.float32]]]] = {}
        for entry in report.get("activations") or ():
            if "reduce" not in entry:
                found = (fetched or {}).get(entry.get("handle", ""))
                rows = numbers(entry) if found is None else found
                sites = [entry["site"]] if isinstance(entry["site"], str) else entry["site"]
                for name, own in zip(
                    sites, np.moveaxis(rows.reshape(len(rows), len(sites), rows.shape[-1]), 1, 0), strict=True
                ):
                    read.setdefault((name, entry["at"]), []).append((entry["positions"], own))
        return cls(tuple(report.get("messages") or ()), read)

    def at(self, site: str, at: str = "before") -> "tuple[NDArray[np.int64], NDArray[np.float32]]":
        """The positions that were read at a site, ascending, and their rows, float32 [positions, width].

        Args:
            site: as in the request.
            at: ``before`` or ``after`` the request's edits there.

        Raises:
            KeyError: nothing was read there, or only reduced.
        """
        import numpy as np

        parts = self._read.get((canonical(site), at))
        if parts is None:
            known = ", ".join(f"{name} ({moment})" for name, moment in self._read)
            raise KeyError(f"nothing was read at {site} ({at}), expected one of: {known or 'nothing was read'}")
        full = [rows for positions, rows in parts if len(positions)] or [parts[0][1]]  # an empty part has no width
        return np.concatenate([np.array(one, dtype=np.int64) for one, _ in parts]), np.concatenate(full)

    def message(self, i: int, site: str, include_generated: bool = False, at: str = "before") -> "NDArray[np.float32]":
        """The rows of a chat message that were read at a site, float32 [tokens, width].

        The slices of all messages concatenate to the rows of the prompt.

        Args:
            i: the index of the message; that behind the last message stands for the generation prompt.
            site: as in the request.
            include_generated: for the last entry, also the tokens that were generated behind it.
            at: as in ``at``.

        Raises:
            IndexError: there is no such message, or the answer names none.
            KeyError: as ``at``.
        """
        places = [one for one in self.messages if one["index"] == i]
        if not places:
            raise IndexError(f"got message {i}, but the answer names {len(self.messages)} of them")
        positions, rows = self.at(site, at)
        inside = positions < 0
        for one in places:
            open_end = include_generated and one is self.messages[-1]
            inside |= (positions >= one["start"]) & (open_end | (positions < one["end"]))
        found: NDArray[np.float32] = rows[inside]
        return found
