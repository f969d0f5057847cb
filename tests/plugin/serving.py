"""A real `saesteer serve` in a process of its own, for tests over HTTP. Knows no test and no request."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.apart import CUDA as CUDA
from tests.forks import Fork

# A client's idle connection must outlive a busy machine's pauses: a server that closes it drops the next request.
ENVIRONMENT = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}


class Served(httpx.Client):
    """A client of a server on this machine."""

    pid: int  # of the server's first process


@contextmanager
def served(
    arguments: Sequence[str],
    log: Path,
    *,
    keep: bool = True,
    environment: Mapping[str, str] | None = None,
    fork: bool = True,
) -> Iterator[Served]:
    """A client of a server that was started with these arguments; what the server says goes to a file.

    Args:
        arguments: of `saesteer serve`.
        log: the file.
        keep: connections; a new one for each request may reach another API server.
        environment: what is added to that of the tests.
        fork: on a CPU, from a process that has imported vLLM (``tests.forks``).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "saesteer", "serve", *arguments, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--gpu-memory-utilization", "0.1"] if CUDA else ["--enforce-eager"]
    if CUDA and "--kv-cache-memory-bytes" not in arguments:  # measuring what is left fails where neighbours free memory
        command += ["--kv-cache-memory-bytes", str(2 << 30)]
    inherited = {name: value for name, value in os.environ.items() if name != "SAESTEER_ADMIN_KEY"}
    whole = {**inherited, **ENVIRONMENT, **(environment or {})}
    log.write_text("")
    process: Fork | subprocess.Popen[bytes]
    several = "--api-server-count" in arguments  # their metrics meet in files, as prometheus_client decides at import
    if fork and not several and not CUDA:
        process = Fork(command[1:], whole, log)
    else:
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=whole)
    try:
        limits = httpx.Limits(max_keepalive_connections=None if keep else 0)
        with Served(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as client:
            client.pid = process.pid
            _wait(client, process, log)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, as it comes; the mark of its end left out."""
    begin = "data: "
    return [json.loads(line.removeprefix(begin)) for line in response.iter_lines() if line.startswith(begin + "{")]


def _wait(client: httpx.Client, process: "Fork | subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 600  # usually 40 s; a machine that is busy with others has taken 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
