"""What saesteer keeps on this machine from one process to the next: where, and the digests of large files.

Knows no weights and no models. Whatever is missing or broken here costs time and nothing else.
"""

import hashlib
import json
import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_FILE = "digests.json"
_MOST = 256  # digests that the file holds; the newest stand last
_MOST_BYTES = 1 << 20  # of the file that are read; 256 digests are 40 KB
_LARGE = 64 << 20  # bytes; a smaller file is hashed in 50 ms
_SETTLED = 2.0  # seconds since the last change; file systems tell times in steps of up to so much
_SHA256 = re.compile(r"[0-9a-f]{64}")

_seen: dict[str, str] = {}  # state of a file → digest, of this process


def cache_dir() -> Path:
    """Where saesteer keeps what it made: ``SAESTEER_CACHE``, else ``saesteer`` in the user's cache directory.

    Raises:
        RuntimeError: nobody says where the user's home is.
    """
    if own := os.environ.get("SAESTEER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "saesteer"


def digest_of(file: Path) -> str:
    """Hex sha256 of a file's content, as `sha256sum` prints it; 1.4 GB/s measured on a CPU with SHA instructions.

    The content is read once a process, and that of a large file once a machine, as long as device, inode, size and
    times stay the same. Among these is the time of the last change (ctime), which nobody can set: a file that comes
    into another's place with its size and modification time is a new one. What changed a moment ago may change again
    within the same tick of the clock, so its digest is not kept.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        state, large = _state(stat), stat.st_size >= _LARGE
        found = _seen.get(state) or (_kept().get(state) if large else None)
        if found is None:
            settled = time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            if not settled:
                return found
            if large:
                _keep(state, found)
        _seen[state] = found
    return found


def _state(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _kept() -> dict[str, str]:
    """What the file holds; nothing where there is none, or it is broken."""
    try:
        with (cache_dir() / _FILE).open("rb") as stream:
            found = json.loads(stream.read(_MOST_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {state: one for state, one in found.items() if isinstance(one, str) and _SHA256.fullmatch(one)}


def _keep(state: str, digest: str) -> None:
    """Add a digest to the file, which appears whole or not at all.

    Of two processes that do so at once one may lose what it added: then the content is read once more.
    """
    kept = {**_kept(), state: digest}
    text = json.dumps(dict(list(kept.items())[-_MOST:]), indent=0)
    with suppress(OSError, RuntimeError):
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
            made = Path(scratch) / _FILE
            made.write_text(text)
            made.replace(folder / _FILE)
