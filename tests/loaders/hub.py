"""Hubs on this machine, each a folder of repositories: one over HTTP, which counts bytes, and one without a server."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub.utils._paths import filter_repo_objects

SHA = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves ``root/org/repo``; remembers how many bytes of each file it has sent."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent: dict[str, int] = {}
        self.revisions: set[tuple[str, str]] = set()  # repositories, and what was asked for by name

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = json.loads(asked)["paths"] if asked.startswith("{") else re.findall(r"paths=([^&]*)", asked)
        repo = re.match(r"/api/models/([^/]+/[^/]+)/paths-info/", self.path)
        assert repo, self.path
        files = self._files(repo[1])
        self._json([files[unquote(path)] for path in paths if unquote(path) in files])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.revisions |= {*re.findall(r"([^/]+/[^/]+)/(?:revision|tree|resolve)/([^/]+)", path)}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            files = self._files(found[1])
            self._json({"id": found[1], "sha": SHA, "siblings": [{"rfilename": name} for name in files]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
            self._json([one for name, one in self._files(found[1]).items() if name.startswith(found[2])])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path):
            self._file(found[2], self.server.root / found[1] / found[2])
        else:
            self._answer(404, b"{}")

    def _files(self, repo: str) -> dict[str, Any]:
        root = self.server.root / repo
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return {
            name: {"type": "file", "path": name, "size": (root / name).stat().st_size, "oid": SHA} for name in names
        }

    def _file(self, name: str, path: Path) -> None:
        if not path.is_file():
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(span[1]), min(size, int(span[2] or size - 1) + 1)) if span else (0, size)
        more = {"ETag": f'"{SHA}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if span:
            more["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with path.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start) if self.command != "HEAD" else b""
        self.server.sent[name] = self.server.sent.get(name, 0) + len(content)
        self._answer(206 if span else 200, content, more, length=end - start)

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(
        self, status: int, content: bytes, more: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (more or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """A hub with the repositories below a folder."""
    with Hub(root) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class FakeHub:
    """Stands in for the hub: a folder per repository; gives, and records, only what the patterns allow."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.given: list[str] = []  # at last
        self.fetched: list[list[str]] = []  # each time

    def folder(self, repo: str, revision: str = "") -> Path:
        """Where the files of a revision are; of the default branch without one."""
        return self.root / (f"{repo}@{revision}" if revision else repo)

    def list_repo_files(self, repo: str, revision: str = "") -> list[str]:
        source = self.folder(repo, revision)
        if not source.is_dir():
            raise huggingface_hub.errors.EntryNotFoundError(f"404: {repo}\nmore lines")
        return sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())

    def snapshot_download(
        self,
        repo: str,
        *,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
        revision: str = "",
        local_files_only: bool = False,
    ) -> str:
        snapshot = self.root / f"models--{repo.replace('/', '--')}" / "snapshots" / (revision or "abc")
        if local_files_only:
            return str(snapshot)
        names = self.list_repo_files(repo, revision)
        self.given = sorted(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        self.fetched.append(self.given)
        snapshot.mkdir(parents=True, exist_ok=True)
        for name in self.given:
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            if not (snapshot / name).exists():  # the real one downloads once, too
                (snapshot / name).write_bytes((self.folder(repo, revision) / name).read_bytes())
        return str(snapshot)
