"""Digests that are kept: right whatever happens to the file or to the cache, and hashed once where nothing does."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saesteer.loaders import cache

KEPT = "digests.json"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed. Every file is large, and at rest as soon as it is written."""
    monkeypatch.setenv("SAESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_seen", {})
    monkeypatch.setattr(cache, "_LARGE", 0)
    monkeypatch.setattr(cache, "_SETTLED", -60.0)
    found: list[str] = []
    file_digest = hashlib.file_digest

    def counted(stream: Any, name: Any) -> Any:
        found.append(Path(stream.name).name)
        return file_digest(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return found


def write(file: Path, content: bytes = b"weights") -> Path:
    file.write_bytes(content)
    return file


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would begin."""
    monkeypatch.setattr(cache, "_seen", {})


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_is_hashed_once_a_process_and_a_large_one_once_a_machine(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a")
    assert [cache.digest_of(file) for _ in range(3)] == [sha256(file)] * 3
    assert read == ["a"]
    forget(monkeypatch)
    assert cache.digest_of(file) == sha256(file)
    assert read == ["a"]
    # A small one is not worth the cache, and is hashed once a process as well.
    monkeypatch.setattr(cache, "_LARGE", 100)
    small = write(tmp_path / "b", b"x" * 99)
    for _ in range(2):
        assert [cache.digest_of(small) for _ in range(3)] == [sha256(small)] * 3
        forget(monkeypatch)
    assert read == ["a", "b", "b"]
    assert len(json.loads((tmp_path / "cache" / KEPT).read_text())) == 1


def test_a_file_that_takes_anothers_place_is_another(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, in the same inode, with the modification time put back."""
    file = write(tmp_path / "a", b"one")
    os.utime(file, ns=(10**18, 10**18))
    first = cache.digest_of(file), file.stat().st_ino
    while file.stat().st_ctime_ns == (changed := os.stat(write(tmp_path / "clock")).st_ctime_ns):
        pass
    write(file, b"two")
    os.utime(file, ns=(10**18, 10**18))
    assert file.stat().st_ctime_ns >= changed
    assert (file.stat().st_ino, file.stat().st_size, file.stat().st_mtime_ns) == (first[1], 3, 10**18)
    assert cache.digest_of(file) == sha256(file) != first[0]
    forget(monkeypatch)
    assert cache.digest_of(file) == sha256(file)


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, counted = write(tmp_path / "a"), hashlib.file_digest

    def meanwhile(stream: Any, name: Any) -> Any:
        found = counted(stream, name)
        write(file, b"longer than before")
        return found

    monkeypatch.setattr(hashlib, "file_digest", meanwhile)
    cache.digest_of(file)
    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert cache.digest_of(file) == sha256(file)


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    files = [write(tmp_path / str(n), str(n).encode()) for n in range(20)]
    code = "import sys; from pathlib import Path; import saesteer.loaders.cache as cache\n"
    code += "cache._LARGE = 0; cache._SETTLED = -60\n"
    code += "for name in sys.argv[1:]: print(cache.digest_of(Path(name)))"
    environment = {**os.environ, "SAESTEER_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, *map(str, files)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in running:
        assert one.communicate()[0].split() == [sha256(file) for file in files]
        assert one.returncode == 0
    kept = json.loads((tmp_path / "cache" / KEPT).read_text())
    assert kept
    assert set(kept.values()) <= {sha256(file) for file in files}
    assert os.listdir(tmp_path / "cache") == [KEPT]
