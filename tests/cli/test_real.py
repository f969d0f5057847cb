"""The commands as a newcomer runs them, on the real engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from saesteer.commands import demo

WIDE = {**os.environ, "COLUMNS": "200"}


def test_demo_changes_the_models_mind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saesteer", "demo"], capture_output=True, text=True, env=WIDE, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    plain, clamped = (" ".join(row[column] for row in rows) for column in (2, 3))
    assert "ridge" in clamped
    assert "ridge" not in plain.replace("feature", "")
    assert "serve demo" in done.stdout
    assert "INFO" not in done.stdout + done.stderr  # vLLM is silent


@pytest.mark.slow
@pytest.mark.long  # five engines; test_doctor_run.py runs the command with stand-ins
def test_doctor_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saesteer", "doctor"], capture_output=True, text=True, env=WIDE, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 13
    assert "FAILED" not in done.stdout


@pytest.fixture
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "saesteer", "serve", "demo", "--port", str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


@pytest.mark.slow
def test_serve_demo_answers_what_the_demo_tells_to_send(server: str) -> None:
    [line] = [line for line in demo.next_steps().splitlines() if "curl" in line]
    body = json.loads(line[line.index("{") : line.rindex("}") + 1])
    status, answer = post(server, body)
    assert status == 200
    assert "ridge" in answer["choices"][0]["message"]["content"]
    plain = {key: value for key, value in body.items() if key != "saesteer"}
    status, answer = post(server, plain)
    assert status == 200
    assert "ridge" not in answer["choices"][0]["message"]["content"]
    body["saesteer"]["edits"][0]["feature"] = 9216
    status, answer = post(server, body)
    assert status == 400
    assert "saesteer.edits[0].feature" in json.dumps(answer)
