"""Files of rows: at each position those of several results, side by side. Knows no engine.

A file's names are the handles of its results (kept.py), so it is there until the last of them is deleted. Its content:

    the length of the text in 8 bytes, and the text: JSON, which says where rows are, and what each handle is
    the positions of the results, and for each row its place in this file, int64
    from ``start`` on, rows of ``stride`` bytes: one for each position that was declared, up to the last that was read,
    or those that a reduction has made

The rows come first, and the rest once the answer has ended. Whoever fetches a handle gets its columns as safetensors.
"""

import errno
import io
import json
import math
import os
import stat
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from saesteer.engine.filer import LACKING, put
from saesteer.engine.private import open_in, private
from saesteer.language.fields import Fields

_PAGE = 4096
_WORDS = 512  # bytes of the text for each result, beside what the answer says of it
_NUMBERS = 48  # bytes for each row: two positions and a place, and in the text a message's number and its tokens
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors calls them


@dataclass(frozen=True)
class Layout:
    """Of the rows of several results that are read alike."""

    abouts: Sequence[Fields]  # what the answer says of each result
    rows: int  # that there may be
    stride: int  # bytes of a row: those of all results

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.stride

    @cached_property
    def start(self) -> int:
        """Byte of the first row."""
        text = _WORDS * len(self.abouts) + 2 * len(json.dumps([*self.abouts]))
        return -(-(text + _NUMBERS * self.rows) // _PAGE) * _PAGE


class Spool:
    """The file of the results of one readout; given up when nobody holds it.

    Args:
        folder: of the results.
        handles: of each.
        layout: of their rows.
    """

    def __init__(self, folder: Path, handles: Sequence[str], layout: Layout) -> None:
        self.layout, self._start, self._handles = layout, layout.start, handles
        self._names = [f"{folder}/{handle}" for handle in handles]
        self._path = Path(f"{self._names[0]}.{os.getpid()}.{len(handles)}")
        self._give_up = weakref.finalize(self, remove, [self._path])
        self._error: OSError | None = None
        self.width = layout.stride // len(handles)  # bytes of one result's row

    def taken(self, folder: int) -> Self:
        """Itself, once it has made the file; it takes no space on the disk, but others count its size.

        Args:
            folder: a descriptor of the folder of results.

        Raises:
            OSError: it cannot be made.
        """
        with open_in(folder, self._path.name, "xb") as file:
            file.truncate(self._start + self.layout.size)
        return self

    @property
    def address(self) -> list[Any]:
        """As a worker's Sink takes it."""
        return [str(self._path), self._start, self.layout.rows]

    def write(self, places: Iterable[tuple[int, int]], data: bytes) -> None:
        """Write rows that have come here. If that fails, ``keep`` says so.

        Args:
            places: ascending, first and number of the rows.
            data: the rows.
        """
        layout, rest = self.layout, memoryview(data)
        try:
            with private(self._path.parent) as folder, open_in(folder, self._path.name, "r+b") as file:
                for first, rows in places:
                    fits = max(0, min(rows, layout.rows - first))
                    put(file.fileno(), self._start + layout.stride * first, [rest[: layout.stride * fits]])
                    rest = rest[layout.stride * rows :]
        except OSError as error:
            self._error = error

    def keep(self, content: Fields, places: Sequence[int]) -> Sequence[str]:
        """Let the results be fetched: all rows are written.

        Args:
            content: what the answer says of each of them alike: dtype, shape, positions.
            places: the rows of the results in the file.

        Returns:
            Their handles.

        Raises:
            OSError: a row or this could not be written, for instance as the disk is full; the file is given up.
        """
        try:
            with private(self._path.parent) as folder:
                name, (first, *others) = self._path.name, self._handles
                self._finish(folder, content, places)
                for handle in others:
                    os.link(name, handle, src_dir_fd=folder, dst_dir_fd=folder)
                os.rename(name, first, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            self.remove()
            raise
        self._give_up.detach()
        return self._handles

    def remove(self) -> None:
        """Delete the results, or give the file up: nobody will learn of them."""
        remove(map(Path, self._names))
        self._give_up()

    def _finish(self, folder: int, content: Fields, places: Sequence[int]) -> None:
        if self._error is not None:
            raise self._error
        start, stride = self._start, self.layout.stride
        positions = np.array(content["positions"], "<i8")
        about = {
            "start": start,
            "stride": stride,
            "positions": positions.shape,
            "handles": self._handles,
            "abouts": [*self.layout.abouts],
            "content": {name: value for name, value in content.items() if name != "positions"},
        }
        text = json.dumps(about).encode()
        where = [len(text).to_bytes(8, "little"), text, positions.tobytes(), np.array(places, "<i8").tobytes()]
        head = b"".join(where)
        assert len(head) <= start, "there is room for what is said of results"
        if stat.S_IMODE(os.stat(self._path.name, dir_fd=folder).st_mode) == LACKING:
            raise OSError(errno.EIO, "some of its rows could not be written")
        with open_in(folder, self._path.name, "r+b") as file:
            file.write(head)
            # A step behind the last token may still write a row there, which nobody will read.
            file.truncate(start + stride * (max(places, default=-1) + 1))


class View(io.RawIOBase):
    """One result of a file as a file in the form of safetensors.

    Args:
        file: of several, closed with this one.
        head: in front of the numbers.
        rows: where each row begins in the file.
        width: bytes of a row.
    """

    def __init__(self, file: BinaryIO, head: bytes, rows: Sequence[int], width: int) -> None:
        self._file, self._head, self._rows, self._width, self._at = file, head, rows, width, 0
        self.size = len(head) + len(rows) * width

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as there is more."""
        into, done = memoryview(buffer).cast("B"), 0
        while done < len(into) and self._at < self.size:
            if self._at < len(self._head):
                piece = self._head[self._at : self._at + len(into) - done]
                into[done : done + len(piece)] = piece
                count = len(piece)
            else:
                row, inside = divmod(self._at - len(self._head), self._width)
                part = into[done : done + self._width - inside]
                count = os.preadv(self._file.fileno(), [part], self._rows[row] + inside)
                if not count:
                    raise OSError(errno.EIO, "a row is missing")
            done += count
            self._at += count
        return done

    def readall(self) -> bytes:
        """All that is left."""
        return self.read(max(0, self.size - self._at)) or b""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """To a byte of the result."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def view(file: BinaryIO, handle: str) -> View:
    """A result's columns of a file, opened, as safetensors."""
    about = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    number, content = about["handles"].index(handle), about["content"]
    positions = np.frombuffer(file.read(8 * math.prod(about["positions"])), "<i8").reshape(about["positions"])
    places = np.frombuffer(file.read(8 * content["shape"][0]), "<i8")
    width = about["stride"] // len(about["handles"]) if len(places) else 0
    begins = (about["start"] + about["stride"] * places + width * number).tolist()
    entry = {**about["abouts"][number], **content, "positions": positions}
    return View(file, head(entry, len(places) * width) + positions.tobytes(), begins, width)


def head(entry: Fields, size: int) -> bytes:
    """What a safetensors file begins with, in front of the positions and ``size`` bytes of activations."""
    positions = entry["positions"].shape
    border = 8 * math.prod(positions)
    others = {name: value for name, value in entry.items() if name not in ("dtype", "shape", "positions")}
    found = {
        "__metadata__": {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in others.items()
        },
        "positions": {"dtype": "I64", "shape": positions, "data_offsets": [0, border]},
        "activations": {
            "dtype": _DTYPES[entry["dtype"]],
            "shape": entry["shape"],
            "data_offsets": [border, border + size],
        },
    }
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)  # the form wants numbers that are aligned
    return len(text).to_bytes(8, "little") + text


def remove(paths: Iterable[Path]) -> None:
    """Delete files, as far as they exist."""
    for path in paths:
        path.unlink(missing_ok=True)
