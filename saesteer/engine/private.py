"""Folders that no other user of this machine may use. Knows not what is in them, and imports no torch and no numpy.

A name below /tmp is anybody's again once a cleaner has removed an idle folder: whoever makes it anew says what is in
it, and where its links lead. So who uses such a folder looks at it each time, and names files from its descriptor.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def open_private(folder: str | Path) -> int:
    """A descriptor of a folder, from which its files are named (``dir_fd``).

    Raises:
        FileNotFoundError: it does not exist.
        PermissionError: it belongs to another user, others may use it, or it is a link.
        OSError: it cannot be opened.
    """
    refused = PermissionError(errno.EPERM, "its folder is not this user's alone", str(folder))
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # a link, too
        raise refused from None
    about = os.fstat(found)
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        os.close(found)
        raise refused
    return found


@contextmanager
def private(folder: str | Path, *, make: bool = False) -> Iterator[int]:
    """As ``open_private``, closed at the end.

    Args:
        folder: its path.
        make: whether it is made if it does not exist.
    """
    if make:
        Path(folder).mkdir(mode=0o700, exist_ok=True)
    found = open_private(folder)
    try:
        yield found
    finally:
        os.close(found)


def open_in(folder: int, name: str, mode: str) -> IO[Any]:
    """Opens a file of a folder, as ``open``; a new one is this user's alone.

    Raises:
        OSError: it cannot be opened.
    """
    return open(name, mode, opener=lambda path, flags: os.open(path, flags, 0o600, dir_fd=folder))
