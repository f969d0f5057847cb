"""How several API servers of one server share changes of names: through files in a folder that all of them know.

vLLM's API servers are children of one process and have no connection to each other. That process puts an unguessable
word into the environment; it names their folder. A single API server has no folder. Knows neither names nor an engine.

    lock       one server at a time changes names; the file begins with the number of the last change, 8 bytes
    names      what names stand for now, as JSON
    change-N   what change N has put, as long as a name stands for it
    uses-N     how many requests of API server N have used what each change has put, 8 bytes for each change
"""

import asyncio
import atexit
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from saesteer.engine.private import open_in, open_private, private
from saesteer.errors import UnsupportedError

ENV = "SAESTEER_BOARD"  # <process>-<word>
_PLACE = re.compile(r"saesteer-([1-9][0-9]*)-[0-9a-f]{32}")


def announce() -> None:
    """Publish where API servers will meet, in the process that starts them. Its children do not change the place.

    A server that another server or a script has started is no such child, and publishes another place.
    """
    if parent_process() is None:
        _publish()
        _clean()


def _publish() -> str:
    os.environ[ENV] = word = f"{os.getpid()}-{secrets.token_hex(16)}"
    atexit.register(shutil.rmtree, _folder(word), ignore_errors=True)
    return word


def _clean() -> None:
    """Remove the folders of this user's servers that were killed; a living one, in a container, too, has locked its."""
    for folder in Path(tempfile.gettempdir()).glob("saesteer-*"):
        found = _PLACE.fullmatch(folder.name)
        if found and not lives(int(found[1])):
            with suppress(OSError), private(folder) as inside:
                fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def lives(process: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _folder(word: str) -> Path:
    return Path(tempfile.gettempdir(), f"saesteer-{word}")


def meeting_place() -> Path:
    """The folder that the processes of this server share, made if it does not exist; this one's, if none was announced.

    It stays locked as long as this process lives.
    """
    parent, word = parent_process(), os.environ.get(ENV, "")
    own = [os.getpid()] if parent is None else [os.getpid(), parent.pid]
    if not any(word.startswith(f"{pid}-") for pid in own):
        word = _publish()
    folder = _folder(word)
    folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(OSError):  # it is another's, which whoever uses it learns
        fcntl.flock(open_private(folder), fcntl.LOCK_SH)
    return folder


class Board:
    """One process's view.

    Args:
        folder: shared by all processes; made if it does not exist.
        rank: this process's number, from 0.
        count: number of processes.

    Raises:
        UnsupportedError: the folder is not this user's alone.
    """

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._folder = open_private(folder)  # kept: another folder that somebody puts there later is not this one
        except PermissionError as error:
            message = f"{folder} is not this user's alone, so the API servers cannot meet there"
            raise UnsupportedError(message) from error
        # What cleans up /tmp, if it is systemd, leaves alone what somebody has locked.
        fcntl.flock(self._folder, fcntl.LOCK_SH)
        self._lock, *files = (
            os.open(name, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._folder)
            for name in ("lock", *(f"uses-{one}" for one in range(count)))
        )
        self._own, self._all = files[rank], files

    @classmethod
    def of(cls, rank: int, count: int) -> "Board":
        """The board of this server.

        Raises:
            UnsupportedError: the process that started this one has not published a place.
        """
        parent = parent_process()
        if parent is None or not os.environ.get(ENV, "").startswith(f"{parent.pid}-"):
            message = f"{count} API servers cannot register names together, as they were not started by one process"
            raise UnsupportedError(f"{message}; expected --api-server-count 1, or no admin key")
        return cls(_folder(os.environ[ENV]), rank, count)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Keep other processes from changing names meanwhile; a process that dies releases the lock."""
        await asyncio.to_thread(fcntl.flock, self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def newest(self) -> int:
        """The number of the last change; 0 before the first."""
        return _number(self._lock, 0)

    def read(self) -> Any:
        """The state that was posted last."""
        return self._read("names")

    def change(self, number: int) -> Any:
        """What a change has put.

        Raises:
            FileNotFoundError: the name has come to stand for something else.
        """
        return self._read(f"change-{number}")

    def put(self, number: int, found: Any) -> None:
        """Store what a change puts, for ``change``; nobody reads it before the change is posted."""
        self._write(f"change-{number}", found)

    def _read(self, name: str) -> Any:
        with open_in(self._folder, name, "r") as file:
            return json.load(file)

    def _write(self, name: str, found: Any) -> None:
        with open_in(self._folder, name, "w") as file:
            file.write(json.dumps(found))

    def post(self, number: int, state: Any, changes: Collection[int]) -> None:
        """Publish a change; a reader finds either all of it or the previous state.

        Args:
            number: number of the last change.
            state: what ``read`` returns from now on.
            changes: those that a name stands for; the files of all others are deleted.
        """
        self._write("new", state)
        os.replace("new", "names", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.pwrite(self._lock, number.to_bytes(8, "little"), 0)
        for name in os.listdir(self._folder):
            word, _, change = name.partition("-")
            if word == "change" and int(change) not in changes:
                os.unlink(name, dir_fd=self._folder)

    def use(self, change: int) -> None:
        """Count one more request here that has used what a change has put."""
        count = _number(self._own, 8 * change) + 1
        os.pwrite(self._own, count.to_bytes(8, "little"), 8 * change)

    def uses(self, change: int) -> int:
        """How many requests of all servers have used it."""
        return sum(_number(one, 8 * change) for one in self._all)


def _number(file: int, at: int) -> int:
    return int.from_bytes(os.pread(file, 8, at), "little")
