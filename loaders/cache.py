"""The cache directory of this machine, and the digests of large files that it keeps. Knows no weights and no models.

If something is missing or broken here, it costs time and nothing else.
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
_MOST = 256  # digests in the file, the newest last
_MOST_BYTES = 1 << 20  # read from the file; 256 digests are 40 KB
_LARGE = 64 << 20  # bytes; a smaller file is hashed in 50 ms
_SETTLED = 2.0  # seconds since the last change; file systems store times in steps of up to 2 s
_SHA256 = re.compile(r"[0-9a-f]{64}")

_seen: dict[str, str] = {}  # in this process: state of a file → digest


def cache_dir() -> Path:
    """Where saesteer keeps files: ``SAESTEER_CACHE``, else ``saesteer`` in the user's cache directory.

    Raises:
        RuntimeError: the user's home directory is unknown.
    """
    if own := os.environ.get("SAESTEER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "saesteer"


def digest_of(file: Path) -> str:
    """Hex sha256 of a file's content, as `sha256sum` prints it; 1.4 GB/s measured on a CPU with SHA instructions.

    A file is read once a process, a large file once a machine, as long as device, inode, size and times stay the same.
    They include the time of the last change (ctime), which nobody can set: a file that replaces another with the same
    size and modification time counts as new. A file that changed a moment ago may change again within the same tick
    of the clock, so its digest is not kept.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        state = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        large = stat.st_size >= _LARGE
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


def _kept() -> dict[str, str]:
    """The digests in the file; none if it is missing or broken."""
    try:
        with (cache_dir() / _FILE).open("rb") as stream:
            found = json.loads(stream.read(_MOST_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {state: one for state, one in found.items() if isinstance(one, str) and _SHA256.fullmatch(one)}


def _keep(state: str, digest: str) -> None:
    """Adds a digest to the file, which is replaced as a whole.

    If two processes do this at once, one digest may be lost; that file is then read once more.
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
