"""A real `saesteer serve demo` with an admin key, in float32, for the tests of names while serving."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.plugin.conftest import CUDA

KEY = "a-key-of-the-tests"


@contextmanager
def serving(log: Path, *words: str, key: str | None = KEY) -> Iterator[str]:
    """The address of a server, which ends with this."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--gpu-memory-utilization", "0.1"] if CUDA else ["--enforce-eager"]
    command = [sys.executable, "-m", "saesteer", "serve", "demo", "--port", str(port), "--host", "127.0.0.1", *options]
    environment = {name: value for name, value in os.environ.items() if name != "SAESTEER_ADMIN_KEY"}
    if key is not None:
        command += ["--saesteer-admin-key", key]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *words], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
