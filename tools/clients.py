"""Runs clients and gateways against a real server, and notes what becomes of a spec and of its report on the way.

    python -m tools.clients [NAME ...]    all, or some of them; then `make tables`

Each client runs in an environment of its own, with its package from PyPI, in three ways: a spec in the body, the same
in a stream, and a module as the model's name. A recorder in front of the server notes what arrives there, and what the
server applied. The server is vLLM's own, with the settings file that SAESTEER_CONFIG names. What is found is stored in
clients.json, from which the table of docs/clients.md is made; tests/clients asks the clients again.
"""

import http.client
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from saesteer.commands.embedded import dictionaries
from saesteer.loaders.cache import cache_dir
from saesteer.model import ensure_model
from tests.bridges.environments import ROOT, environment
from tools.client_scripts import CLIENTS, PRELUDE, Client

STORED = Path(__file__).with_name("clients.json")
OPEN_WEBUI = "0.12.4"
HEADER = "x-saesteer-applied"
SPEC = {"edits": [{"op": "clamp", "dictionary": "demo", "feature": 3497, "value": 2.0, "unit": "max_act"}]}


class Recorder(ThreadingHTTPServer):
    """Stands in front of a server, passes everything on, and keeps what came and what was applied."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=300)
        upstream.request(self.command, self.path, sent or None, dict(self.headers))
        answer = upstream.getresponse()
        with suppress(ValueError):
            body = json.loads(sent)
            self.server.seen.append({"path": self.path, "body": body, "applied": answer.headers.get(HEADER)})
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        while piece := answer.read1(1 << 16):
            self.wfile.write(piece)
            self.wfile.flush()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@contextmanager
def _started(command: list[str], url: str, **environ: str) -> Iterator[str]:
    """A process that serves at an address, once it does."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environ})
        try:
            for _ in range(600):
                assert process.poll() is None, log.seek(0) or log.read()[-4000:].decode()
                with suppress(httpx.TransportError):
                    if httpx.get(url).status_code == 200:
                        break
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def recording() -> Iterator[Recorder]:
    """A recorder in front of a server of the demo's model, whose module `bridge` does what SPEC says."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_now:
        settings = Path(folder, "settings.yaml")
        own = {name: str(file) for name, file in dictionaries().items()}
        settings.write_text(json.dumps({"dictionaries": own, "modules": {"bridge": SPEC}}))
        port = _port()
        words = ["-m", "saesteer.plugin.vllm_cli", "serve", str(ensure_model()), "--served-model-name", "demo"]
        words += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "1024", "--enforce-eager"]
        words += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(200 << 20)]
        server = f"http://127.0.0.1:{port}"
        open_now.enter_context(_started([sys.executable, *words], f"{server}/health", SAESTEER_CONFIG=str(settings)))
        recorder = open_now.enter_context(Recorder(server))
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        try:
            yield recorder
        finally:
            recorder.shutdown()


def _python(client: Client) -> Path:
    return environment(*client.packages) if client.packages else Path(sys.executable)


def open_webui(version: str = OPEN_WEBUI) -> Path:
    """The code of Open WebUI, of whose packages few are needed here; 100 MB, kept."""
    folder = cache_dir() / f"open-webui-{version}"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, f"{folder}.part", f"open-webui=={version}"], check=True)
        Path(f"{folder}.part").rename(folder)
    return folder


def measure(client: Client, recorder: Recorder) -> dict[str, Any]:
    """What becomes of a spec and of its report, by way."""
    python, found = _python(client), dict[str, Any]()
    needs = {"OPEN_WEBUI": str(open_webui())} if "WebUI" in client.name else {}
    key = f"sk-{secrets.token_hex(32)}"  # of a gateway
    given = {
        **os.environ,
        **needs,
        "KEY": key,
        "SPEC": json.dumps(SPEC),
        "MODEL": str(ensure_model()),
        "PYTHONPATH": str(ROOT),
    }
    with ExitStack() as open_now:
        url = recorder.url
        if client.gateway:
            url = f"http://127.0.0.1:{(port := _port())}"
            file = open_now.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
            file.write(client.gateway.replace("URL", recorder.url))
            file.flush()
            command = [
                str(python.with_name("litellm")),
                "--config",
                file.name,
                "--port",
                str(port),
                "--host",
                "127.0.0.1",
            ]
            open_now.enter_context(_started(command, f"{url}/health/liveliness", LITELLM_MASTER_KEY=key))
        for way in client.ways:
            recorder.seen.clear()
            command = [str(python), "-c", PRELUDE + client.script, way]
            done = subprocess.run(
                command, env=given | {"URL": url}, capture_output=True, text=True, timeout=600, check=False
            )
            line = next((one for one in done.stdout.splitlines() if one.startswith("FOUND")), None)
            assert line is not None, f"{client.name}, {way}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
            bodies = [one for one in recorder.seen if "model" in one["body"]]
            arrives = any("saesteer" in one["body"] or one["body"]["model"] == "demo:bridge" for one in bodies)
            steered = any(not (one["applied"] or "0").startswith("0") for one in bodies)
            found[way] = {"arrives": arrives, "steered": steered, **json.loads(line.removeprefix("FOUND"))}
    return found


def stored() -> dict[str, Any]:
    """What was found the last time, by the client's name."""
    return dict(json.loads(STORED.read_text())) if STORED.exists() else {}


def table() -> str:
    """The table of docs/clients.md."""
    known, head = (
        stored(),
        ("client", "tried", "a spec", "a module", "in the answer", "in a stream", "header", "way out"),
    )
    rows = [_row(head), _row(["---"] * len(head))]
    rows += [
        _row((client.name, known[client.name]["tried"], *_words(known[client.name]), client.out)) for client in CLIENTS
    ]
    return "".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _words(found: dict[str, Any]) -> list[str]:
    """The cells of a row that were measured."""

    def word(*yes: bool) -> str:
        return "yes" if all(yes) else "**no**"

    asked = [found[way] for way in ("spec", "stream") if way in found]
    arrives = {one["arrives"] and one["steered"] for one in asked}
    assert len(arrives) == 1, "a spec arrives with streams as without"
    streams = word(found["stream"]["report"]) if "stream" in found else "–"
    header = word(*(one["header"] for one in asked))
    return [word(*arrives), word(found["model"]["steered"]), word(found["spec"]["report"]), streams, header]


def tried(client: Client) -> str:
    """The name and version of what was run."""
    first = client.packages[0] if client.packages else "curl"
    return (
        re.sub(r"\[.*?\]", "", first).replace("==", " ") if "WebUI" not in client.name else f"open-webui {OPEN_WEBUI}"
    )


def main(names: Sequence[str]) -> None:
    """Measure and store."""
    with recording() as recorder:
        for client in CLIENTS:
            if not names or any(name in client.name for name in names):
                known = stored() | {client.name: {"tried": tried(client), **measure(client, recorder)}}
                rows = {one.name: known[one.name] for one in CLIENTS if one.name in known}
                STORED.write_text(json.dumps(rows, indent=1) + "\n")
                print(client.name, json.dumps(known[client.name]))


if __name__ == "__main__":
    main(sys.argv[1:])
