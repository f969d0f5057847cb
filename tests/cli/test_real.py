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

from saesteer.commands.demo import whole
from saesteer.commands.embedded import GALLERY, clamp

CASES = json.loads(GALLERY.read_text())["cases"]
WIDE = {**os.environ, "COLUMNS": "200"}


def test_demo_changes_the_models_mind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saesteer", "demo"], capture_output=True, text=True, env=WIDE, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("├") : done.stdout.index("╰")]
    for case, rows in zip(CASES, table.split("├")[1:], strict=True):
        cells = [line.split("│") for line in rows.splitlines() if line.startswith("│")]
        named, plain, clamped = (" ".join(" ".join(row[column] for row in cells).split()) for column in (1, 2, 3))
        assert f"feature {case['feature']} × {case['value']:g}" in named and case["question"] in named
        assert (plain, clamped) == (" ".join(case["plain"].split()), " ".join(steered(case).split()))
        assert case["label"].split(",")[0] in clamped.lower() and case["label"].split(",")[0] not in plain.lower()
        assert {plain[-1], clamped[-1]} <= set(".!?"), "whole sentences"
    *_, last = done.stdout.splitlines()
    python = os.path.relpath(sys.executable)
    assert last.strip() in ("saesteer serve demo", f"{python} -m saesteer serve demo")
    assert "INFO" not in done.stdout + done.stderr  # vLLM is silent


def steered(case: dict[str, Any]) -> str:
    """Its stored answer."""
    return "".join(piece for piece, _ in case["steered"])


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
def test_serve_demo_answers_as_the_playground_has_stored(server: str) -> None:
    """With the fields that the page sends."""
    sampling = {"temperature": 0, "repetition_penalty": 1.1, "max_tokens": 64}
    for case in CASES:
        body = {"model": "demo", "messages": [{"role": "user", "content": case["question"]}], **sampling}
        spec = clamp(case["dictionary"], case["feature"], case["value"])
        for sent, stored in ((body, case["plain"]), ({**body, "saesteer": spec}, steered(case))):
            status, answer = post(server, sent)
            assert (status, whole(answer["choices"][0]["message"]["content"])) == (200, stored)
    spec["edits"][0]["feature"] = 9216
    status, answer = post(server, {**body, "saesteer": spec})
    assert status == 400
    assert "saesteer.edits[0].feature" in json.dumps(answer)
