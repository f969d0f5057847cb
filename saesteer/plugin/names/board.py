"""What the API servers of one server know of each other: numbers in a shared page, and bytes in files beside it.

vLLM's API servers are children of one process and have no line to each other. That process puts a word that nobody can
guess into the environment, which names their folder. A single API server has none. Knows versions by their numbers, and
neither names nor an engine.
"""

import asyncio
import atexit
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal

import numpy as np

from saesteer.errors import UnsupportedError

ENV = "SAESTEER_BOARD"  # <process>-<word>
_HAS, _AT = range(2)  # of each process on the page: one more than the newest version that it has, and since when


def announce() -> None:
    """Say where API servers will meet, in the process that starts them. They leave it as it is, being its children.

    A server that another one has started, or a script, is no such child, and says another place.
    """
    if parent_process() is None:
        os.environ[ENV] = f"{os.getpid()}-{secrets.token_hex(16)}"
        atexit.register(shutil.rmtree, _folder(os.environ[ENV]), ignore_errors=True)


def _folder(word: str) -> Path:
    return Path(tempfile.gettempdir(), f"saesteer-{word}")


class Board:
    """One process's view.

    Args:
        folder: of all processes; made if it is not there.
        rank: of this process, from 0.
        count: of processes.
    """

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise UnsupportedError(f"{folder} belongs to another user, so the API servers cannot meet there")
        self._folder, self._rank, self._count = folder, rank, count
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        page = folder / "page"
        if not page.exists():
            page.write_bytes(bytes(8 * (1 + 2 * count)))
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        numbers = np.memmap(page, np.int64, "r+")
        self._newest, self._said = numbers[:1], numbers[1:].reshape(count, 2)

    @classmethod
    def of(cls, rank: int, count: int) -> "Board":
        """That of this server.

        Raises:
            UnsupportedError: the process that started this one has not said where.
        """
        parent = parent_process()
        if parent is None or not os.environ.get(ENV, "").startswith(f"{parent.pid}-"):
            message = f"{count} API servers cannot register names together, as they were not started by one process"
            raise UnsupportedError(f"{message}; expected --api-server-count 1, or no admin key")
        return cls(_folder(os.environ[ENV]), rank, count)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """While no other process makes a version; the lock goes with a process that dies."""
        await asyncio.to_thread(fcntl.flock, self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def newest(self) -> int:
        """The last version that was posted."""
        return int(self._newest[0])

    def post(self, number: int, wire: str) -> None:
        """Tell the others of a version, in the words that the workers were told."""
        for old in self._folder.glob("change-*"):  # all processes have what it says
            old.unlink()
        self._write(f"change-{number}", wire)
        self._newest[0] = number

    def change(self) -> str:
        """What was posted with the newest version."""
        return (self._folder / f"change-{self.newest}").read_text()

    def report(self, newest: int, at: int) -> None:
        """Say which version this process has, and what the clock was before it looked for a newer one."""
        self._said[self._rank] = newest + 1, at

    def behind(self, at: int = 0) -> list[int]:
        """Processes that do not have the newest version, or have not reported since the clock was at `at`."""
        late = (self._said[:, _HAS] != self.newest + 1) | (self._said[:, _AT] < at)
        return [int(rank) for rank in late.nonzero()[0]]

    def tell(self, versions: Sequence[int], uses: Sequence[Any]) -> None:
        """Say what this process uses: versions, of which only the newest may still be given to requests, and names."""
        self._write(f"uses-{self._rank}", json.dumps({"versions": versions, "uses": uses}))

    def told(self, what: Literal["versions", "uses"]) -> list[Any]:
        """What all other processes have told; they have to have reported before."""
        others = (self._folder / f"uses-{rank}" for rank in range(self._count) if rank != self._rank)
        return [one for other in others for one in json.loads(other.read_text())[what]]

    def _write(self, name: str, text: str) -> None:
        """So that whoever reads it finds all of it, or what was there before."""
        new = self._folder / f"new-{self._rank}"
        new.write_text(text)
        new.replace(self._folder / name)
